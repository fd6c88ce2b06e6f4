"""The numpy models of all ranks of a model, one on a thread, which add up their sums."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.shard import shard
from realizar.models.spec import ModelSpec
from reference_model import ReferenceModel
from reference_tensors import load_tensors

_WAIT_S = 60  # for the other ranks


def sharded_logits(
    spec: ModelSpec, checkpoint: Checkpoint, ranks: int, token_ids: Sequence[int], dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """[tokens, vocab_size]: the logits of all ranks' ids, one after another.

    Raises:
        UnsupportedModelError: so many ranks do not divide the model.
    """
    shards = [shard(spec, rank, ranks, checkpoint) for rank in range(ranks)]
    barrier, parts = Barrier(ranks), [np.zeros(0)] * ranks

    def logits(rank: int) -> NDArray[Any]:
        def add_up(part: NDArray[Any]) -> NDArray[Any]:
            parts[rank] = part
            barrier.wait(_WAIT_S)
            total: NDArray[Any] = np.sum(parts, axis=0, dtype=part.dtype)
            barrier.wait(_WAIT_S)
            return total

        try:
            own = shards[rank]
            return ReferenceModel(own, load_tensors(own, checkpoint), dtype, add_up).logits(token_ids)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return np.concatenate(list(pool.map(logits, range(ranks))), axis=-1)
