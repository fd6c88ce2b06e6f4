"""The matmul of weight tiles with many tokens by the processor's matrix unit (AMX), emitted for formats without blocks.

A tile's codes are decoded once for up to 96 tokens, 256 columns at a time, to signed bytes that stay in the first-level
cache: a word of a group lies as the unit takes a row of its right-hand side. The unit gives the integers of each group
and token, which are scaled and added up in the order of `codegen.tile`: the bits are those of its tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from realizar.backends.cpu import activation_layout as layout
from realizar.backends.cpu.activation_layout import GROUP, RECORD_BYTES
from realizar.backends.cpu.codegen.emit import F32, I8, I64, LINE_BYTES, Emitter
from realizar.backends.cpu.codegen.formats import WeightFormat
from realizar.backends.cpu.codegen.tile import Supers, TileAddresses, TileEmitter, scaled_sum
from realizar.backends.cpu.emitted import Float, Value

ROWS = 12  # tokens of a block of records, which is a left-hand side
_MOST_BLOCKS = 8  # that share what is decoded
_RUN = 8  # groups decoded at a time
_RESULTS, _LEFT, _RIGHT, _END = 0, 4, 6, 8  # the unit's registers of each kind
_WORDS = GROUP // 4
_WORDS_BYTES = _WORDS * LINE_BYTES
_RESULT_BYTES = ROWS * LINE_BYTES
_VOID = ir.VoidType()


@dataclass(frozen=True, slots=True)
class Strides:
    """Bytes to the next tile's codes, scales and super-scales, and to the next block of records."""

    codes: Value
    scales: Value
    supers: Value
    block: Value


def has_unit(instruction_set: str, weight_format: WeightFormat) -> bool:
    """Whether matrices of a format are multiplied by the matrix unit."""
    return instruction_set == "amx_int8" and weight_format.kept is None


