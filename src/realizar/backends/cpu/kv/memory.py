"""The KV cache's memory: how many blocks fit, and where each layer's lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kv.layout import BLOCK_MULTIPLE, KVLayout
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.state.sizes import state_sizes
from realizar.backends.kv_blocks import (
    WHOLE_REQUESTS,
    blocks_per_request,
    check_one_fits,
    host_snapshots_within,
    log_size,
    most_requests,
    snapshot_share,
    snapshots_within,
)
from realizar.backends.machine import free_memory_bytes, memory_bytes
from realizar.backends.resolved_config import ResolvedConfig
from realizar.errors import CapacityError, InvalidRequestError
from realizar.models.mixers import SharedAttention
from realizar.models.parts import AssistantInputs
from realizar.models.spec import ModelSpec
from realizar.sizes import format_bytes

_FREE_MEMORY_SHARE = 0.4
_WHOLE_TOKENS = 1 << 16  # of `WHOLE_REQUESTS` together at most; one of them always has room


class KVSizes:
    """Bytes of the KV cache, of which nothing is reserved yet; CapacityError for blocks of no multiple of 32 tokens.

    Attributes:
        layouts: of the blocks of each layer with attention, by its index.
        groups: of layers with one block table.
        blocks_per_request: of each group, for a request of the whole context.
        block_bytes: of each group, all its layers together, and those of a model beside.
        snapshot_bytes: of a snapshot of states; 0 where none is kept.
    """

    def __init__(self, spec: ModelSpec, config: ResolvedConfig) -> None:
        if config.block_size % BLOCK_MULTIPLE:
            raise CapacityError(
                f"block_size must be a multiple of {BLOCK_MULTIPLE} on the CPU, not {config.block_size}"
            )
        self.dtype = config.kv_dtype
        self.block_size = config.block_size
        self.context_length = config.context_length
        self.layouts = {
            layer: KVLayout(attention.num_kv_heads, attention.head_size, config.block_size, self.dtype)
            for layer, attention in spec.attentions()
        }
        self.groups = spec.cache_groups()
        self.blocks_per_request = blocks_per_request(self.groups, config)
        own = [sum(self.layouts[layer].block_bytes for layer in group.layers) for group in self.groups]
        self.block_bytes = config.beside.added_to(own)
        self.snapshot_bytes = state_sizes(spec, 0).slot_bytes if config.prefix_cache else 0
        self._most_requests = most_requests(config)

    @property
    def request_bytes(self) -> int:
        return sum(count * size for count, size in zip(self.blocks_per_request, self.block_bytes, strict=True))

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values, in all layers."""
        return sum(self.block_bytes) / self.block_size

    @property
    def snapshot_share(self) -> float:
        return snapshot_share(self.snapshot_bytes, self.token_bytes)

    def num_snapshots(self, limit_bytes: int) -> int:
        """Snapshots within `limit_bytes`, of which the blocks of one request take their part first."""
        return snapshots_within(limit_bytes, self.request_bytes, self.snapshot_bytes, self.token_bytes)

    def num_blocks(self, limit_bytes: int) -> tuple[int, ...]:
        """Blocks of each group that are of use beside the snapshots; CapacityError: not even one request fits."""
        check_one_fits(self.request_bytes, limit_bytes, self.context_length)
        limit_bytes -= self.num_snapshots(limit_bytes) * self.snapshot_bytes
        most = self._most_requests
        requests = int(min(most, limit_bytes // self.request_bytes))
        share = min(most, limit_bytes / self.request_bytes)
        return tuple(max(count * requests, int(count * share)) for count in self.blocks_per_request)


def most_kv_bytes(free_bytes: int) -> int:
    """The KV cache's largest size where none is configured: a fraction of free memory."""
    return int(free_bytes * _FREE_MEMORY_SHARE)


def kv_limit_bytes(
    spec: ModelSpec, config: ResolvedConfig, sizes: KVSizes, free_bytes: int, machine_bytes: int | None
) -> int:
    """The KV cache's size limit in bytes, snapshots of states included.

    As configured; else room for `max_running` requests of the typical length and for some of the whole context, and
    for snapshots beside them, bounded by part of the free memory. Blocks of ended requests stay in the prefix cache, so
    that in time a server takes all of it: four contexts of a model that reads 128k tokens would be most of a machine's
    memory, which a CPU does not fill with requests that run.

    A `machine_bytes` of None plans for another machine; InvalidRequestError where more is configured than this one has.
    """
    if config.kv_cache_bytes is not None:
        check_kv_bytes(config.kv_cache_bytes, machine_bytes)
        return config.kv_cache_bytes
    typical_length = min(config.typical_request_tokens, sizes.context_length)
    typical = KVSizes(spec, replace(config, context_length=typical_length))
    num_whole = max(1, int(min(most_requests(config), WHOLE_REQUESTS, _WHOLE_TOKENS // sizes.context_length)))
    wanted = max(num_whole * sizes.request_bytes, config.max_running * typical.request_bytes)
    most = most_kv_bytes(max(free_bytes - config.beside.fixed_bytes, 0))
    return min(int(wanted / (1 - sizes.snapshot_share)), most)


def check_kv_bytes(configured: int | None, machine_bytes: int | None) -> None:
    """Raise InvalidRequestError where more is configured for the KV cache than a machine has, if that is known."""
    if configured is not None and machine_bytes is not None and configured > machine_bytes:
        raise InvalidRequestError(
            f"kv_cache_bytes of {format_bytes(configured)} is more than this machine's "
            f"{format_bytes(machine_bytes)} of memory",
            "kv_cache_bytes",
        )


class KVMemory:
    """Blocks of every layer with attention. Memory is reserved; the system takes it as blocks are first written.

    A drafter with `AssistantInputs` has none: its layers are those of its model, whose memory is `lent`.

    `scales`: of keys and values, by layer; those of others are 1.

    Raises CapacityError where not even one request fits, or the block size is not a multiple of 32.
    """

    def __init__(
        self, spec: ModelSpec, config: ResolvedConfig, scales: Mapping[int, tuple[float, float]] = MappingProxyType({}),
        lent: KVMemory | None = None,
    ) -> None:  # fmt: skip
        sizes, free = KVSizes(spec, config), free_memory_bytes()
        self.dtype, self.block_size = sizes.dtype, sizes.block_size
        self.layouts = {
            layer: replace(layout, scales=scales.get(layer, layout.scales)) for layer, layout in sizes.layouts.items()
        }
        self._group = {layer: index for index, group in enumerate(sizes.groups) for layer in group.layers}
        self._lent = lent if isinstance(spec.next_token, AssistantInputs) else None
        limit = kv_limit_bytes(spec, config, sizes, free, memory_bytes())
        self.num_blocks = sizes.num_blocks(limit) if config.kv_blocks is None else config.kv_blocks
        self.num_snapshots = sizes.num_snapshots(limit)
        self.num_host_snapshots = host_snapshots_within(config, sizes.snapshot_bytes, self.num_snapshots)
        self.snapshot_bytes = self.num_snapshots * sizes.snapshot_bytes
        self._memory = {
            layer: aligned_zeros(self.num_blocks[self._group[layer]] * layout.block_bytes, np.uint8)
            for layer, layout in self.layouts.items()
        }
        if self._lent is not None:
            windows = [group.window for group in sizes.groups]
            shared = [mixer for _, mixer in spec.all_attentions() if isinstance(mixer, SharedAttention)]
            self._group = {each.source: windows.index(each.window) for each in shared}
            self.layouts = {layer: self._lent.layouts[layer] for layer in self._group}
        joint = sum(count * each for count, each in zip(self.num_blocks, sizes.block_bytes, strict=True))
        log_size(config, joint + self.snapshot_bytes, free)

    def group_of(self, layer: int) -> int:
        return self._group[layer]

    def address_of(self, layer: int) -> int:
        return address(self._memory[layer]) if self._lent is None else self._lent.address_of(layer)

    def planes(self, group: int) -> list[NDArray[np.uint8]]:
        """Of each layer of a group uint8 [blocks, bytes]."""
        layers = (layer for layer in self._memory if self._group[layer] == group)
        return [self._memory[layer].reshape(-1, self.layouts[layer].block_bytes) for layer in layers]

    @property
    def size_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())
