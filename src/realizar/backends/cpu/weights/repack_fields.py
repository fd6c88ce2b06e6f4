"""Fields of raw blocks as vectors of eight 32-bit words: what the block readers are written in.

A group of 32 codes is eight words; byte i of word j is column 4 j + i. Bit fields stay in bytes: shifts of whole words
followed by a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import I8, I16, I32, Emitter, Value

WORDS = 8  # words of a group


class Fields(Emitter):
    """Emits reads of one block at an address. Vectors are 8 int32 lanes unless said otherwise."""

    def __init__(self, builder: object, block: Value) -> None:
        super().__init__(builder, WORDS)
        self.block = block

    def words(self, offset: int) -> Value:
        """The 32 bytes at `offset`."""
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
        moved = words
        if place > to:
            moved = self.b.lshr(words, self.const_i32(place - to))
        elif place < to:
            moved = self.b.shl(words, self.const_i32(to - place))
        return self.b.and_(moved, self.byte_mask(((1 << bits) - 1) << to))

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
        """Two vectors one after the other."""
        count = 2 * first.type.count
        return self.pick(first, second, range(count))

    def pick(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        """The lanes of two vectors, counted through both."""
        return self.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def byte_constant(self, values: Sequence[int]) -> Value:
        """int8 [len(values)]"""
        return ir.Constant(ir.VectorType(I8, len(values)), list(values))

    def elements(self, vector: Value) -> list[Value]:
        return [self.b.extract_element(vector, ir.Constant(I32, i)) for i in range(vector.type.count)]
