"""Dot products of unsigned code bytes with signed activation bytes, by instruction set.

All forms give the exact integer: a group of 32 products of at most 255 * 127 fits 32 bits with room to spare.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import I16, Emitter, Value


class Dot:
    """Accumulates words (four bytes a lane) of one group into 32-bit lanes, for several tokens.

    `signed` says that codes come as signed bytes (value - 128) because the instruction wants them so.
    """

    signed = False

    def __init__(self, e: Emitter, tokens: int, bits: int) -> None:
        self.e, self.tokens, self.bits = e, tokens, bits

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

    def __init__(self, e: Emitter, tokens: int, bits: int) -> None:
        super().__init__(e, tokens, bits)
        self.signed = bits == 8
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

    def __init__(self, e: Emitter, tokens: int, bits: int) -> None:
        super().__init__(e, tokens, bits)
        self.signed = bits == 8

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


def make_dot(name: str, e: Emitter, tokens: int, bits: int) -> Any:
    """The dot products of the instruction set `name`, for `tokens` tokens at once and codes of `bits` bits."""
    return _DOTS[name](e, tokens, bits)
