"""The product of one weight tile with several tokens' quantised activations, emitted for any format.

A row's sum runs over its columns in one fixed order, whatever the number of tokens: same bits alone or in a batch.
"""

from __future__ import annotations

from llvmlite import ir

from realizar.backends.cpu import activation_layout as layout
from realizar.backends.cpu.dot import make_dot
from realizar.backends.cpu.emit import F32, I8, I32, Emitter, Value
from realizar.backends.cpu.formats import GROUP, PLANES, SMALL_BYTES, WeightFormat
from realizar.backends.cpu.tile_addresses import TileAddresses
from realizar.backends.cpu.vector_codebook import VectorCodebookTile


class TileEmitter:
    """Emits one tile product. `instruction_set` names the dot product."""

    def __init__(self, e: Emitter, weight_format: WeightFormat, instruction_set: str, tokens: int) -> None:
        self.e, self.format, self.tokens = e, weight_format, tokens
        self.instruction_set = instruction_set
        self.vector_bytes = 4 * e.lanes

    def emit(self, tile: TileAddresses) -> list[Value]:
        """float32 lanes per token: rows of the tile times each token."""
        e, form = self.e, self.format
        if form.blocks:
            return VectorCodebookTile(e, form, self.instruction_set, self.tokens).emit(tile)
        start = [e.const_f32(0.0)] * self.tokens
        bases = [e.at(tile.activations, t * layout.RECORD_BYTES) for t in range(self.tokens)]
        table = e.load(tile.table, e.bytes, 1) if form.codebook else None
        if not form.super_size:
            return e.loop(tile.groups, start, lambda g, sums: self._group(tile, bases, g, sums, (None, None), table))
        per_super = form.super_size // GROUP

        def super_group(index: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(tile.supers, index, form.planes * e.lanes * 2)
            scale = e.load_half(at)
            minimum = e.load_half(e.at(at, e.lanes * 2)) if form.minima else None
            if form.centred:
                scale, minimum = e.b.fadd(scale, scale), e.b.fneg(scale)
            first = e.b.mul(index, e.const(per_super))

            def group(g: Value, inner: list[Value]) -> list[Value]:
                return self._group(tile, bases, e.b.add(first, g), inner, (scale, minimum), table)

            return e.loop(e.const(per_super), sums, group)

        return e.loop(e.b.udiv(tile.groups, e.const(per_super)), start, super_group)

    def _group(
        self,
        tile: TileAddresses,
        bases: list[Value],
        g: Value,
        sums: list[Value],
        supers: tuple[Value | None, Value | None],
        table: Value | None,
    ) -> list[Value]:
        e, form = self.e, self.format
        codes = e.scaled(tile.codes, g, form.vectors * self.vector_bytes)
        vectors = [e.load(e.at(codes, k * self.vector_bytes), e.i32, 4) for k in range(form.vectors)]
        records = [e.scaled(base, g, tile.group_stride) for base in bases]
        parts = GROUP // form.group
        small = e.scaled(tile.scales, g, parts * form.small_planes * e.lanes * SMALL_BYTES[form.small])
        for part in range(parts):
            dots = self._dots(vectors, records, part, table)
            scale, minimum = self._scales(small, part, supers)
            summed = layout.SCALED_SUM if parts == 1 else layout.SCALED_HALVES[part]
            for t in range(self.tokens):
                activation_scale = e.splat_load(e.at(records[t], layout.SCALE), F32)
                factor = e.b.fmul(scale, activation_scale)
                sums[t] = e.fma(factor, e.b.sitofp(dots[t], e.f32), sums[t])
                if minimum is not None:
                    sums[t] = e.fma(minimum, e.splat_load(e.at(records[t], summed), F32), sums[t])
        return sums

    def _dots(self, vectors: list[Value], records: list[Value], part: int, table: Value | None) -> list[Value]:
        """int32 lanes per token: integer sums over the part's columns, offset included."""
        e, form = self.e, self.format
        dot = make_dot(self.instruction_set, e, self.tokens, form.value_bits)
        offset = form.offset - 128 if dot.signed else form.offset
        negative = layout.NEGATIVE_SUM if form.group == GROUP else layout.NEGATIVE_HALVES[part]
        if offset:
            dot.begin([self._times(offset, e.splat_load(e.at(record, negative), I32)) for record in records])
        else:
            dot.begin([e.const_i32(0)] * self.tokens)
        words = form.group // 4
        for word in range(part * words, (part + 1) * words):
            codes = self._word(vectors, word, table)
            if dot.signed:
                codes = e.b.xor(codes, e.byte_mask(0x80))
            for t in range(self.tokens):
                dot.step(t, codes, e.splat_load(e.at(records[t], 4 * word), I32))
        return list(dot.finish())

    def _times(self, factor: int, value: Value) -> Value:
        e = self.e
        shift = factor.bit_length() - 1
        if factor == 1 << shift:
            return e.b.shl(value, e.const_i32(shift)) if shift else value
        return e.b.mul(value, e.const_i32(factor))

    def _word(self, vectors: list[Value], word: int, table: Value | None) -> Value:
        """Four unsigned codes per lane: columns 4 word .. 4 word + 3."""
        e, form = self.e, self.format
        first, shift, combined = 0, 0, None
        for bits in PLANES[form.bits]:
            vector, place = vectors[first + word % bits], bits * (word // bits)
            mask = ((1 << bits) - 1) << shift
            moved = self._shift(vector, place - shift)
            part = moved if bits == 8 else e.b.and_(moved, e.byte_mask(mask))
            combined = part if combined is None else e.b.or_(combined, part)
            first, shift = first + bits, shift + bits
        if table is not None:
            combined = self._look_up(table, combined)
        return combined

    def _shift(self, vector: Value, right: int) -> Value:
        if right == 0:
            return vector
        if right > 0:
            return self.e.b.lshr(vector, self.e.const_i32(right))
        return self.e.b.shl(vector, self.e.const_i32(-right))

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

    def _scales(self, small: Value, part: int, supers: tuple[Value | None, Value | None]) -> tuple[Value, Value | None]:
        """float32 lanes: scale and minimum of one part of a group."""
        e, form = self.e, self.format
        if form.small == "none":
            return supers[0], supers[1]
        size = e.lanes * SMALL_BYTES[form.small]
        values = []
        for plane in range(form.planes):
            super_value = supers[plane]
            value = self._small(e.at(small, (part * form.small_planes + plane % form.small_planes) * size), plane)
            values.append(value if super_value is None else e.b.fmul(super_value, value))
        return values[0], values[1] if form.minima else None

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
