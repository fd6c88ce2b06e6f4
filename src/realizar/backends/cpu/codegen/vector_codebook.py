"""The tile matmul of layouts with a codebook of vectors, whose blocks are kept as in the file.

They lie half-word by half-word over the lanes.

So they pack to exactly their size. A row of a tile is a lane; every group of 32 columns is decoded to eight words of
four signed bytes by gathers from a table of the grid's entries, then multiplied as 8-bit codes are.
"""

from __future__ import annotations

from llvmlite import ir

from realizar.backends.cpu.codegen import activation_layout as layout
from realizar.backends.cpu.codegen.activation_reads import offset_sum
from realizar.backends.cpu.codegen.dot import make_dot
from realizar.backends.cpu.codegen.emit import F16, F32, I16, I32, Emitter, Value
from realizar.backends.cpu.codegen.tile_addresses import TileAddresses
from realizar.backends.cpu.codegen.vector_codebook_blocks import KINDS, Block
from realizar.backends.cpu.weights.formats import GROUP, WeightFormat

_GROUPS = 256 // GROUP  # of a block


class VectorCodebookTile:
    """Emits one tile matmul; as `TileEmitter`."""

    def __init__(self, e: Emitter, weight_format: WeightFormat, instruction_set: str, tokens: int) -> None:
        self.e, self.format, self.instruction_set, self.tokens = e, weight_format, instruction_set, tokens
        assert weight_format.kept is not None
        self.layout = weight_format.kept
        self.kind, self.entry = KINDS[self.layout], self.layout.vector_size

    def emit(self, tile: TileAddresses) -> list[Value]:
        """float32 lanes per token: out_features of the tile times each token."""
        e = self.e
        bases = [e.at(tile.activations, t * layout.RECORD_BYTES) for t in range(self.tokens)]

        def block(index: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(tile.codes, index, self.layout.block_bytes * e.lanes)
            e.prefetch_ahead(at, self.layout.block_bytes * e.lanes)
            first = e.b.mul(index, e.const(_GROUPS))
            bits = self.kind.super_bits(Block(e, at, e.const(0), tile.table, self.entry))
            halves = e.b.bitcast(e.b.trunc(bits, ir.VectorType(I16, e.lanes)), ir.VectorType(F16, e.lanes))
            scale = e.b.fmul(e.b.fpext(halves, e.f32), e.const_f32(self.kind.factor))

            def group(g: Value, inner: list[Value]) -> list[Value]:
                records = [e.scaled(base, e.b.add(first, g), tile.group_stride) for base in bases]
                return self._group(Block(e, at, g, tile.table, self.entry), records, scale, inner)

            return e.loop(e.const(_GROUPS), sums, group)

        return e.loop(e.b.udiv(tile.groups, e.const(_GROUPS)), [e.const_f32(0.0)] * self.tokens, block)

    def _group(self, block: Block, records: list[Value], super_scale: Value, sums: list[Value]) -> list[Value]:
        e = self.e
        words, scales = self.kind.decode(block)
        per_part = len(words) // len(scales)
        for part, small in enumerate(scales):
            odd = e.b.or_(block.shl(small, 1), e.const_i32(1))
            scale = e.b.fmul(super_scale, e.b.sitofp(odd, e.f32))
            half = part if len(scales) > 1 else None
            dots = self._dots(words[part * per_part : (part + 1) * per_part], part * per_part, records, half)
            for t in range(self.tokens):
                factor = e.b.fmul(scale, e.splat_load(e.at(records[t], layout.SCALE), F32))
                sums[t] = e.fma(factor, e.b.sitofp(dots[t], e.f32), sums[t])
        return sums

    def _dots(self, words: list[Value], first: int, records: list[Value], half: int | None) -> list[Value]:
        """int32 lanes per token. Where the instruction wants unsigned codes, 128 is added and taken out again."""
        e = self.e
        dot = make_dot(self.instruction_set, e, self.tokens, 8)
        dot.begin([offset_sum(e, record, 0 if dot.signed else 128, half) for record in records])
        for index, word in enumerate(words):
            codes = word if dot.signed else e.b.xor(word, e.byte_mask(0x80))
            for t in range(self.tokens):
                dot.step(t, codes, e.splat_load(e.at(records[t], 4 * (first + index)), I32))
        return list(dot.finish())
