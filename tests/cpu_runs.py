"""Driving a `CPUBackend` by hand, as `backend_runs` does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backend_runs import BackendRunner
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS, host_features, index_of, supported
from realizar.backends.cpu.runner import CPUBackend
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec


class Runner(BackendRunner[CPUBackend]):
    """A model on the CPU."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig, hidden_layers: tuple[int, ...] = ()
    ) -> None:
        super().__init__(CPUBackend(), spec, checkpoint, config, "cpu", hidden_layers)

    def read_logits(self, tokens: list[int]) -> NDArray[np.float32]:
        return self.backend.logits(tokens).copy()


def load_runner(path: Path, config: EngineConfig, context_length: int | None = None) -> Runner:
    checkpoint = open_checkpoint(path)
    return Runner(build_spec(checkpoint, context_length), checkpoint, config)


def skip_unless_supported(instruction_set: str) -> None:
    """Skip a test of an instruction set that this processor lacks."""
    if not supported(INSTRUCTION_SETS[index_of(instruction_set)], host_features()):
        pytest.skip(f"this processor has no {instruction_set}")
