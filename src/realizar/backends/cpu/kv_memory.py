"""The KV cache's memory: how many blocks fit, and where each layer's lie."""

from __future__ import annotations

import os

import numpy as np

from realizar.backends.cpu.kv_layout import BLOCK_MULTIPLE, KVLayout
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.config import EngineConfig
from realizar.errors import CapacityError
from realizar.models.spec import ModelSpec

_FREE_MEMORY_SHARE = 0.4


def free_memory_bytes() -> int:
    """Memory that the system can give without swapping."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class KVMemory:
    """Blocks of every layer. Memory is reserved, and taken by the system only as blocks are first written.

    Args:
        context_length: tokens that one request may hold.
        automatic: the element type that `auto` means.

    Raises:
        CapacityError: not even one request fits, or the block size is not a multiple of 32.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig, context_length: int, automatic: str) -> None:
        if config.block_size % BLOCK_MULTIPLE:
            raise CapacityError(f"blocks of {config.block_size} tokens: the CPU takes multiples of {BLOCK_MULTIPLE}")
        self.dtype = automatic if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.block_size = config.block_size
        self.layouts = [
            KVLayout(layer.attention.num_kv_heads, layer.attention.head_size, config.block_size, self.dtype)
            for layer in spec.layers
        ]
        groups = spec.cache_groups()
        self._group = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        per_request = []
        for group in groups:
            tokens = context_length
            if group.window is not None:
                tokens = min(tokens, group.window + config.max_step_tokens + config.block_size)
            per_request.append(-(-tokens // config.block_size) + 1)
        block_bytes = [sum(self.layouts[layer].block_bytes for layer in group.layers) for group in groups]
        request_bytes = sum(count * size for count, size in zip(per_request, block_bytes, strict=True))
        limit = config.kv_cache_bytes or int(free_memory_bytes() * _FREE_MEMORY_SHARE)
        if request_bytes > limit:
            raise CapacityError(
                f"the KV cache of one request of {context_length} tokens takes {request_bytes >> 20} MiB and"
                f" {limit >> 20} MiB may be used: lower the context length"
            )
        requests = min(config.max_running, limit // request_bytes)
        share = min(float(config.max_running), limit / request_bytes)
        self.num_blocks = tuple(max(count * requests, int(count * share)) for count in per_request)
        self._memory = [
            aligned_zeros(self.num_blocks[self._group[index]] * layout.block_bytes, np.uint8)
            for index, layout in enumerate(self.layouts)
        ]

    def group_of(self, layer: int) -> int:
        """Index of the cache group that a layer belongs to."""
        return self._group[layer]

    def address_of(self, layer: int) -> int:
        return address(self._memory[layer])

    @property
    def size_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)
