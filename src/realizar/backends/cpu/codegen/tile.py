"""The matmul of one weight tile with several tokens' quantised activations, emitted for any format.

A row's sum runs over its columns in one fixed order, whatever the number of tokens: same bits alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from realizar.backends.cpu import activation_layout as layout
from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.emit import F16, F32, I8, I16, I32, Emitter
from realizar.backends.cpu.codegen.formats import PLANES, SMALL_BYTES, WeightFormat
from realizar.backends.cpu.codegen.vector_codebook_blocks import KINDS, Block, Decoded
from realizar.backends.cpu.emitted import Value

Codes = Callable[[int], Value]  # word of a group to its codes
Scales = Callable[[int], tuple[Value, Value | None]]  # part of a group to its scale and minimum
Supers = tuple[Value | None, Value | None]
_TOGETHER = 6  # tokens at once where a group has two scales: more would leave the registers


class TileEmitter:
    def __init__(self, e: Emitter, weight_format: WeightFormat, instruction_set: str, tokens: int) -> None:
        self.e, self.format, self.tokens = e, weight_format, tokens
        self.instruction_set = instruction_set
        self.vector_bytes = 4 * e.lanes

    def emit(self, tile: TileAddresses) -> list[Value]:
        """float32 lanes per token: out_features of the tile times each token."""
        e, weight_format = self.e, self.format
        if weight_format.kept is not None:
            return _VectorCodebookTile(e, weight_format, self.instruction_set, self.tokens).emit(tile)
        start = [e.const_f32(0.0)] * self.tokens
        self.bases = [e.at(tile.activations, t * layout.RECORD_BYTES) for t in range(self.tokens)]
        self.table = e.load(tile.table, e.bytes, 1) if weight_format.codebook else None
        if not weight_format.super_size:
            return e.loop(tile.groups, start, lambda g, sums: self._group(tile, g, sums, (None, None)))
        per_super = weight_format.super_size // GROUP

        def super_group(index: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(tile.supers, index, weight_format.planes * e.lanes * 2)
            scale = e.load_half(at)
            minimum = e.load_half(e.at(at, e.lanes * 2)) if weight_format.minima else None
            if weight_format.centred:
                scale, minimum = e.b.fadd(scale, scale), e.b.fneg(scale)
            first = e.b.mul(index, e.const(per_super))

            def group(g: Value, inner: list[Value]) -> list[Value]:
                return self._group(tile, e.b.add(first, g), inner, (scale, minimum))

            return e.loop(e.const(per_super), sums, group)

        return e.loop(e.b.udiv(tile.groups, e.const(per_super)), start, super_group)

    def _group(self, tile: TileAddresses, g: Value, sums: list[Value], supers: Supers) -> list[Value]:
        e, weight_format = self.e, self.format
        codes = e.scaled(tile.codes, g, weight_format.vectors * self.vector_bytes)
        e.prefetch_ahead(codes, weight_format.vectors * self.vector_bytes)
        vectors = [e.load(e.at(codes, k * self.vector_bytes), e.i32, 4) for k in range(weight_format.vectors)]
        records = [e.scaled(base, g, tile.group_stride) for base in self.bases]
        small = e.scaled(tile.scales, g, weight_format.scales_bytes(e.lanes, GROUP))
        word: Codes = cache(lambda index: self._word(vectors, index))
        scales: Scales = cache(lambda part: self._scales(small, part, supers))
        together = self.tokens if weight_format.group == GROUP else _TOGETHER
        for first in range(0, self.tokens, together):
            some = slice(first, first + together)
            add = self._add_whole if weight_format.group == GROUP else self._add_halves
            sums[some] = add(word, scales, records[some], sums[some])
        return sums

    def _add_whole(self, word: Codes, scales: Scales, records: list[Value], sums: list[Value]) -> list[Value]:
        e = self.e
        dots = self._dots(word, 0, 1, records)
        scale, minimum = scales(0)
        for t, record in enumerate(records):
            factor = e.b.fmul(scale, e.splat_load(e.at(record, layout.SCALE), F32))
            sums[t] = e.fma(factor, e.b.sitofp(dots[t], e.f32), sums[t])
            if minimum is not None:
                sums[t] = e.fma(minimum, scaled_sum(e, record, None), sums[t])
        return sums

    def _add_halves(self, word: Codes, scales: Scales, records: list[Value], sums: list[Value]) -> list[Value]:
        """Like `_add_whole`, for two scales a group, applied before the activation's: an operation less a token."""
        e = self.e
        halves: list[Value] = []
        for half in range(2):
            dots = [e.b.sitofp(dot, e.f32) for dot in self._dots(word, half, 2, records)]
            scale, minimum = scales(half)
            if half == 0:
                halves = [e.b.fmul(scale, dot) for dot in dots]
            else:
                halves = [e.fma(scale, dot, first) for dot, first in zip(dots, halves, strict=True)]
            if minimum is not None:
                sums = [e.fma(minimum, scaled_sum(e, r, half), s) for r, s in zip(records, sums, strict=True)]
        scales_of_x = [e.splat_load(e.at(record, layout.SCALE), F32) for record in records]
        return [e.fma(value, scale, s) for value, scale, s in zip(halves, scales_of_x, sums, strict=True)]

    def _dots(self, word: Codes, part: int, parts: int, records: list[Value]) -> list[Value]:
        """int32 lanes per token: integer sums over the columns of one of a group's parts, offset included."""
        e, weight_format = self.e, self.format
        dot = _DOTS[self.instruction_set](e, len(records), weight_format.value_bits)
        offset = weight_format.offset - 128 if dot.signed else weight_format.offset
        dot.begin([offset_sum(e, record, offset, part if parts > 1 else None) for record in records])
        words = GROUP // 4 // parts
        for index in range(part * words, (part + 1) * words):
            codes = word(index)
            if dot.signed:
                codes = e.b.xor(codes, e.byte_mask(0x80))
            for t, record in enumerate(records):
                dot.step(t, codes, e.splat_load(e.at(record, 4 * index), I32))
        return list(dot.finish())

    def _word(self, vectors: list[Value], word: int) -> Value:
        """Four unsigned codes per lane: columns 4 word .. 4 word + 3."""
        e, weight_format = self.e, self.format
        first, shift, combined = 0, 0, None
        for bits in PLANES[weight_format.bits]:
            vector, place = vectors[first + word % bits], bits * (word // bits)
            mask = ((1 << bits) - 1) << shift
            moved = e.shifted(vector, place - shift)
            part = moved if bits == 8 else e.b.and_(moved, e.byte_mask(mask))
            combined = part if combined is None else e.b.or_(combined, part)
            first, shift = first + bits, shift + bits
        return combined if self.table is None else self._look_up(self.table, combined)

    def _look_up(self, table: Value, codes: Value) -> Value:
        """Each byte of `codes` (0..15) replaced by that byte of the table, which repeats every 16 bytes."""
        e = self.e
        names = {
            "avx512_vnni": "llvm.x86.avx512.pshuf.b.512",
            "avx_vnni": "llvm.x86.avx2.pshuf.b",
            "avx2": "llvm.x86.avx2.pshuf.b",
            "neon_dot": "llvm.aarch64.neon.tbl1.v16i8",
        }
        name = names.get(self.instruction_set)
        codes = e.b.bitcast(codes, e.bytes)
        if name is not None:
            return e.b.bitcast(e.call(name, e.bytes, [table, codes]), e.i32)
        result = ir.Constant(e.bytes, ir.Undefined)
        for i in range(4 * e.lanes):
            index = e.b.zext(e.b.extract_element(codes, ir.Constant(I32, i)), I32)
            result = e.b.insert_element(result, e.b.extract_element(table, index), ir.Constant(I32, i))
        return e.b.bitcast(result, e.i32)

    def _scales(self, small: Value, part: int, supers: Supers) -> tuple[Value, Value | None]:
        e, weight_format = self.e, self.format
        if weight_format.small == "none":
            return supers[0], supers[1]
        size = e.lanes * SMALL_BYTES[weight_format.small]
        values = []
        for plane in range(weight_format.planes):
            super_value = supers[plane]
            value = self._small(
                e.at(small, (part * weight_format.small_planes + plane % weight_format.small_planes) * size), plane
            )
            values.append(value if super_value is None else e.b.fmul(super_value, value))
        return values[0], values[1] if weight_format.minima else None

    def _small(self, address: Value, plane: int) -> Value:
        e, kind = self.e, self.format.small
        if kind == "f16":
            return e.load_half(address)
        raw = e.load(address, ir.VectorType(I8, e.lanes), 1)
        if kind == "i8":
            return e.b.sitofp(raw, e.f32)
        if kind == "u8":
            return e.b.uitofp(raw, e.f32)
        wide = e.b.zext(raw, e.i32)
        if kind == "u4":
            nibble = e.b.lshr(wide, e.const_i32(4)) if plane else e.b.and_(wide, e.const_i32(15))
            return e.b.uitofp(nibble, e.f32)
        if kind == "e8m0":  # 2 ** (byte - 128), subnormal for bytes 0 and 1
            normal = e.b.shl(e.b.sub(wide, e.const_i32(1)), e.const_i32(23))
            tiny = e.b.shl(e.const_i32(0x00200000), e.b.and_(wide, e.const_i32(1)))
            return e.b.bitcast(e.b.select(e.b.icmp_unsigned("<", wide, e.const_i32(2)), tiny, normal), e.f32)
        # half of e4m3 without sign: seven bits moved under float32's exponent, rescaled by 2 ** (127 - 7 - 1)
        moved = e.b.bitcast(e.b.shl(wide, e.const_i32(20)), e.f32)
        return e.b.fmul(moved, e.const_f32(float(2**119)))


# The tile matmul of layouts with a codebook of vectors, whose blocks are kept as in the file.
#
# They lie half-word by half-word over the lanes.
#
# So they pack to exactly their size. A row of a tile is a lane; every group of 32 columns is decoded to eight words
# of four signed bytes by gathers from a table of the grid's entries, then multiplied as 8-bit codes are.

_GROUPS = 256 // GROUP  # of a block


class _VectorCodebookTile(TileEmitter):
    def emit(self, tile: TileAddresses) -> list[Value]:
        e, kept = self.e, self.format.kept
        assert kept is not None
        kind = KINDS[kept]
        bases = [e.at(tile.activations, t * layout.RECORD_BYTES) for t in range(self.tokens)]

        def block(index: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(tile.codes, index, kept.block_bytes * e.lanes)
            e.prefetch_ahead(at, kept.block_bytes * e.lanes)
            first = e.b.mul(index, e.const(_GROUPS))
            bits = kind.super_bits(Block(e, at, e.const(0), tile.table, kept.vector_size))
            halves = e.b.bitcast(e.b.trunc(bits, ir.VectorType(I16, e.lanes)), ir.VectorType(F16, e.lanes))
            scale = e.b.fmul(e.b.fpext(halves, e.f32), e.const_f32(kind.factor))

            def group(g: Value, inner: list[Value]) -> list[Value]:
                records = [e.scaled(base, e.b.add(first, g), tile.group_stride) for base in bases]
                decoded = kind.decode(Block(e, at, g, tile.table, kept.vector_size))
                return self._add_decoded(decoded, records, scale, inner)

            return e.loop(e.const(_GROUPS), sums, group)

        return e.loop(e.b.udiv(tile.groups, e.const(_GROUPS)), [e.const_f32(0.0)] * self.tokens, block)

    def _add_decoded(
        self, decoded: Decoded, records: list[Value], super_scale: Value, sums: list[Value]
    ) -> list[Value]:
        e, (words, scales) = self.e, decoded
        for part, small in enumerate(scales):
            odd = e.b.or_(e.b.shl(small, e.const_i32(1)), e.const_i32(1))
            scale = e.b.fmul(super_scale, e.b.sitofp(odd, e.f32))
            dots = self._dots(lambda index: e.b.xor(words[index], e.byte_mask(0x80)), part, len(scales), records)
            for t, record in enumerate(records):
                factor = e.b.fmul(scale, e.splat_load(e.at(record, layout.SCALE), F32))
                sums[t] = e.fma(factor, e.b.sitofp(dots[t], e.f32), sums[t])
        return sums


def offset_sum(e: Emitter, record: Value, offset: int, half: int | None) -> Value:
    """int32 lanes: minus `offset` times the sum of the codes of a record, or of one half."""
    if not offset:
        return e.const_i32(0)
    if half is None:
        return e.splat_load(e.at(record, layout.OFFSET_SUMS[offset]), I32)
    total = e.splat_load(e.at(record, layout.HALF_SUMS[half]), I32)
    shift = offset.bit_length() - layout.HALF_OFFSET.bit_length()
    if shift < 0:
        return e.b.ashr(total, e.const_i32(-shift))
    return e.b.shl(total, e.const_i32(shift)) if shift else total


def scaled_sum(e: Emitter, record: Value, half: int | None) -> Value:
    """float32 lanes: scale times the sum of the codes of a record, or of one half."""
    if half is None:
        return e.splat_load(e.at(record, layout.SCALED_SUM), F32)
    scale = e.b.fmul(e.load(e.at(record, layout.SCALE), F32, 4), ir.Constant(F32, -1 / layout.HALF_OFFSET))
    total = e.b.sitofp(e.load(e.at(record, layout.HALF_SUMS[half]), I32, 4), F32)
    return e.splat(e.b.fmul(scale, total))


@dataclass(frozen=True, slots=True)
class TileAddresses:
    """Addresses of a tile and its tokens; groups have 32 columns, and a record's stride leads to the next group's."""

    codes: Value
    scales: Value
    supers: Value
    table: Value
    activations: Value
    groups: Value
    group_stride: int


# All forms give the exact integer: a group of 32 products of at most 255 * 127 fits 32 bits with room to spare.


class Dot:
    """Accumulates words (four bytes a lane) of one group into 32-bit lanes, for several tokens.

    `signed` says that codes come as signed bytes (value - 128) because the instruction wants those of 8 bits so.
    """

    takes_signed = False

    def __init__(self, e: Emitter, tokens: int, bits: int) -> None:
        self.e, self.tokens, self.signed = e, tokens, self.takes_signed and bits == 8

    def begin(self, initial: list[Value]) -> None:
        self.sums = list(initial)

    def step(self, token: int, codes: Value, activation: Value) -> None:
        """Add the products of one word. `codes` int32 lanes, `activation` int32 lanes, all alike."""
        raise NotImplementedError

    def finish(self) -> list[Value]:
        return self.sums


class VnniDot(Dot):
    """vpdpbusd: unsigned by signed, straight into 32 bits."""

    def step(self, token: int, codes: Value, activation: Value) -> None:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.e.lanes}"
        self.sums[token] = self.e.call(name, self.e.i32, [self.sums[token], codes, activation])


class MaddDot(Dot):
    """vpmaddubsw: pairs into saturating 16 bits. As many words are added there as can't overflow, then vpmaddwd.

    8-bit codes would saturate: they come signed, and the sign moves to the activation.
    """

    takes_signed = True

    def __init__(self, e: Emitter, tokens: int, bits: int) -> None:
        super().__init__(e, tokens, bits)
        self.words = {8: 1, 6: 2, 5: 4}.get(bits, 8)
        self.wide = ir.VectorType(I16, 2 * e.lanes)

    def begin(self, initial: list[Value]) -> None:
        super().begin(initial)
        self.pending: list[Value | None] = [None] * self.tokens
        self.filled = [0] * self.tokens

    def step(self, token: int, codes: Value, activation: Value) -> None:
        b, e = self.e.b, self.e
        codes, activation = b.bitcast(codes, e.bytes), b.bitcast(activation, e.bytes)
        if self.signed:
            activation = e.call("llvm.x86.avx2.psign.b", e.bytes, [activation, codes])
            codes = e.call(f"llvm.abs.v{4 * e.lanes}i8", e.bytes, [codes, ir.Constant(ir.IntType(1), 0)])
        pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", self.wide, [codes, activation])
        before = self.pending[token]
        self.pending[token] = pairs if before is None else b.add(before, pairs)
        self.filled[token] += 1
        if self.filled[token] == self.words:
            self._close(token)

    def _close(self, token: int) -> None:
        ones = ir.Constant(self.wide, [1] * (2 * self.e.lanes))
        quads = self.e.call("llvm.x86.avx2.pmadd.wd", self.e.i32, [self.pending[token], ones])
        self.sums[token] = self.e.b.add(self.sums[token], quads)
        self.pending[token], self.filled[token] = None, 0

    def finish(self) -> list[Value]:
        for token in range(self.tokens):
            if self.pending[token] is not None:
                self._close(token)
        return self.sums


class NeonDot(Dot):
    """sdot: signed by signed."""

    takes_signed = True

    def step(self, token: int, codes: Value, activation: Value) -> None:
        b, e = self.e.b, self.e
        operands = [self.sums[token], b.bitcast(codes, e.bytes), b.bitcast(activation, e.bytes)]
        self.sums[token] = e.call("llvm.aarch64.neon.sdot.v4i32.v16i8", e.i32, operands)


class PortableDot(Dot):
    """Shifts and multiplies on 32-bit lanes: the specification of the others."""

    def step(self, token: int, codes: Value, activation: Value) -> None:
        b, e = self.e.b, self.e
        for byte in range(4):
            code = b.and_(b.lshr(codes, e.const_i32(8 * byte)), e.const_i32(0xFF))
            value = b.ashr(b.shl(activation, e.const_i32(24 - 8 * byte)), e.const_i32(24))
            self.sums[token] = b.add(self.sums[token], b.mul(code, value))


_DOTS: dict[str, type[Dot]] = {
    "avx512_vnni": VnniDot,
    "avx_vnni": VnniDot,
    "avx2": MaddDot,
    "neon_dot": NeonDot,
    "portable": PortableDot,
}
