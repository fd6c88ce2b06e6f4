"""Readers of each layout's raw blocks, for `repack`. Layouts: ggml-common.h, as in `realizar.quantization`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import I8, I16, I32, Emitter
from realizar.backends.cpu.emitted import Value
from realizar.quantization import ggml_layouts as ggml
from realizar.quantization.layout import WeightLayout

# A group of 32 codes is eight words; byte i of word j is column 4 j + i. Bit fields stay in bytes: shifts of whole
# words followed by a mask.

WORDS = 8  # words of a group


class Fields(Emitter):
    """Emits reads of one block at an address. Vectors are 8 int32 lanes unless said otherwise."""

    def __init__(self, builder: object, block: Value) -> None:
        super().__init__(builder, WORDS)
        self.block = block

    def words(self, offset: int) -> Value:
        return self.load(self.at(self.block, offset), self.i32)

    def byte(self, offset: int) -> Value:
        return self.load(self.at(self.block, offset), I8)

    def half_word(self, offset: int) -> Value:
        return self.load(self.at(self.block, offset), I16)

    def byte_vector(self, offset: int, count: int) -> Value:
        """int8 [count]"""
        return self.load(self.at(self.block, offset), ir.VectorType(I8, count))

    def negated_half(self, offset: int) -> Value:
        """Bits of minus the float16 at `offset`."""
        return self.b.xor(self.half_word(offset), ir.Constant(I16, -0x8000))

    def field(self, words: Value, place: int, bits: int, to: int = 0) -> Value:
        """The `bits` bits from `place` on of every byte, moved to bit `to`."""
        return self.b.and_(self.shifted(words, place - to), self.byte_mask(((1 << bits) - 1) << to))

    def nibbles(self, offset: int) -> Value:
        """Low nibbles of the 16 bytes at `offset`, then their high nibbles."""
        half = self.load(self.at(self.block, offset), ir.VectorType(I32, 4))
        return self.field(self.b.lshr(self.join(half, half), self.lanes_of([0] * 4 + [4] * 4)), 0, 4)

    def plain_bits(self, offset: int) -> Value:
        """32 bits in plain order, one a byte."""
        packed = self.splat(self.load(self.at(self.block, offset), I32))
        four = self.b.and_(self.b.lshr(packed, self.lanes_of(range(0, 32, 4))), self.const_i32(15))
        # Copies of a nibble seven bits apart put its bit i at bit 8 i.
        return self.b.and_(self.b.mul(four, self.const_i32(0x00204081)), self.byte_mask(1))

    def lanes_of(self, values: Sequence[int]) -> Value:
        return ir.Constant(self.i32, list(values))

    def join(self, first: Value, second: Value) -> Value:
        count = 2 * first.type.count
        return self.pick(first, second, range(count))

    def pick(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        """The lanes of two vectors, counted through both."""
        return self.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def byte_constant(self, values: Sequence[int]) -> Value:
        return ir.Constant(ir.VectorType(I8, len(values)), list(values))

    def elements(self, vector: Value) -> list[Value]:
        return [self.b.extract_element(vector, ir.Constant(I32, i)) for i in range(vector.type.count)]


@dataclass(frozen=True, slots=True)
class BlockReader:
    """The fields of a raw block of one ggml type.

    Attributes:
        words: codes of a group of 32 columns, int32 [8], byte i of word j being column 4 j + i.
        small: scales, each followed by its minimum, in the order of columns, in the packed format's small type.
        supers: the super-scale and its minimum, int16 bits of a float16.
    """

    words: Callable[[Fields, int], Value]
    small: Callable[[Fields], list[Value]] = lambda e: []
    supers: Callable[[Fields], list[Value]] = lambda e: []


def _halves(*offsets: int) -> Callable[[Fields], list[Value]]:
    return lambda e: [e.half_word(offset) for offset in offsets]


def _half_and_minimum(scale: int, minimum: int) -> Callable[[Fields], list[Value]]:
    """A float16 and, since ggml subtracts minima, another negated."""
    return lambda e: [e.half_word(scale), e.negated_half(minimum)]


def _q5(start: int, e: Fields, group: int) -> Value:
    """32 fifth bits at `start`, then nibbles."""
    return e.b.or_(e.nibbles(start + 4), e.b.shl(e.plain_bits(start), e.const_i32(4)))


def _q8_0(e: Fields, group: int) -> Value:
    return e.b.xor(e.words(2), e.byte_mask(0x80))


def _bits_of_run(start: int, bits: int, e: Fields, group: int, to: int = 0) -> Value:
    """Runs of 32 bytes whose lowest fields are a group, the next ones the next group, and so on."""
    per_byte = 8 // bits
    return e.field(e.words(start + 32 * (group // per_byte)), bits * (group % per_byte), bits, to)


def _q3_k(e: Fields, group: int) -> Value:
    return e.b.or_(_bits_of_run(32, 2, e, group), _bits_of_run(0, 1, e, group, to=2))


def _q5_k(e: Fields, group: int) -> Value:
    return e.b.or_(_bits_of_run(48, 4, e, group), _bits_of_run(16, 1, e, group, to=4))


def _q6_k(e: Fields, group: int) -> Value:
    half, within = divmod(group, 4)
    low = e.field(e.words(64 * half + 32 * (within % 2)), 4 * (within // 2), 4)
    return e.b.or_(low, _bits_of_run(128, 2, e, group, to=4))


def _nvfp4(e: Fields, group: int) -> Value:
    """Runs of 8 bytes whose low nibbles are 8 columns and whose high ones are the next 8."""
    nibbles = e.nibbles(4 + 16 * group)
    return e.pick(nibbles, nibbles, [0, 1, 4, 5, 2, 3, 6, 7])


def _q2_0(e: Fields, group: int) -> Value:
    """Four columns a byte in plain order."""
    packed = e.b.zext(e.byte_vector(2 + 8 * group, 8), e.i32)
    codes = e.b.and_(packed, e.const_i32(3))
    for byte in range(1, 4):
        moved = e.b.shl(packed, e.const_i32(6 * byte))
        codes = e.b.or_(codes, e.b.and_(moved, e.const_i32(3 << (8 * byte))))
    return codes


def _tq1_0(e: Fields, group: int) -> Value:
    """Five base-3 digits a byte, as fractions of 256: digit n is the whole part of 3 * frac(byte * 3^n / 256).

    Columns go by runs of 32 bytes (five digits), 16 bytes (five), and 4 bytes (four digits).
    """
    if group < 5:
        return e.b.bitcast(_digits(e, e.byte_vector(0, 32), [group] * 32), e.i32)
    run = e.byte_vector(32, 16)
    if group < 7:
        first = 2 * (group - 5)
        return e.b.bitcast(_digits(e, e.join(run, run), [first] * 16 + [first + 1] * 16), e.i32)
    last = e.byte_vector(48, 4)
    pair = e.join(last, last)
    return e.b.bitcast(_digits(e, e.join(run, e.join(pair, pair)), [4] * 16 + [i // 4 for i in range(16)]), e.i32)


def _digits(e: Fields, packed: Value, places: list[int]) -> Value:
    """int8 [32]: of each byte the base-3 digit at a place."""
    wide = ir.VectorType(I16, 32)
    shifted = e.b.mul(packed, e.byte_constant([3**place for place in places]))
    tripled = e.b.mul(e.b.zext(shifted, wide), ir.Constant(wide, [3] * 32))
    return e.b.trunc(e.b.lshr(tripled, ir.Constant(wide, [8] * 32)), e.bytes)


def _six_bit_scales(e: Fields) -> list[Value]:
    """Q4_K and Q5_K: eight scales and minima in 12 bytes, as described in `quantization.convert`."""
    b = e.b
    first, last = e.byte_vector(4, 8), e.byte_vector(12, 4)
    low = b.and_(first, e.byte_constant([0x3F] * 8))
    top = b.and_(b.lshr(first, e.byte_constant([2] * 8)), e.byte_constant([0x30] * 8))
    nibbles = b.and_(b.lshr(e.join(last, last), e.byte_constant([0] * 4 + [4] * 4)), e.byte_constant([15] * 8))
    values = e.elements(e.join(low, b.or_(nibbles, top)))  # scales 0-3, minima 0-3, scales 4-7, minima 4-7
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    return [values[8 * half + i] for half in range(2) for i in order]


def _q3_k_scales(e: Fields) -> list[Value]:
    """Scale i, less 32: low bits in byte i % 8, nibble i / 8; two high bits in byte 8 + i % 4, field i / 4."""
    b = e.b
    low, high = e.byte_vector(96, 8), e.byte_vector(104, 4)
    pair = e.join(high, high)
    low = b.and_(b.lshr(e.join(low, low), e.byte_constant([0] * 8 + [4] * 8)), e.byte_constant([15] * 16))
    fields = b.lshr(e.join(pair, pair), e.byte_constant([2 * (i // 4) for i in range(16)]))
    high = b.shl(b.and_(fields, e.byte_constant([3] * 16)), e.byte_constant([4] * 16))
    return e.elements(b.sub(b.or_(low, high), e.byte_constant([32] * 16)))


def _iq4_xs_scales(e: Fields) -> list[Value]:
    """Eight scales, less 32: nibbles in plain order at byte 4, two high bits each at byte 2."""
    b = e.b
    nibbles = b.lshr(e.splat(e.load(e.at(e.block, 4), I32)), e.lanes_of(range(0, 32, 4)))
    tops = b.lshr(e.splat(b.zext(e.half_word(2), I32)), e.lanes_of(range(0, 16, 2)))
    high = b.shl(b.and_(tops, e.const_i32(3)), e.const_i32(4))
    values = b.sub(b.or_(b.and_(nibbles, e.const_i32(15)), high), e.const_i32(32))
    return e.elements(b.trunc(values, ir.VectorType(I8, 8)))


def _bytes_at(start: int, count: int) -> Callable[[Fields], list[Value]]:
    return lambda e: [e.byte(start + i) for i in range(count)]


def _nvfp4_scales(e: Fields) -> list[Value]:
    """E4M3 without its sign; 0x7F, which ggml takes for zero, becomes zero."""
    b = e.b
    values = b.and_(e.byte_vector(0, 4), e.byte_constant([0x7F] * 4))
    highest = b.icmp_unsigned("==", values, e.byte_constant([0x7F] * 4))
    return e.elements(b.select(highest, e.byte_constant([0] * 4), values))


READERS: dict[WeightLayout, BlockReader] = {
    ggml.Q4_0: BlockReader(lambda e, group: e.nibbles(2), _halves(0)),
    ggml.Q4_1: BlockReader(lambda e, group: e.nibbles(4), _halves(0, 2)),
    ggml.Q5_0: BlockReader(partial(_q5, 2), _halves(0)),
    ggml.Q5_1: BlockReader(partial(_q5, 4), _halves(0, 2)),
    ggml.Q8_0: BlockReader(_q8_0, _halves(0)),
    ggml.Q2_K: BlockReader(partial(_bits_of_run, 16, 2), _bytes_at(0, 16), _half_and_minimum(80, 82)),
    ggml.Q3_K: BlockReader(_q3_k, _q3_k_scales, _halves(108)),
    ggml.Q4_K: BlockReader(partial(_bits_of_run, 16, 4), _six_bit_scales, _half_and_minimum(0, 2)),
    ggml.Q5_K: BlockReader(_q5_k, _six_bit_scales, _half_and_minimum(0, 2)),
    ggml.Q6_K: BlockReader(_q6_k, _bytes_at(192, 16), _halves(208)),
    ggml.IQ4_NL: BlockReader(lambda e, group: e.nibbles(2), _halves(0)),
    ggml.IQ4_XS: BlockReader(lambda e, group: e.nibbles(8 + 16 * group), _iq4_xs_scales, _halves(0)),
    ggml.MXFP4: BlockReader(lambda e, group: e.nibbles(1), _bytes_at(0, 1)),
    ggml.NVFP4: BlockReader(_nvfp4, _nvfp4_scales),
    ggml.Q1_0: BlockReader(lambda e, group: e.plain_bits(2 + 4 * group), supers=_halves(0)),
    ggml.Q2_0: BlockReader(_q2_0, supers=_halves(0)),
    ggml.TQ1_0: BlockReader(_tq1_0, supers=_halves(52)),
    ggml.TQ2_0: BlockReader(partial(_bits_of_run, 0, 2), supers=_halves(64)),
}
"""Layouts whose own blocks are repacked without `Planes`; all others go through `pack_planes`."""
