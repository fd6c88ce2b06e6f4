"""`loaded_capacity`: the capacity of a backend with a model in it, made alike for both. Standard library only."""

from __future__ import annotations

from typing import Protocol

from realizar.backends.base import Capacity
from realizar.backends.resolved_config import ResolvedConfig


class LoadedCache(Protocol):
    """The cache of a backend; `num_blocks` are per cache group, `snapshot_bytes` of all that are on the device."""

    num_blocks: tuple[int, ...]
    dtype: str
    num_snapshots: int
    num_host_snapshots: int
    snapshot_bytes: int

    @property
    def size_bytes(self) -> int: ...


def loaded_capacity(
    config: ResolvedConfig, kv: LoadedCache, weight_bytes: int, load_s: float,
    token_bytes: int | None = None, step_sizes: tuple[int, ...] = (),
) -> Capacity:  # fmt: skip
    """The capacity of a backend that was loaded with a configuration.

    Args:
        token_bytes: of the weights that one token reads; None if that is all of them.
        step_sizes: numbers of tokens to which steps with prompts are padded.
    """
    return Capacity(
        block_size=config.block_size, num_blocks=kv.num_blocks, weight_bytes=weight_bytes,
        weight_bytes_per_token=weight_bytes if token_bytes is None else token_bytes,
        kv_cache_bytes=kv.size_bytes + kv.snapshot_bytes, kv_cache_dtype=kv.dtype, load_s=load_s,
        step_sizes=step_sizes, num_snapshots=kv.num_snapshots, num_host_snapshots=kv.num_host_snapshots,
    )  # fmt: skip
