"""Attention of chunks bound to its kernel: CUDA C++ for the heads and cards that it has, or else Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from realizar.backends.cuda.attention.arguments import AttentionArguments
from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.device import DeviceProfile, stream_of
from realizar.backends.cuda.kernel_sizes import CHUNK_PARTS, chunk_queries, native_rows, padded_head, triton_rows
from realizar.backends.cuda.kernels.attend import attend_chunk
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.native.chunks.source import AttendChunkKernel, SyncChunkKernel, sync_shape
from realizar.backends.cuda.native.chunks.tensor_map import TensorMap
from realizar.backends.cuda.native.compiler import Source, architecture
from realizar.backends.cuda.native.launcher import LoadedKernels
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import AttentionBlock, SharedAttentionBlock


class ChunkBinder:
    """Chooses and starts the kernel for the tiles of a step, in each layer; rope and the cache are done before it.

    `part`, `parts`: keys of a part of the context where it is cut at fixed places, and how many one may have; else 0.
    """

    def __init__(
        self, arguments: AttentionArguments, workspace: Workspace, kv: KVMemory, device: DeviceProfile, part: int,
        parts: int,
    ) -> None:  # fmt: skip
        self._arguments, self._space, self._kv, self._device = arguments, workspace, kv, device
        self._part, self._parts = part, parts
        self._is_planned = device.torch_device.type == "meta"
        self._kernels = LoadedKernels(architecture(device.capability), planned=self._is_planned)
        self._wanted: list[Source] = []

    def bind(self, block: AttentionBlock | SharedAttentionBlock, consumer: MergedLinear) -> Callable[[StepKind], None]:
        """Return a function that starts a layer's kernel, for steps with tiles."""
        if not self._is_native(block):
            return lambda kind: self._start_triton(block, consumer, kind)
        kernel, start = self._bind_native(block, consumer, alone=False)
        kv_heads, processors = block.attention.num_kv_heads, min(self._device.processors, CHUNK_PARTS)
        whole = block.attention.sees_images_whole

        def run(kind: StepKind) -> None:
            if kind.whole and whole:
                self._start_triton(block, consumer, kind)
            else:
                start(kind, kernel.grid(kind.tiles, kv_heads, processors))

        return run

    def bind_alone(
        self, block: AttentionBlock | SharedAttentionBlock, consumer: MergedLinear
    ) -> Callable[[StepKind, int], None] | None:
        """Return a function that starts a layer's kernel for a step's single tokens, with so many blocks for a context.

        Contexts are cut at fixed places. None where Triton attends the chunks, so that both have the same bits.
        """
        if not self._is_native(block):
            return None
        _, start = self._bind_native(block, consumer, alone=True)
        return lambda kind, blocks: start(kind, (kind.decodes, block.attention.num_kv_heads, blocks))

    def prepare(self) -> None:
        """Compile and load the layers' kernels; KernelError where one does not compile, or the device refuses it."""
        self._kernels.prepare(self._wanted)

    def _is_native(self, block: AttentionBlock | SharedAttentionBlock) -> bool:
        return native_rows(block.attention, self._kv.dtype, self._device, fixed=self._part > 0) > 0

    def _kernel(
        self, block: AttentionBlock | SharedAttentionBlock, consumer: MergedLinear, *, alone: bool
    ) -> AttendChunkKernel | SyncChunkKernel:
        attention, kv, tokens = block.attention, self._kv, 1 if alone else self._space.arrays.sizes.tile_tokens
        shape = (
            attention.head_size, attention.num_heads // attention.num_kv_heads, tokens, kv.dtype, kv.block_size,
            attention.window or 0, attention.soft_cap is not None, attention.sinks is not None,
        )  # fmt: skip
        if self._device.has_wgmma:
            return AttendChunkKernel(*shape, self._part, alone, consumer.prompts_in_fp8)
        plain = not attention.window and attention.soft_cap is None
        best = sync_shape(attention.head_size, self._device.shared_bytes, plain=plain)
        assert best is not None  # as `native_rows` says
        return SyncChunkKernel(*shape, best)

    def _bind_native(
        self, block: AttentionBlock | SharedAttentionBlock, consumer: MergedLinear, *, alone: bool
    ) -> tuple[AttendChunkKernel | SyncChunkKernel, Callable[[StepKind, tuple[int, int, int]], None]]:
        attention, space, arrays = block.attention, self._space, self._space.arrays
        kernel = self._kernel(block, consumer, alone=alone)
        source = kernel.source()
        self._wanted.append(source)
        cache, read = self._arguments.cache(block.cache_layer), list[TensorMap | int]()
        if not self._is_planned:
            read = chunk_inputs(kernel, space.query, cache, attention.num_heads)
        names = "decodes" if alone else "tile_rows", "tile_firsts", "starts", "counts", "contexts", "tables", "header"
        tensors = [*(arrays[name] for name in names), self._arguments.sinks(attention), space.attended]
        handed = space.next_tile, space.attention_parts, space.attention_state, space.arrivals
        parts = self._parts if alone else min(CHUNK_PARTS, space.attention_parts.numel() // max(1, kernel.part_floats))

        def start(kind: StepKind, grid: tuple[int, int, int]) -> None:
            target = self._arguments.direct(attention, consumer, kind)
            inputs, order = (
                ((0, 0), (1, 1)) if target is None else (target.addresses, (target.format.block_tokens, target.chunks))
            )
            arguments = [
                *read, *(each.data_ptr() for each in tensors), *inputs, *(each.data_ptr() for each in handed),
                float(attention.scale), float(attention.soft_cap or 0.0), attention.window or 0, kind.tiles,
                attention.num_kv_heads, self._kv.group_of(block.cache_layer) * arrays.sizes.rows,
                space.attended.stride(0), *order, parts, int(target is not None and target.format.kind == "fp8"),
            ]  # fmt: skip
            stream = stream_of(self._device.torch_device)
            dependent = space.launching(kind)["DEPENDENT"]
            self._kernels[source].launch(grid, kernel.threads, arguments, kernel.sizes, stream, dependent)

        return kernel, start

    def _start_triton(
        self, block: AttentionBlock | SharedAttentionBlock, consumer: MergedLinear, kind: StepKind
    ) -> None:
        attention, space = block.attention, self._space
        arrays, tokens, shares = space.arrays, space.arrays.sizes.tile_tokens, 1
        whole = kind.whole and attention.sees_images_whole
        if whole:  # tiles may be those of the other kernel
            most = triton_rows(attention, few=space.query.dtype == torch.float32)
            most //= attention.num_heads // attention.num_kv_heads
            tokens, shares = min(tokens, max(most, 1)), -(-tokens // max(most, 1))
        queries, warps = chunk_queries(attention, tokens, space.query.dtype)
        attend_chunk[(kind.tiles, attention.num_kv_heads, shares)](
            space.query, *self._arguments.cache(block.cache_layer), self._arguments.sinks(attention), space.attended,
            arrays["tile_rows"], arrays["tile_firsts"], arrays["starts"], arrays["counts"], arrays["contexts"],
            arrays["tables"], arrays["header"], arrays["seen"] if whole else self._arguments.none,
            float(attention.scale), float(attention.soft_cap or 1.0), space.query.stride(0), space.attended.stride(0),
            HEADS=attention.num_heads, KV_HEADS=attention.num_kv_heads, HEAD=attention.head_size,
            PADDED_HEAD=padded_head(attention), BLOCK_SIZE=self._kv.block_size,
            INT8=self._kv.dtype == "int8", QUERIES=queries, TOKENS=tokens, PART=self._part, WHOLE=whole,
            num_warps=warps, **self._arguments.shared(block), **self._arguments.halves(attention, consumer, kind),
            **space.launching(kind),
        )  # fmt: skip


def chunk_inputs(
    kernel: AttendChunkKernel | SyncChunkKernel, query: torch.Tensor, cache: Sequence[torch.Tensor], heads: int
) -> list[TensorMap | int]:
    """The kernel's first arguments: of queries [tokens, heads * head size or more], and of a layer's cache.

    `cache`: keys, values [blocks, KV heads, block size, head size], and the scales of each. A copy of queries has those
    of a tile, one of keys or values those of a block and a KV head, or as many as fit a place in the ring. Codes and
    scales of int8 lie side by side as they are copied, so their addresses are enough. Raises KernelError where the
    driver refuses a map.
    """
    if isinstance(kernel, SyncChunkKernel):
        return [query.data_ptr(), query.stride(0) * 2, *(each.data_ptr() for each in cache[:2])]
    head, row_bytes, element = kernel.head, kernel.head * 2, kernel.element
    queries = TensorMap(
        query.data_ptr(), element, (head, heads, query.shape[0]), (row_bytes, query.stride(0) * 2),
        (64, kernel.group, kernel.tokens),
    )  # fmt: skip
    keys, values, key_scales, value_scales = cache
    if kernel.coded:
        return [queries, *(each.data_ptr() for each in (keys, key_scales, values, value_scales))]
    box = 64, min(kernel.block_size, kernel.keys)
    rows = keys.numel() // head
    return [queries, *(TensorMap(each.data_ptr(), element, (head, rows), (row_bytes,), box) for each in (keys, values))]
