"""Attention of single tokens by parts at fixed places of their context, bound to its kernel, for `batch_invariant`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import triton

from realizar.backends.cuda.attention.arguments import AttentionArguments
from realizar.backends.cuda.attention.decode import BoundDecode
from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import decode_parts, decode_queries, fixed_parts, padded_head, part_keys
from realizar.backends.cuda.kernels.attend_parts import attend_parts
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.workspace import Workspace


class PartBinder:
    """Starts `attend_parts` for the single tokens of a step, in each layer; rope and the cache are done before it."""

    def __init__(
        self, arguments: AttentionArguments, workspace: Workspace, kv: KVMemory, device: DeviceProfile,
        context_length: int,
    ) -> None:  # fmt: skip
        self._arguments, self._space, self._kv = arguments, workspace, kv
        self._device, self._context = device, context_length

    def bind(self, decode: BoundDecode) -> Callable[[StepKind], None]:
        """Return a function that starts a layer's kernel, for steps with decodes."""
        attention, layer = decode.block.attention, decode.block.cache_layer

        def run(kind: StepKind) -> None:
            space, arrays = self._space, self._space.arrays
            queries, warps = decode_queries(attention, arrays.sizes.tile_tokens, space.query.dtype)
            parts = fixed_parts(self._context)
            # Programs may be few or many: which of them takes a part changes no bit of it.
            programs = min(parts, decode_parts(attention, kind.decodes, self._context, self._device))
            attend_parts[(kind.decodes, attention.num_kv_heads, programs)](
                space.query, *self._arguments.cache(layer), self._arguments.sinks(attention), space.attended,
                space.attention_parts, space.attention_state, space.arrivals, arrays["decodes"], arrays["tables"],
                arrays["header"], float(attention.scale), float(attention.soft_cap or 1.0), space.query.stride(0),
                space.attended.stride(0), HEADS=attention.num_heads, KV_HEADS=attention.num_kv_heads,
                HEAD=attention.head_size, PADDED_HEAD=padded_head(attention), BLOCK_SIZE=self._kv.block_size,
                INT8=self._kv.dtype == "int8", QUERIES=queries,
                SHARED=triton.next_power_of_2(attention.num_heads // attention.num_kv_heads),
                PART=part_keys(self._context), PARTS=parts, num_warps=warps, **self._arguments.shared(decode.block),
                **self._arguments.halves(attention, decode.consumer, kind), **space.launching(kind),
            )  # fmt: skip

        return run

    def prepare(self, kinds: Iterable[StepKind]) -> None:
        """Compile CUDA kernels: there are none."""

    def kernels_of(self, kind: StepKind) -> object:
        """A key that is equal for steps whose decodes start the same kernels, with the same compile-time constants."""
        return tuple(self._space.launching(kind).items()) if kind.decodes else None

    def is_long(self, decodes: int, context: int) -> bool:
        """Never: long contexts run through the kernel of short ones."""
        return False
