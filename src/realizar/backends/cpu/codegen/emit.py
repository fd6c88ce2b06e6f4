"""Vector code for LLVM: a thin layer over llvmlite's builder with one vector width. Used by the kernels' intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from realizar.backends.cpu.emitted import Value

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
LINE_BYTES, AHEAD_BYTES = 64, 4096


class Emitter:
    """Emits vector operations of `lanes` 32-bit lanes into a builder. Addresses are 64-bit integers."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.b = builder
        self.lanes = lanes
        self.i32 = ir.VectorType(I32, lanes)
        self.f32 = ir.VectorType(F32, lanes)
        self.bytes = ir.VectorType(I8, 4 * lanes)

    def const(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def const_i32(self, value: int) -> Value:
        value &= 0xFFFFFFFF
        return ir.Constant(self.i32, [value - (1 << 32) if value >= 1 << 31 else value] * self.lanes)

    def const_f32(self, value: float) -> Value:
        return ir.Constant(self.f32, [value] * self.lanes)

    def byte_mask(self, byte: int) -> Value:
        """The byte repeated in every byte of a vector."""
        return self.const_i32(byte * 0x01010101)

    def at(self, base: Value, offset: int | Value) -> Value:
        if isinstance(offset, int):
            return self.b.add(base, self.const(offset)) if offset else base
        return self.b.add(base, offset)

    def scaled(self, base: Value, index: Value, stride: int | Value) -> Value:
        """base + index * stride bytes."""
        return self.b.add(base, self.b.mul(index, self.const(stride) if isinstance(stride, int) else stride))

    def load(self, address: Value, kind: Any, align: int = 1) -> Value:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def shifted(self, vector: Value, right: int) -> Value:
        """int32 lanes, shifted to the right, or to the left by a negative number."""
        if right > 0:
            return self.b.lshr(vector, self.const_i32(right))
        return self.b.shl(vector, self.const_i32(-right)) if right else vector

    def splat(self, scalar: Value) -> Value:
        kind = ir.VectorType(scalar.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(self.i32, [0] * self.lanes))

    def splat_load(self, address: Value, kind: Any) -> Value:
        return self.splat(self.load(address, kind, 4))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.f32, [a, b, c])

    def call(self, name: str, result: Any, arguments: Sequence[Value]) -> Value:
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            function = ir.Function(module, kind, name)
        return self.b.call(function, arguments)

    def prefetch_ahead(self, address: Value, size: int) -> None:
        """Prefetch the cache lines that reads of `size` bytes at an address reach `AHEAD_BYTES` later.

        One core's loads wait for too few lines at a time to use the memory, and the processor's own prefetching begins
        anew with every page. Beyond the end nothing happens.
        """
        flags = [ir.Constant(I32, value) for value in (0, 3, 1)]  # to be read, into the first level, data
        for start in range(0, size, LINE_BYTES):
            pointer = self.b.inttoptr(self.at(address, AHEAD_BYTES + start), I8.as_pointer())
            self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])

    def load_half(self, address: Value, align: int = 2) -> Value:
        """`lanes` float16 as float32."""
        return self.b.fpext(self.load(address, ir.VectorType(F16, self.lanes), align), self.f32)

    def load_float(self, kind: str, address: Value, align: int | None = None, *, nans: bool = False) -> Value:
        """`lanes` numbers of the type `f32`, `f16` or `bf16` as float32, or of `e4m3` times 2^-8.

        `align` None is that of a number. `nans`: those of `e4m3` stay so; else they become 480.
        """
        if kind == "f32":
            return self.load(address, self.f32, align or 4)
        if kind == "f16":
            return self.load_half(address, align or 2)
        if kind == "e4m3":
            words = ir.VectorType(I16, self.lanes)
            wide = self.b.shl(self.b.sext(self.load(address, ir.VectorType(I8, self.lanes), 1), words), _each(words, 7))
            # The sign stands in the bits 15 and 14, and the latter is the exponent's highest.
            half = self.b.and_(wide, _each(words, ~0x407F))
            if nans:  # one more in the last place carries from all ones into the exponent's highest bit
                carried = self.b.add(half, _each(words, 0x80))
                half = self.b.or_(half, self.b.and_(carried, _each(words, 0x4000)))
            return self.b.fpext(self.b.bitcast(half, ir.VectorType(F16, self.lanes)), self.f32)
        raw = self.load(address, ir.VectorType(I16, self.lanes), align or 2)
        return self.b.bitcast(self.b.shl(self.b.zext(raw, self.i32), self.const_i32(16)), self.f32)

    def loop(
        self, count: Value, carried: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """Run `body(i, carried) -> carried` for i in 0 .. count - 1, count at least 1; returns the last carried."""
        before = self.b.block
        start = self.b.append_basic_block("loop")
        end = self.b.append_basic_block("done")
        self.b.branch(start)
        self.b.position_at_end(start)
        i = self.b.phi(I64)
        i.add_incoming(self.const(0), before)
        phis = []
        for value in carried:
            phi = self.b.phi(value.type)
            phi.add_incoming(value, before)
            phis.append(phi)
        results = list(body(i, list(phis)))
        following = self.b.add(i, self.const(1))
        i.add_incoming(following, self.b.block)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.cbranch(self.b.icmp_signed("<", following, count), start, end)
        self.b.position_at_end(end)
        return results

    def largest_within(self, left: Value, widths: Sequence[int], emit: Callable[[int], None]) -> Value:
        """Run `emit(width)` for the first of falling widths that is at most `left`, or the last; returns the width."""
        width, *rest = widths
        if not rest:
            emit(width)
            return self.const(width)
        with self.b.if_else(self.b.icmp_signed(">=", left, self.const(width))) as (fits, too_wide):
            with fits:
                emit(width)
                after_this = self.b.block
            with too_wide:
                smaller, after_smaller = self.largest_within(left, rest, emit), self.b.block
        chosen = self.b.phi(I64)
        chosen.add_incoming(self.const(width), after_this)
        chosen.add_incoming(smaller, after_smaller)
        return chosen


def _each(kind: Any, value: int) -> Value:
    return ir.Constant(kind, [value] * kind.count)
