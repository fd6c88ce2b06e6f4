"""Reading the blocks of IQ1, IQ2 and IQ3 over the lanes of a tile: eight words of signed bytes a group of 32 columns.

Layouts: ggml-common.h; formulas: ggml-quants.c, as in `realizar.quantization`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import I16, I32, I64, Emitter
from realizar.backends.cpu.emitted import Value
from realizar.quantization import ggml_layouts as ggml
from realizar.quantization.layout import WeightLayout


class Block:
    """Emits reads of one block of every lane. Vectors are int32; `group` is the group of 32 columns, an int64."""

    def __init__(self, e: Emitter, at: Value, group: Value, table: Value, entry: int) -> None:
        self.e, self.at, self.group, self.table, self.entry = e, at, group, table, entry

    def half(self, first: int, stride: int = 0) -> Value:
        """Half-word first + stride * group."""
        e = self.e
        index = e.b.add(e.const(first), e.b.mul(self.group, e.const(stride)))
        return self.half_at(index)

    def half_at(self, index: Value) -> Value:
        e = self.e
        raw = e.load(e.scaled(self.at, index, 2 * e.lanes), ir.VectorType(I16, e.lanes), 2)
        return e.b.zext(raw, e.i32)

    def pair(self, first: int, stride: int) -> Value:
        """Half-words first + stride * group and the next as one word."""
        return self.e.b.or_(self.half(first, stride), self.shl(self.half(first + 1, stride), 16))

    def part_of_half(self, first: int, bits: int) -> Value:
        """Field number `group` of a run of fields that starts at half-word `first`; bits above it stay."""
        e, per_half = self.e, 16 // bits
        index = e.b.add(e.const(first), e.b.udiv(self.group, e.const(per_half)))
        place = e.b.mul(e.b.urem(self.group, e.const(per_half)), e.const(bits))
        return e.b.lshr(self.half_at(index), e.splat(e.b.trunc(place, I32)))

    def shl(self, value: Value, places: int) -> Value:
        return self.e.shifted(value, -places)

    def field(self, value: Value, place: int, bits: int) -> Value:
        return self.e.b.and_(self.e.shifted(value, place), self.e.const_i32((1 << bits) - 1))

    def high(self, low: Value, value: Value, place: int, bits: int) -> Value:
        """`low` of eight bits under a field of `value`."""
        return self.e.b.or_(low, self.shl(self.field(value, place, bits), 8))

    def eighth_sign(self, seven: Value) -> Value:
        """Seven signs completed so that an even number is set."""
        e = self.e
        count = e.call(f"llvm.ctpop.v{e.lanes}i32", e.i32, [seven])
        return e.b.or_(seven, self.shl(self.field(count, 0, 1), 7))

    def entries(self, index: Value) -> list[Value]:
        e = self.e
        wide = ir.VectorType(I64, e.lanes)
        offsets = e.b.mul(e.b.zext(index, wide), ir.Constant(wide, [self.entry] * e.lanes))
        words = []
        for word in range(self.entry // 4):
            base = e.splat(e.at(self.table, 4 * word))
            pointers = e.b.inttoptr(e.b.add(base, offsets), ir.VectorType(ir.PointerType(), e.lanes))
            every = ir.Constant(ir.VectorType(ir.IntType(1), e.lanes), [1] * e.lanes)
            name = f"llvm.masked.gather.v{e.lanes}i32.v{e.lanes}p0"
            words.append(e.call(name, e.i32, [pointers, every, e.const_i32(0)]))
        return words

    def spread(self, bits: Value, place: int) -> Value:
        """Bits place .. place + 3, one a byte: copies of a nibble seven bits apart put its bit i at bit 8 i."""
        e = self.e
        return e.b.and_(e.b.mul(self.field(bits, place, 4), e.const_i32(0x00204081)), e.byte_mask(1))

    def negate(self, words: list[Value], signs: Value) -> list[Value]:
        """Eight columns with their signs; no magnitude is zero, so no byte carries into the next."""
        e, result = self.e, []
        for i, word in enumerate(words):
            ones = self.spread(signs, 4 * i)
            mask = e.b.sub(self.shl(ones, 8), ones)
            result.append(e.b.add(e.b.xor(word, mask), ones))
        return result

    def shift(self, words: list[Value], plus: Value) -> list[Value]:
        """IQ1: entries are 8 g - 1 + 128; add two in every byte where `plus`, and take the 128 out again."""
        e = self.e
        two = e.b.mul(plus, e.byte_mask(2))
        return [e.b.xor(e.b.add(word, two), e.byte_mask(0x80)) for word in words]


Decoded = tuple[list[Value], list[Value]]  # eight words of signed bytes; s of the scale 2 s + 1 of each part


def _iq2_xxs(k: Block) -> Decoded:
    indices, signs = k.pair(1, 4), k.pair(3, 4)
    words: list[Value] = []
    for i in range(4):
        words += k.negate(k.entries(k.field(indices, 8 * i, 8)), k.eighth_sign(k.field(signs, 7 * i, 7)))
    return words, [k.field(signs, 28, 4)]


def _iq2_xs(k: Block) -> Decoded:
    words: list[Value] = []
    for i in range(4):
        packed = k.half(1 + i, 4)
        words += k.negate(k.entries(k.field(packed, 0, 9)), k.eighth_sign(k.field(packed, 9, 7)))
    scales = k.part_of_half(33, 8)
    return words, [k.field(scales, 0, 4), k.field(scales, 4, 4)]


def _iq2_s(k: Block) -> Decoded:
    indices, signs, high = k.pair(1, 2), k.pair(17, 2), k.part_of_half(33, 8)
    words: list[Value] = []
    for i in range(4):
        index = k.high(k.field(indices, 8 * i, 8), high, 2 * i, 2)
        words += k.negate(k.entries(index), k.field(signs, 8 * i, 8))
    scales = k.part_of_half(37, 8)
    return words, [k.field(scales, 0, 4), k.field(scales, 4, 4)]


def _iq3_xxs(k: Block) -> Decoded:
    indices, packed = (k.pair(1, 4), k.pair(3, 4)), k.pair(33, 2)
    words: list[Value] = []
    for i in range(4):
        four = [k.entries(k.field(indices[j // 4], 8 * (j % 4), 8))[0] for j in (2 * i, 2 * i + 1)]
        words += k.negate(four, k.eighth_sign(k.field(packed, 7 * i, 7)))
    return words, [k.field(packed, 28, 4)]


def _iq3_s(k: Block) -> Decoded:
    indices, ninth, signs = (k.pair(1, 4), k.pair(3, 4)), k.part_of_half(33, 8), k.pair(37, 2)
    words: list[Value] = []
    for i in range(4):
        four = []
        for j in (2 * i, 2 * i + 1):
            index = k.high(k.field(indices[j // 4], 8 * (j % 4), 8), ninth, j, 1)
            four += k.entries(index)
        words += k.negate(four, k.field(signs, 8 * i, 8))
    return words, [k.field(k.part_of_half(53, 4), 0, 4)]


def _iq1_s(k: Block) -> Decoded:
    indices, packed = k.pair(1, 2), k.half(17, 1)
    plus = k.e.b.xor(k.field(packed, 15, 1), k.e.const_i32(1))
    words: list[Value] = []
    for i in range(4):
        words += k.shift(k.entries(k.high(k.field(indices, 8 * i, 8), packed, 3 * i, 3)), plus)
    return words, [k.field(packed, 12, 3)]


def _iq1_m(k: Block) -> Decoded:
    indices, high = k.pair(0, 2), k.half(16, 1)
    words: list[Value] = []
    for i in range(4):
        plus = k.e.b.xor(k.field(high, 4 * i + 3, 1), k.e.const_i32(1))
        words += k.shift(k.entries(k.high(k.field(indices, 8 * i, 8), high, 4 * i, 3)), plus)
    scales = _iq1_m_scales(k)
    return words, [k.field(scales, 0, 3), k.field(scales, 3, 3)]


def _iq1_m_scales(k: Block) -> Value:
    """Four 3-bit scales a half-word, two a group."""
    e = k.e
    packed = k.half_at(e.b.add(e.const(24), e.b.udiv(k.group, e.const(2))))
    place = e.b.mul(e.b.and_(k.group, e.const(1)), e.const(6))
    return e.b.lshr(packed, e.splat(e.b.trunc(place, I32)))


def _four_nibbles(k: Block) -> Value:
    """IQ1_M: a nibble of the float16 atop each of four half-words, the lowest first."""
    bits = k.field(k.half(24), 12, 4)
    for i in range(1, 4):
        bits = k.e.b.or_(bits, k.shl(k.field(k.half(24 + i), 12, 4), 4 * i))
    return bits


@dataclass(frozen=True, slots=True)
class Kind:
    """`decode` a group; the bits of the super-scale, and the power of two that ggml's formula puts beside it."""

    decode: Callable[[Block], Decoded]
    factor: float
    super_bits: Callable[[Block], Value] = lambda k: k.half(0)


KINDS: dict[WeightLayout, Kind] = {
    ggml.IQ1_S: Kind(_iq1_s, 0.125),
    ggml.IQ1_M: Kind(_iq1_m, 0.125, _four_nibbles),
    ggml.IQ2_XXS: Kind(_iq2_xxs, 0.125),
    ggml.IQ2_XS: Kind(_iq2_xs, 0.125),
    ggml.IQ2_S: Kind(_iq2_s, 0.125),
    ggml.IQ3_XXS: Kind(_iq3_xxs, 0.25),
    ggml.IQ3_S: Kind(_iq3_s, 1.0),
}
"""Kernels by the layout whose blocks they read."""
