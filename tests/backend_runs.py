"""Driving a backend by hand: requests in chunks, in any batch and over any blocks, and the logits they give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Backend, ForwardInput
from realizar.batch import LogprobQuery
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import Device, EngineConfig
from realizar.models.spec import ModelSpec
from realizar.outputs import TokenLogprobs
from realizar.request import Pooling
from resolving import resolved
from step_inputs import results_of, scheduled_row, step_input

LOGITS_AT_ONCE = 32

B = TypeVar("B", bound=Backend)


@dataclass
class Request:
    """Tokens that go through one row, the blocks of each cache group that they lie in, and how far they are."""

    row: int
    token_ids: Sequence[int]
    blocks: list[NDArray[np.int32]]
    computed: int = 0
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    def values(self) -> NDArray[np.float32]:
        """[computed tokens, vocab_size]."""
        return np.concatenate(self.logits)


class BackendRunner(ABC, Generic[B]):
    """A loaded model and the logits of every token that goes through it.

    Args:
        backend: that nothing is loaded in. device: its name in a configuration.
        hidden_layers: as in `ResolvedConfig`.
    """

    def __init__(
        self, backend: B, spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig, device: Device,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.spec, self.config, self.backend = spec, config, backend
        settled = resolved(spec, checkpoint, config, device)
        self.backend.load(spec, checkpoint, replace(settled, hidden_layers=hidden_layers))
        self.capacity = self.backend.capacity()
        self.groups = len(self.capacity.num_blocks)

    @abstractmethod
    def read_logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """[tokens, vocab_size] of at most LOGITS_AT_ONCE of the last step's tokens, in memory of its own."""

    def request(
        self, row: int, token_ids: Sequence[int], rng: np.random.Generator | None = None, first: int = 0
    ) -> Request:
        """A request with blocks of its own from `first` on, in an order drawn from `rng` if given.

        Where a group of windowed layers has fewer blocks, later tokens take those that their window has left.
        """
        count = -(-len(token_ids) // self.config.block_size)
        blocks = []
        for group, available in zip(self.spec.cache_groups(), self.capacity.num_blocks, strict=True):
            own = np.arange(first, first + count, dtype=np.int32)
            if first + count > available:
                if first or group.window is None:
                    raise ValueError(f"{first + count} blocks of {available}")
                own %= available
            blocks.append(own if rng is None else rng.permutation(own).astype(np.int32))
        return Request(row, token_ids, blocks)

    def step(self, parts: Sequence[tuple[Request, int]], sample: bool = False) -> list[int]:
        """Take the next so many tokens of every request in one step, and keep their logits.

        Returns what is sampled after each request's last token, if `sample`: its row is open, and it need not be used.
        """
        step = self.input_of(parts, sample)
        found = self.backend.submit(step).result()
        for start, (request, count) in zip(step.columns.starts, parts, strict=False):
            request.computed += count
            request.logits.append(self._logits(start, count))
        return [token_id for each in results_of(found) for token_id in each.token_ids]

    def input_of(self, parts: Sequence[tuple[Request, int]], sample: bool = False) -> ForwardInput:
        """The arrays of a step of the next so many tokens of every request."""
        size, rows = self.config.block_size, []
        tables = [np.zeros((len(parts), max(len(r.blocks[g]) for r, _ in parts)), np.int32) for g in range(self.groups)]
        slots: list[list[NDArray[np.int32]]] = [[] for _ in range(self.groups)]
        for index, (request, count) in enumerate(parts):
            left = len(request.token_ids) - request.computed
            if count > left:
                raise ValueError(f"{count} tokens of row {request.row}, which has {left} left")
            places = np.arange(request.computed, request.computed + count, dtype=np.int32)
            tokens = request.token_ids[request.computed : request.computed + count]
            rows.append(scheduled_row(request.row, tokens, request.computed, sample))
            for group, table in enumerate(tables):
                blocks = request.blocks[group]
                table[index, : len(blocks)] = blocks
                slots[group].append(blocks[places // size] * size + places % size)
        joined = [np.concatenate(part).astype(np.int32) for part in slots]
        return step_input(rows, joined, tables)

    def _logits(self, first: int, count: int) -> NDArray[np.float32]:
        tokens = list(range(first, first + count))
        parts = [tokens[i : i + LOGITS_AT_ONCE] for i in range(0, count, LOGITS_AT_ONCE)]
        return np.concatenate([self.read_logits(part) for part in parts])

    def score(self, token_ids: Sequence[int], queries: tuple[LogprobQuery, ...]) -> tuple[TokenLogprobs, ...]:
        """The backend's answer to `queries` on all tokens in one step."""
        positions = np.arange(len(token_ids), dtype=np.int32)
        table = np.arange(-(-len(token_ids) // self.config.block_size), dtype=np.int32)[None]
        row = scheduled_row(0, token_ids, logprob_queries=queries)
        step = step_input([row], (positions,) * self.groups, (table,) * self.groups)
        return results_of(self.backend.submit(step).result())[0].queried

    def pooled(self, token_ids: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
        """The pooled hidden state of a prompt that is read in one step: float32 [hidden_size]."""
        positions = np.arange(len(token_ids), dtype=np.int32)
        table = np.arange(-(-len(token_ids) // self.config.block_size), dtype=np.int32)[None]
        row = scheduled_row(0, token_ids, pooling=pooling)
        step = step_input([row], (positions,) * self.groups, (table,) * self.groups)
        found = results_of(self.backend.submit(step).result())[0].pooled
        assert found is not None
        return found

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
