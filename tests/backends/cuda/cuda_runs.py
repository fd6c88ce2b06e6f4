"""Driving a `CUDABackend` by hand, on a GPU or under the interpreter: requests in chunks, and the logits they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device import interpreter_device, open_device
from realizar.backends.cuda.runner import CUDABackend
from realizar.batch import LogprobQuery
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec
from realizar.outputs import TokenLogprobs
from resolving import resolved
from step_inputs import scheduled_row, step_input

LOGITS_AT_ONCE = 32


@dataclass
class Request:
    """Tokens that go through one row, the blocks that they lie in, and how far they are."""

    row: int
    token_ids: Sequence[int]
    blocks: NDArray[np.int32]
    computed: int = 0
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    def values(self) -> NDArray[np.float32]:
        """[computed tokens, vocab_size]."""
        return np.concatenate(self.logits)


class GPURunner:
    """A loaded model and the logits of every token that goes through it."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self.spec, self.config = spec, config
        device = open_device() if torch.cuda.is_available() else interpreter_device()
        self.backend = CUDABackend(device=device)
        self.backend.load(spec, checkpoint, resolved(spec, checkpoint, config, "cuda"))
        self.capacity = self.backend.capacity()
        self.groups = len(self.capacity.num_blocks)

    def request(
        self, row: int, token_ids: Sequence[int], rng: np.random.Generator | None = None, first: int = 0
    ) -> Request:
        """A request with blocks of its own from `first` on, in an order drawn from `rng` if given."""
        blocks = first + np.arange(-(-len(token_ids) // self.config.block_size), dtype=np.int32)
        return Request(row, token_ids, blocks if rng is None else rng.permutation(blocks).astype(np.int32))

    def step(self, parts: Sequence[tuple[Request, int]], sample: bool = False) -> list[int]:
        """Take the next so many tokens of every request in one step, and keep their logits.

        Returns what is chosen after each request's last token, if `sample`: its row is open, and it need not be used.
        """
        size, rows = self.config.block_size, []
        slots = []
        table = np.zeros((len(parts), max(len(request.blocks) for request, _ in parts)), np.int32)
        for index, (request, count) in enumerate(parts):
            left = len(request.token_ids) - request.computed
            if count > left:
                raise ValueError(f"{count} tokens of row {request.row}, which has {left} left")
            places = np.arange(request.computed, request.computed + count, dtype=np.int32)
            tokens = request.token_ids[request.computed : request.computed + count]
            rows.append(scheduled_row(request.row, tokens, request.computed, sample))
            table[index, : len(request.blocks)] = request.blocks
            slots.append(request.blocks[places // size] * size + places % size)
        joined = np.concatenate(slots).astype(np.int32)
        step = step_input(rows, (joined,) * self.groups, (table,) * self.groups)
        found = self.backend.submit(step).result()
        for start, (request, count) in zip(step.query_starts, parts, strict=False):
            request.computed += count
            request.logits.append(self._logits(start, count))
        return [token_id for each in found.rows for token_id in each.token_ids]

    def _logits(self, first: int, count: int) -> NDArray[np.float32]:
        tokens = list(range(first, first + count))
        parts = [tokens[i : i + LOGITS_AT_ONCE] for i in range(0, count, LOGITS_AT_ONCE)]
        return np.concatenate([self.backend.logits(part).cpu().numpy().copy() for part in parts])

    def score(self, token_ids: Sequence[int], queries: tuple[LogprobQuery, ...]) -> tuple[TokenLogprobs, ...]:
        """The backend's answer to `queries` on all tokens in one step."""
        positions = np.arange(len(token_ids), dtype=np.int32)
        table = np.arange(-(-len(token_ids) // self.config.block_size), dtype=np.int32)[None]
        row = scheduled_row(0, token_ids, logprob_queries=queries)
        step = step_input([row], (positions,) * self.groups, (table,) * self.groups)
        return self.backend.submit(step).result().rows[0].queried

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] = ()) -> NDArray[np.float32]:
        """[tokens, vocab_size]: chunks of the given sizes, then token by token; all at once by default."""
        request = self.request(0, token_ids)
        for chunk in chunks or (len(token_ids),):
            self.step([(request, chunk)])
        while request.computed < len(token_ids):
            self.step([(request, 1)])
        return request.values()

    def close(self) -> None:
        self.backend.shutdown()


def load_gpu_runner(path: Path, config: EngineConfig, context_length: int | None = None) -> GPURunner:
    checkpoint = open_checkpoint(path)
    return GPURunner(build_spec(checkpoint, context_length), checkpoint, config)
