"""Driving a `CUDABackend` by hand, on a GPU or under the interpreter, as `backend_runs` does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from backend_runs import BackendRunner
from realizar.backends.cuda.device import Family, interpreter_device, open_device
from realizar.backends.cuda.ranks.sums import RankGroup
from realizar.backends.cuda.runner import CUDABackend
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec


def new_backend(
    *, may_sleep: bool = False, without: Iterable[Family] = (), ranks: RankGroup | None = None
) -> CUDABackend:  # fmt: skip
    """On the GPU, or on the processor as if it were one; `without` families of kernels; `ranks` of a rank's part."""
    device = open_device() if torch.cuda.is_available() else interpreter_device()
    device = replace(device, without=device.without | frozenset(without))
    return CUDABackend(device=device, may_sleep=may_sleep, ranks=ranks)


class GPURunner(BackendRunner[CUDABackend]):
    """A model of `new_backend`."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig, hidden_layers: tuple[int, ...] = (),
        without: Iterable[Family] = (), ranks: RankGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(new_backend(without=without, ranks=ranks), spec, checkpoint, config, "cuda", hidden_layers)

    def read_logits(self, tokens: list[int]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.backend.logits(tokens).cpu().numpy().copy()
        return logits


def load_gpu_runner(path: Path, config: EngineConfig, context_length: int | None = None) -> GPURunner:
    checkpoint = open_checkpoint(path)
    return GPURunner(build_spec(checkpoint, context_length), checkpoint, config)
