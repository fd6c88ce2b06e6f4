"""All ranks of a model on the CPU, one on a thread, which add up their sums through the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_runs import BackendRunner
from realizar.backends.cpu.plan import rank_config
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.rank_memory import RankMemory
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.models.shard import shard
from realizar.models.spec import ModelSpec
from resolving import resolved


class _Rank(BackendRunner[CPUBackend]):
    def read_logits(self, tokens: list[int]) -> NDArray[np.float32]:
        return self.backend.logits(tokens).copy()


class Ranks:
    """Close it. What one rank raises lets no other wait."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig, ranks: int) -> None:
        settled = resolved(spec, checkpoint, replace(config, tensor_parallel=ranks, threads=ranks), "cpu")
        self.memory = RankMemory(ranks, rank_config(spec, checkpoint, settled)[0])
        self._pool = ThreadPoolExecutor(ranks)

        def load(rank: int) -> _Rank:
            return _Rank(CPUBackend(ranks=self.memory), shard(spec, rank, ranks, checkpoint), checkpoint, config, "cpu")

        self.ranks = [load(rank) for rank in range(ranks)]

    def all(self, work: Callable[[_Rank], Any]) -> list[Any]:
        """What each rank makes of the same work."""

        def run(rank: _Rank) -> Any:
            try:
                return work(rank)
            except BaseException:
                self.memory.break_off()
                raise

        return list(self._pool.map(run, self.ranks))

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] = ()) -> NDArray[np.float32]:
        """[tokens, vocab_size], the same on all ranks."""
        first, *others = self.all(lambda rank: rank.logits(token_ids, chunks))
        for other in others:
            np.testing.assert_array_equal(other, first)
        return np.asarray(first)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._pool.shutdown()
        self.memory.close()
