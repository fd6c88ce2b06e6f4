"""Rope, attention, and the conversions to the matmuls around them, bound to kernels and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import triton

from realizar.backends.cuda.attention.arguments import AttentionArguments, columns, gate_column
from realizar.backends.cuda.attention.chunks import ChunkBinder
from realizar.backends.cuda.attention.decode import BoundDecode, DecodeBinder
from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.attention.output_gate import start_gate
from realizar.backends.cuda.attention.rope_tables import RopeTables
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import (
    decode_parts,
    decode_queries,
    fixed_parts,
    padded_head,
    part_keys,
    rotate_sizes,
    whole_width,
    width_in_blocks,
)
from realizar.backends.cuda.kernels.activate import convert
from realizar.backends.cuda.kernels.attend_parts import attend_parts
from realizar.backends.cuda.kernels.normalize import normalize_partials
from realizar.backends.cuda.kernels.rotate import rotate
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.norms import NORM_KINDS
from realizar.backends.cuda.ranks.sums import RankSums
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.parts import RANK_SUMS
from realizar.backends.program import AttentionBlock, SharedAttentionBlock
from realizar.models.mixers import SharedAttention
from realizar.models.parts import Norm
from realizar.models.spec import Attention


class AttentionBinder:
    """Binds the operations between the QKV matmul and the output projection.

    With `batch_invariant` contexts are cut at fixed places, so that a token's bits depend on its own alone.
    """

    def __init__(
        self, weights: Weights, workspace: Workspace, kv: KVMemory, ropes: RopeTables, device: DeviceProfile,
        context_length: int, batch_invariant: bool, ranks: RankSums | None = None,
    ) -> None:  # fmt: skip
        self._weights, self._space, self._kv, self._ranks = weights, workspace, kv, ranks
        self._part = part_keys(context_length) if batch_invariant else 0
        self._arguments = AttentionArguments(weights, workspace, kv, ropes, device, batch_invariant)
        parts = fixed_parts(context_length) if batch_invariant else 0
        self._chunks = ChunkBinder(self._arguments, workspace, kv, device, self._part, parts)
        self._decodes: PartBinder | DecodeBinder = (
            PartBinder(self._arguments, workspace, kv, device, context_length, self._chunks)
            if batch_invariant
            else DecodeBinder(self._arguments, workspace, kv, device, context_length)
        )

    def prepare(self, kinds: Iterable[StepKind]) -> None:
        self._decodes.prepare(kinds)
        self._chunks.prepare()

    def kernels_of(self, kind: StepKind) -> object:
        """A key that is equal for steps whose decodes start the same kernels."""
        return self._decodes.kernels_of(kind)

    def is_long(self, decodes: int, context: int) -> bool:
        """True if a step of `decodes` decodes, the longest with this context, is `StepKind.long`."""
        return self._decodes.is_long(decodes, context)

    def bind(
        self, block: AttentionBlock | SharedAttentionBlock, linear: MergedLinear, consumer: MergedLinear
    ) -> Iterator[Launch]:
        """The launches of one block: `linear` computes queries, keys and values, `consumer` reads the result.

        Of a block that shares keys and values with an earlier one, `linear` computes queries alone.
        """
        attention = block.attention
        if isinstance(attention, Attention) and attention.qk_norm_axis == "token":
            shared = isinstance(block, AttentionBlock) and block.reduces_norms
            yield Launch("qk norm", self._norm_tokens(attention, linear, norms=not shared))
            if shared:
                yield Launch(RANK_SUMS, self._norm_tokens_of_ranks(attention, linear))
        yield self.bind_keys(block, linear)
        start_decodes = self._decodes.bind(BoundDecode(block, linear, consumer))
        start_tiles = self._chunks.bind(block, consumer)

        def run(kind: StepKind) -> None:
            if kind.decodes:
                start_decodes(kind)
            if kind.tiles:
                start_tiles(kind)

        yield Launch("attention", run, attention=attention)
        if isinstance(attention, Attention) and attention.gate is not None:
            yield Launch("attention output", self._gate(attention, linear, consumer))
        else:
            yield Launch("attention output", self._convert(attention, consumer))

    def bind_keys(self, block: AttentionBlock | SharedAttentionBlock, linear: MergedLinear) -> Launch:
        """The launch that rotates what `linear` computed, and writes keys and values into the cache."""
        return Launch("rope", self._rotate(block, linear))

    def _norm_tokens(self, attention: Attention, linear: MergedLinear, *, norms: bool) -> Callable[[StepKind], None]:
        """Sum queries, keys and values into the first split; with `norms` queries and keys are normed over all heads
        of a token.
        """
        (key_at, value_at), none = columns(attention), self._arguments.none
        parts: list[tuple[int, int, Norm | None]] = [
            (0, key_at, attention.q_norm if norms else None),
            (key_at, value_at - key_at, attention.k_norm if norms else None),
            (value_at, linear.width - value_at, None),
        ]

        def run(kind: StepKind) -> None:
            splits = linear.splits(kind)
            partials = self._space.partials(splits, kind.tokens, linear.width)
            for first, width, norm in parts:
                cut = whole_width(width)
                bias = self._weights.vector(norm.bias) if norm and norm.bias else none
                normalize_partials[(kind.tokens,)](
                    partials, partials.stride(0), partials.stride(1),
                    none if linear.bias is None else linear.bias, first,
                    self._weights.norm_weight(norm) if norm else none, bias, float(norm.eps) if norm else 0.0,
                    width, SPLITS=splits, MATMUL_BIAS=linear.bias is not None,
                    NORM=NORM_KINDS[norm.kind] if norm else 0, NORM_BIAS=bool(norm and norm.bias), BLOCK=cut.block,
                    num_warps=cut.warps, **self._space.launching(kind),
                )  # fmt: skip

        return run

    def _norm_tokens_of_ranks(self, attention: Attention, linear: MergedLinear) -> Callable[[StepKind], None]:
        """Norm queries and keys of the first split by the mean of all ranks' mean squares."""
        key_at, value_at = columns(attention)
        parts = [(slice(0, key_at), attention.q_norm), (slice(key_at, value_at), attention.k_norm)]
        norms = [(part, norm) for part, norm in parts if norm is not None]
        ranks = self._ranks
        assert ranks is not None

        def run(kind: StepKind) -> None:
            sums = self._space.partials(linear.splits(kind), kind.tokens, linear.width)[0]
            means = ranks.mean(torch.stack([sums[:, part].square().mean(1) for part, _ in norms], 1))
            for number, (part, norm) in enumerate(norms):
                scales = torch.rsqrt(means[:, number, None] + float(norm.eps))
                sums[:, part].mul_(scales).mul_(self._weights.norm_weight(norm))

        return run

    def _rotate(self, block: AttentionBlock | SharedAttentionBlock, linear: MergedLinear) -> Callable[[StepKind], None]:
        """Start rope for steps with chunks; `attend_decode` applies its own, `attend_parts` does not."""
        attention, space = block.attention, self._space
        slots = space.arrays.slots(self._kv.group_of(block.cache_layer))
        caches, own = self._arguments.cache(block.cache_layer), isinstance(attention, Attention)
        heads = attention.num_heads + (2 * attention.num_kv_heads if own else 0)

        def run(kind: StepKind) -> None:
            if not kind.tiles and not self._part:
                return
            rotated = attention, linear, kind
            pointers, constants = self._arguments.rotated(*rotated), self._arguments.rotated_constants(*rotated)
            parts, warps = rotate_sizes(attention, norms=constants["NORM"] > 0 or constants["VALUE_NORM"])
            rotate[(kind.tokens, -(-heads // parts))](
                *pointers, *caches, slots, space.query, space.query.stride(0), INT8=self._kv.dtype == "int8",
                PARTS=parts, num_warps=warps, **constants, **space.launching(kind),
            )  # fmt: skip

        return run

    def _gate(self, attention: Attention, linear: MergedLinear, consumer: MergedLinear) -> Callable[[StepKind], None]:
        gate_at, summed = gate_column(attention), attention.qk_norm_axis == "token"  # its norm sums the gate, too
        return lambda kind: start_gate(self._space, kind, linear, gate_at, attention.head_size, consumer, summed=summed)

    def _convert(self, attention: Attention | SharedAttention, consumer: MergedLinear) -> Callable[[StepKind], None]:
        space, width = self._space, attention.num_heads * attention.head_size

        def run(kind: StepKind) -> None:
            if self._arguments.direct(attention, consumer, kind) is not None:
                return
            for input_format in consumer.input_formats(kind):
                target = space.activations.get(input_format, width)
                cut = width_in_blocks(width)
                convert[(kind.tokens, cut.blocks)](
                    space.attended, space.attended.stride(0), width, *target.pointers(), *space.token_state,
                    BLOCK=cut.block, num_warps=cut.warps, **target.constants(), **space.launching(kind),
                )  # fmt: skip

        return run


class PartBinder:
    """Starts the kernel for the single tokens of a step, in each layer; rope and the cache are done before it.

    It is that of chunks, or `attend_parts` where `attend_chunk` attends those.
    """

    def __init__(
        self, arguments: AttentionArguments, workspace: Workspace, kv: KVMemory, device: DeviceProfile,
        context_length: int, chunks: ChunkBinder,
    ) -> None:  # fmt: skip
        self._arguments, self._space, self._kv, self._chunks = arguments, workspace, kv, chunks
        self._device, self._context = device, context_length

    def bind(self, decode: BoundDecode) -> Callable[[StepKind], None]:
        """Return a function that starts a layer's kernel, for steps with decodes."""
        attention, layer = decode.block.attention, decode.block.cache_layer
        parts, native = fixed_parts(self._context), self._chunks.bind_alone(decode.block, decode.consumer)

        def run(kind: StepKind) -> None:
            # Programs may be few or many: which of them takes a part changes no bit of it.
            programs = min(parts, decode_parts(attention, kind.decodes, self._context, self._device))
            if native is not None:
                native(kind, programs)
                return
            space, arrays = self._space, self._space.arrays
            queries, warps = decode_queries(attention, arrays.sizes.tile_tokens, space.query.dtype)
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
        """Those of CUDA C++ are prepared with the chunks'."""

    def kernels_of(self, kind: StepKind) -> object:
        """Equal for steps whose decodes start the same kernels, with the same compile-time constants."""
        return tuple(self._space.launching(kind).items()) if kind.decodes else None

    def is_long(self, decodes: int, context: int) -> bool:
        """Never: long contexts run through the kernel of short ones."""
        return False


_ROWS = 4096  # positions computed at once