class MatrixUnit:
    """Multiplies `tiles` neighbouring tiles, one or two, with blocks of records, for vectors of 16 lanes."""

    def __init__(self, e: Emitter, weight_format: WeightFormat, tiles: int) -> None:
        self.e, self.format, self.tiles = e, weight_format, tiles
        self.decoder = TileEmitter(e, weight_format, "amx_int8", ROWS)
        self.parts = GROUP // weight_format.group
        self.decoded_bytes = _WORDS_BYTES + self.parts * weight_format.planes * LINE_BYTES
        self.results_bytes = self.parts * tiles * _RESULT_BYTES

    def emit(
        self, tile: TileAddresses, strides: Strides, left: Value, out: Value, out_stride: Value, factor: Float | None
    ) -> Value:
        """out[t][out_features of the tiles] = tiles x token t, or out += factor * that.

        Of `left` tokens, ROWS at least, as many as share what is decoded, in whole blocks; returns how many.
        """
        e, b = self.e, self.e.b
        blocks = self._least(b.udiv(left, e.const(ROWS)), _MOST_BLOCKS)
        tokens = b.mul(blocks, e.const(ROWS))
        self.results = self._room(2 * self.results_bytes)
        self.decoded = self._room(self.tiles * _RUN * self.decoded_bytes)
        self.sums = self._room(_MOST_BLOCKS * self.tiles * _RESULT_BYTES)
        self.decoder.load_table(tile)
        self._shape_registers()
        zero = e.const_f32(0.0)
        self._each(b.mul(tokens, e.const(self.tiles)), lambda i: e.store(zero, e.scaled(self.sums, i, LINE_BYTES), 64))

        def run(index: Value) -> None:
            first = b.mul(index, e.const(_RUN))
            count = self._least(b.sub(tile.groups, first), _RUN)
            self._each(count, lambda g: self._decode(tile, strides, first, g))
            self._each(blocks, lambda block: self._add_run(tile, strides.block, block, first, count))

        self._each(b.udiv(b.add(tile.groups, e.const(_RUN - 1)), e.const(_RUN)), run)
        e.call("llvm.x86.tilerelease", _VOID, [])
        self._each(tokens, lambda t: self._store(e.scaled(self.sums, t, self.tiles * LINE_BYTES),
                                                 e.scaled(out, t, out_stride), factor))  # fmt: skip
        return tokens

    def _each(self, count: Value, body: Callable[[Value], None]) -> None:
        def without_results(index: Value, _: list[Value]) -> list[Value]:
            body(index)
            return []

        self.e.loop(count, [], without_results)

    def _least(self, value: Value, bound: int) -> Value:
        b, most = self.e.b, self.e.const(bound)
        return b.select(b.icmp_unsigned("<", value, most), value, most)

    def _room(self, size: int) -> Value:
        """The address of so many bytes of the stack, at a cache line."""
        b = self.e.b
        with b.goto_entry_block():
            made = b.alloca(ir.ArrayType(I8, size))
            made.align = LINE_BYTES
            return b.ptrtoint(made, I64)

    def _pointer(self, address: Value) -> Value:
        return self.e.b.inttoptr(address, I8.as_pointer())

    def _shape_registers(self) -> None:
        """Tell the unit the rows of its registers and their bytes, which ends with `tilerelease`."""
        e = self.e
        shapes = dict.fromkeys(range(_RESULTS, _LEFT), (ROWS, LINE_BYTES))
        shapes |= dict.fromkeys(range(_LEFT, _RIGHT), (ROWS, GROUP // self.parts))
        shapes |= dict.fromkeys(range(_RIGHT, _END), (_WORDS // self.parts, LINE_BYTES))
        stored = [1] + [0] * (LINE_BYTES - 1)  # the palette; row bytes in 16 bits from byte 16 on, rows from 48
        for register, (rows, row_bytes) in shapes.items():
            stored[16 + 2 * register], stored[48 + register] = row_bytes, rows
        at = self._room(LINE_BYTES)
        e.store(ir.Constant(ir.VectorType(I8, LINE_BYTES), stored), at, LINE_BYTES)
        e.call("llvm.x86.ldtilecfg", _VOID, [self._pointer(at)])

    def _decoded(self, tile: int, g: Value) -> Value:
        """Where a group of a run is kept: words, then float32 scale and minimum of each part."""
        return self.e.scaled(self.e.at(self.decoded, tile * _RUN * self.decoded_bytes), g, self.decoded_bytes)

    def _decode(self, tile: TileAddresses, strides: Strides, first: Value, g: Value) -> None:
        """Keep a group of all tiles, its codes less their offset."""
        e, weight_format, size = self.e, self.format, self.decoder.vector_bytes
        group, count = e.b.add(first, g), weight_format.vectors
        offset = ir.Constant(e.bytes, [(weight_format.offset ^ 128) - 128] * (4 * e.lanes))
        for each in range(self.tiles):
            place, at = e.const(each), self._decoded(each, g)
            codes = e.scaled(e.scaled(tile.codes, group, count * size), place, strides.codes)
            e.prefetch_ahead(codes, count * size)
            vectors = [e.load(e.at(codes, k * size), e.i32, 4) for k in range(count)]
            for index in range(_WORDS):
                word = e.b.bitcast(self.decoder.word(vectors, index), e.bytes)
                e.store(e.b.sub(word, offset), e.at(at, index * LINE_BYTES), LINE_BYTES)
            small = e.scaled(tile.scales, group, weight_format.scales_bytes(e.lanes, GROUP))
            small, supers = e.scaled(small, place, strides.scales), self._supers(tile, strides, place, group)
            values = [value for part in range(self.parts) for value in self.decoder.scales(small, part, supers)]
            for index, value in enumerate(value for value in values if value is not None):
                e.store(value, e.at(at, _WORDS_BYTES + index * LINE_BYTES), LINE_BYTES)

    def _supers(self, tile: TileAddresses, strides: Strides, place: Value, group: Value) -> Supers:
        if not self.format.super_size:
            return None, None
        index = self.e.b.udiv(group, self.e.const(self.format.super_size // GROUP))
        return self.decoder.supers(self.e.scaled(tile.supers, place, strides.supers), index)

    def _add_run(self, tile: TileAddresses, stride: Value, block: Value, first: Value, count: Value) -> None:
        """Add a run of groups to the sums of a block of tokens.

        The unit multiplies a group while the one before is added, as its products take long to arrive; the last group
        is multiplied twice.
        """
        e, b = self.e, self.e.b
        records = e.scaled(e.scaled(tile.activations, block, stride), first, tile.group_stride)
        sums = e.scaled(self.sums, block, self.tiles * _RESULT_BYTES)
        places = [e.at(sums, index * LINE_BYTES) for index in range(ROWS * self.tiles)]
        last = b.sub(count, e.const(1))
        self._multiply(e.scaled(records, e.const(0), tile.group_stride), e.const(0), self.results)

        def group(g: Value, values: list[Value]) -> list[Value]:
            turn, following = e.b.and_(g, e.const(1)), b.add(g, e.const(1))
            following = b.select(b.icmp_unsigned("<", following, count), following, last)
            other = e.scaled(self.results, b.xor(turn, e.const(1)), self.results_bytes)
            self._multiply(e.scaled(records, following, tile.group_stride), following, other)
            own = e.scaled(self.results, turn, self.results_bytes)
            return self._add_group(e.scaled(records, g, tile.group_stride), g, own, values)

        values = e.loop(count, [e.load(place, e.f32, LINE_BYTES) for place in places], group)
        for place, value in zip(places, values, strict=True):
            e.store(value, place, LINE_BYTES)

    def _multiply(self, records: Value, g: Value, results: Value) -> None:
        """int32 [parts, tiles, ROWS, 16]: the products of a group's records with what is kept of it."""
        e = self.e
        for part in range(self.parts):
            left = ir.Constant(I8, _LEFT + part)
            at = self._pointer(e.at(records, part * (GROUP // self.parts)))
            e.call("llvm.x86.tileloadd64", _VOID, [left, at, e.const(RECORD_BYTES)])
            for each in range(self.tiles):
                index = part * self.tiles + each
                result, right = ir.Constant(I8, _RESULTS + index), ir.Constant(I8, _RIGHT + each)
                at = self._pointer(e.at(self._decoded(each, g), part * (_WORDS_BYTES // self.parts)))
                e.call("llvm.x86.tileloadd64", _VOID, [right, at, e.const(LINE_BYTES)])
                e.call("llvm.x86.tilezero", _VOID, [result])
                e.call("llvm.x86.tdpbssd", _VOID, [result, left, right])
                at = self._pointer(e.at(results, index * _RESULT_BYTES))
                e.call("llvm.x86.tilestored64", _VOID, [result, at, e.const(LINE_BYTES)])

    def _add_group(self, records: Value, g: Value, results: Value, sums: list[Value]) -> list[Value]:
        """The sums of a block's tokens and a group's products, by the operations of `TileEmitter` in their order."""
        e, planes, added = self.e, self.format.planes, list(sums)
        scales = []
        for each in range(self.tiles):
            at = e.at(self._decoded(each, g), _WORDS_BYTES)
            scales.append([e.load(e.at(at, i * LINE_BYTES), e.f32, LINE_BYTES) for i in range(self.parts * planes)])
        for t in range(ROWS):
            record = e.at(records, t * RECORD_BYTES)
            scale_of_x = e.splat_load(e.at(record, layout.SCALE), F32)
            for each in range(self.tiles):
                rows = [e.at(results, (part * self.tiles + each) * _RESULT_BYTES) for part in range(self.parts)]
                dots = [e.load(e.at(row, t * LINE_BYTES), e.i32, LINE_BYTES) for row in rows]
                dots, place = [e.b.sitofp(dot, e.f32) for dot in dots], t * self.tiles + each
                add = self._add_whole if self.parts == 1 else self._add_halves
                added[place] = add(record, scale_of_x, scales[each], dots, added[place])
        return added

    def _add_whole(self, record: Value, scale: Value, scales: list[Value], dots: list[Value], total: Value) -> Value:
        e = self.e
        total = e.fma(e.b.fmul(scales[0], scale), dots[0], total)
        return e.fma(scales[1], scaled_sum(e, record, None), total) if self.format.minima else total

    def _add_halves(self, record: Value, scale: Value, scales: list[Value], dots: list[Value], total: Value) -> Value:
        e, planes = self.e, self.format.planes
        joined = e.fma(scales[planes], dots[1], e.b.fmul(scales[0], dots[0]))
        if self.format.minima:
            for half in range(2):
                total = e.fma(scales[planes * half + 1], scaled_sum(e, record, half), total)
        return e.fma(joined, scale, total)

    def _store(self, sums: Value, out: Value, factor: Float | None) -> None:
        e = self.e
        for each in range(self.tiles):
            value, at = e.load(e.at(sums, each * LINE_BYTES), e.f32, LINE_BYTES), e.at(out, each * LINE_BYTES)
            e.store(value if factor is None else e.fma(e.splat(factor), value, e.load(at, e.f32, 4)), at)
