"""The KV cache on the device: how many blocks fit, and each layer's keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from realizar.backends.cuda.device import DeviceProfile, free_bytes
from realizar.backends.kv_blocks import (
    blocks_per_request,
    check_one_fits,
    host_snapshots_within,
    log_size,
    most_requests,
    snapshots_within,
)
from realizar.backends.resolved_config import ResolvedConfig
from realizar.errors import CapacityError
from realizar.models.mixers import SharedAttention
from realizar.models.parts import AssistantInputs
from realizar.models.spec import Attention, ModelSpec
from realizar.sizes import format_bytes

_FREE_MEMORY_SHARE = 0.9
_GROUP = 32  # head dimensions that share a scale
_DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values [blocks, KV heads, block size, head size]; scales float16 [..., head size / 32] where int8, and
    float32 [1] where fp8.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor


def kv_limit_bytes(config: ResolvedConfig, free: int) -> int:
    """The KV cache's size limit in bytes: as configured, or a fraction of free memory."""
    return config.kv_cache_bytes or int(free * _FREE_MEMORY_SHARE)


def _free_beside_states(free: int, max_running: int, state_bytes: int) -> int:
    """Raises CapacityError where the states of all rows leave nothing."""
    states = max_running * state_bytes
    if states > free:
        raise CapacityError(
            f"the states of {max_running} rows take {format_bytes(states)}, but {format_bytes(free)} of the GPU are"
            f" free: lower max_running; each takes {format_bytes(state_bytes)}"
        )
    return free - states


class KVMemory:
    """Blocks of every layer with attention.

    Attributes:
        layers: keys and values by index of the layer.
        block_bytes: of each cache group, all its layers together, and those of a model beside.
        num_snapshots: of states, within the cache's limit. snapshot_bytes: of them all, which `size_bytes` leaves out.
        num_host_snapshots: of those in the host's memory, beside that limit.

    Args:
        reserved: bytes of the device that must stay free beside the cache.
        state_bytes: of a row's state, and of a snapshot. Those of all rows lie beside the cache.
        scales: of keys and values in fp8, float32 [1], by layer; what empties the cache leaves them.
        free: bytes of the device that may be taken; None is what is free now.
        lent: of the model whose keys and values a drafter with `AssistantInputs` reads, which has none of its own: its
            layers are that one's.

    Raises:
        CapacityError: not even one request fits, what is configured does not, or the states of all rows, or the block
            size is no power of two from 16 on.
    """

    def __init__(
        self, spec: ModelSpec, config: ResolvedConfig, device: DeviceProfile, reserved: int = 0, state_bytes: int = 0,
        scales: Mapping[int, Sequence[torch.Tensor]] = MappingProxyType({}), free: int | None = None,
        lent: KVMemory | None = None,
    ) -> None:  # fmt: skip
        size = config.block_size
        if size < 16 or size & (size - 1):
            raise CapacityError(f"block_size must be a power of two and at least 16 on a GPU, not {size}")
        self.dtype = config.kv_dtype
        self.block_size = size
        self.num_snapshots = self.num_host_snapshots = self.snapshot_bytes = 0
        groups = spec.cache_groups()
        self._group = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        per_request = blocks_per_request(groups, config)
        attentions = dict(spec.attentions())
        own = [sum(self._block_bytes(attentions[layer]) for layer in group.layers) for group in groups]
        self.block_bytes = block_bytes = config.beside.added_to(own)
        request_bytes = sum(count * each for count, each in zip(per_request, block_bytes, strict=True))
        free = _free_beside_states(free_bytes(device) if free is None else free, config.max_running, state_bytes)
        snapshot_bytes = state_bytes if config.prefix_cache else 0
        limit = kv_limit_bytes(config, max(free - reserved - config.beside.fixed_bytes, 0))
        if config.kv_blocks is None:
            check_one_fits(request_bytes, limit, config.context_length)
        token_bytes = max(sum(block_bytes) / size, 1)
        self.num_snapshots = snapshots_within(limit, request_bytes, snapshot_bytes, token_bytes)
        self.snapshot_bytes = self.num_snapshots * snapshot_bytes
        limit -= self.snapshot_bytes
        most = min(limit, most_requests(config) * request_bytes)
        self.num_host_snapshots = host_snapshots_within(config, snapshot_bytes, self.num_snapshots, most / token_bytes)
        share = most / max(request_bytes, 1)
        self.num_blocks = config.kv_blocks or tuple(int(count * share) for count in per_request)
        taken = self.joint_bytes + self.snapshot_bytes
        if device.is_gpu and taken > free:
            raise CapacityError(
                f"the KV cache needs {format_bytes(taken)}, but {format_bytes(free)} of the GPU are free"
            )
        self.layers = self._own = {
            layer: self._allocate(
                attention, self.num_blocks[self._group[layer]], device.torch_device, scales.get(layer)
            )
            for layer, attention in attentions.items()
        }
        if lent is not None and isinstance(spec.next_token, AssistantInputs):
            windows = [group.window for group in groups]
            shared = [mixer for _, mixer in spec.all_attentions() if isinstance(mixer, SharedAttention)]
            self._group = {each.source: windows.index(each.window) for each in shared}
            self.layers = {source: lent.layers[source] for source in self._group}
        if device.is_gpu:
            log_size(config, taken, free)

    def group_of(self, layer: int) -> int:
        return self._group[layer]

    def planes(self, group: int) -> list[torch.Tensor]:
        """Keys, values and scales of each layer of a group, whose first axis is the block."""
        caches = (cache for layer, cache in self._own.items() if self._group[layer] == group)
        tensors = (
            each for cache in caches for each in (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        )
        return [tensor for tensor in tensors if tensor.dim() > 1]

    @property
    def joint_bytes(self) -> int:
        """Bytes of all blocks, with those of a model beside."""
        return sum(count * each for count, each in zip(self.num_blocks, self.block_bytes, strict=True))

    @property
    def size_bytes(self) -> int:
        tensors = [t for c in self._own.values() for t in (c.keys, c.values, c.key_scales, c.value_scales)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)

    def token_bytes(self, attention: Attention | SharedAttention) -> int:
        """Keys and values of one token in a layer, scales included."""
        return self._block_bytes(attention) // self.block_size

    def _block_bytes(self, attention: Attention | SharedAttention) -> int:
        scales = 2 * -(-attention.head_size // _GROUP) if self.dtype == "int8" else 0
        row = attention.head_size * _DTYPES[self.dtype].itemsize + scales
        return 2 * attention.num_kv_heads * self.block_size * row

    def _allocate(
        self, attention: Attention, blocks: int, device: torch.device, given: Sequence[torch.Tensor] | None
    ) -> LayerCache:
        shape = blocks, attention.num_kv_heads, self.block_size
        groups = -(-attention.head_size // _GROUP) if self.dtype == "int8" else 0
        scale_shape = (*shape, groups) if groups else (1,)
        keys, values = (
            torch.zeros((*shape, attention.head_size), dtype=_DTYPES[self.dtype], device=device) for _ in range(2)
        )
        scales = given or [torch.zeros(scale_shape, dtype=torch.float16, device=device) for _ in range(2)]
        return LayerCache(keys, values, *scales)
