"""Parts of the KV cache, on any backend: blocks that a request takes, and the share of snapshots of states."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from realizar.backends.machine import free_memory_bytes
from realizar.backends.resolved_config import ResolvedConfig
from realizar.errors import CapacityError
from realizar.models.spec import CacheGroup
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_NEARLY = 0.99  # whole blocks do not fill a size to the last byte
_SNAPSHOT_TOKENS = 256  # of the cache, for each of which there is a snapshot at most
_SNAPSHOT_SHARE = 0.5  # of the cache's bytes, at most
WHOLE_REQUESTS = 4
"""Requests of the whole context that the cache has room for by default, if they are."""
HOST_SHARE = 8
"""Snapshots of states take one of so many parts of the host's free memory by default."""
_MOST_ON_HOST = 4 << 30  # bytes
_FEWEST_ON_HOST = 4  # fewer are not worth what a load measures for them


def blocks_per_request(groups: Iterable[CacheGroup], config: ResolvedConfig) -> list[int]:
    """Blocks of each cache group for a request of the whole context: of a window those that it and a step take."""
    size, counts = config.block_size, []
    for group in groups:
        tokens = config.context_length
        if group.window is not None:
            tokens = min(tokens, group.window + config.max_step_tokens + size)
        counts.append(-(-tokens // size) + 1)
    return counts


def most_requests(config: ResolvedConfig) -> float:
    """Requests of the whole context whose blocks are of use at once.

    Without a prefix cache those that run. With one the blocks of ended requests are of use too, so that there may be as
    many as a configured size holds; by default a few conversations of one that talks to them in turn.
    """
    if not config.prefix_cache:
        return config.max_running
    return max(config.max_running, WHOLE_REQUESTS) if config.kv_cache_bytes is None else math.inf


def snapshots_within(limit_bytes: int, request_bytes: int, snapshot_bytes: int, token_bytes: float) -> int:
    """Snapshots of states within the cache's limit, of which the blocks of one request take their part first.

    A sequence goes on from a snapshot and the blocks before it. One for each 256 tokens is more than conversations have
    messages, and of small states that is little: 5 % of LFM2's cache. A large state is that of as many tokens as a
    message has (of Qwen3.5-0.8B, 1,600), so that snapshots for all of them would be the larger part; half is the most.

    `request_bytes` are of a request of the whole context; `snapshot_bytes` 0 keeps none.
    """
    if not snapshot_bytes:
        return 0
    most = min(int(limit_bytes * snapshot_share(snapshot_bytes, token_bytes)), limit_bytes - request_bytes)
    return max(most // snapshot_bytes, 0)


def snapshot_share(snapshot_bytes: int, token_bytes: float) -> float:
    if not snapshot_bytes:
        return 0.0
    return min(snapshot_bytes / (snapshot_bytes + token_bytes * _SNAPSHOT_TOKENS), _SNAPSHOT_SHARE)


def host_snapshots_within(
    config: ResolvedConfig, snapshot_bytes: int, num_snapshots: int, cached_tokens: float = 0.0
) -> int:
    """Snapshots of states in the host's memory, of a device that has `num_snapshots` itself.

    As many as are configured. By default none on the CPU, where they would lie in the same memory, and for a GPU as
    many as fit into a part of the memory that is free: no more than one for each 256 of the `cached_tokens`, as each
    follows a block, and none where the device has nearly as many.
    """
    if not num_snapshots:
        return 0
    if config.host_snapshot_bytes is not None:
        return config.host_snapshot_bytes // snapshot_bytes
    if config.chosen.kind == "cpu":
        return 0
    useful = int(cached_tokens / _SNAPSHOT_TOKENS)
    default_bytes = min(free_memory_bytes() // HOST_SHARE, _MOST_ON_HOST) // config.host_sharers
    count = min(default_bytes // snapshot_bytes, useful)
    return count if min(count, useful - num_snapshots) >= _FEWEST_ON_HOST else 0


def check_one_fits(request_bytes: int, limit_bytes: int, context_length: int) -> None:
    """Raise CapacityError where not even one request of the whole context fits."""
    if request_bytes > limit_bytes:
        raise CapacityError(
            f"the KV cache of one request of {context_length} tokens takes {format_bytes(request_bytes)}, but"
            f" only {format_bytes(limit_bytes)} may be used; lower the context length"
        )


def log_size(config: ResolvedConfig, size_bytes: int, free_bytes: int) -> None:
    """Log where the KV cache is not what was configured, or is more than there was memory for (`free_bytes`).

    Its memory may be taken only as blocks are first written. A model that shares another one's blocks logs nothing.
    """
    if config.kv_blocks is not None:
        return
    if size_bytes > free_bytes:
        _LOG.warning(
            "the KV cache may grow to %s, and %s are free: lower kv_cache_bytes, max_running or the context length",
            format_bytes(size_bytes),
            format_bytes(free_bytes),
        )
    if config.kv_cache_bytes is not None and size_bytes < config.kv_cache_bytes * _NEARLY:
        _LOG.info(
            "the KV cache takes %s of the %s that it may: %d rows of %d tokens fill no more",
            format_bytes(size_bytes),
            format_bytes(config.kv_cache_bytes),
            config.max_running,
            config.context_length,
        )
