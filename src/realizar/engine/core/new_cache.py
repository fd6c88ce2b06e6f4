"""`new_cache` makes the KV cache manager of a loaded backend."""

from __future__ import annotations

from realizar.backends.base import Capacity
from realizar.kv_cache.manager import KVCacheManager
from realizar.models.spec import ModelSpec


def new_cache(
    spec: ModelSpec, capacity: Capacity, *, max_running: int, max_step_tokens: int, prefix_cache: bool
) -> KVCacheManager:
    """The manager of what a backend has. Args: as of `Scheduler`; prefix_cache: blocks are found by their contents."""
    return KVCacheManager(
        [group.kind for group in spec.block_groups()],
        capacity.num_blocks,
        block_size=capacity.block_size,
        num_rows=max_running,
        context_length=capacity.context_length,
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
        has_state=bool(spec.state_layers()),
        num_snapshots=capacity.num_snapshots,
        num_host_snapshots=capacity.num_host_snapshots,
    )
