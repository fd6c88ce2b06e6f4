"""The matrix unit's instructions spelt out, for processors without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import I8, I16, I32, I64, Emitter
from realizar.backends.cpu.codegen.tile import PortableDot
from realizar.backends.cpu.emitted import Value

_REGISTER_BYTES = 1024
_ROW_BYTES = 64


class SpeltUnit(Emitter):
    """Emits loops for the unit's instructions, over registers on the stack, of the shapes that the code loads."""

    def __init__(self, builder: Any, lanes: int) -> None:
        super().__init__(builder, lanes)
        with builder.goto_entry_block():
            rooms = [builder.alloca(ir.ArrayType(I8, size)) for size in (8 * _REGISTER_BYTES, 64)]
            self._registers, self._shapes = [builder.ptrtoint(room, I64) for room in rooms]

    def call(self, name: str, result: Any, arguments: Sequence[Value]) -> Value:
        if name == "llvm.x86.ldtilecfg":
            return self._copy(self.b.ptrtoint(arguments[0], I64), self._shapes, self.const(64))
        if name == "llvm.x86.tdpbssd":
            return self._multiply(*[argument.constant for argument in arguments])
        if name == "llvm.x86.tilezero":
            zero = ir.Constant(ir.VectorType(I8, _REGISTER_BYTES), [0] * _REGISTER_BYTES)
            return self.store(zero, self._row(arguments[0].constant, self.const(0)), 1)
        if name in ("llvm.x86.tileloadd64", "llvm.x86.tilestored64"):
            register, memory, stride = arguments[0].constant, self.b.ptrtoint(arguments[1], I64), arguments[2]

            def row(index: Value, _: list[Value]) -> list[Value]:
                places = self.scaled(memory, index, stride), self._row(register, index)
                self._copy(*(places if "load" in name else places[::-1]), self._row_bytes(register))
                return []

            return self.loop(self._rows(register), [], row)
        return None if name == "llvm.x86.tilerelease" else super().call(name, result, arguments)

    def _rows(self, register: int) -> Value:
        return self.b.zext(self.load(self.at(self._shapes, 48 + register), I8), I64)

    def _row_bytes(self, register: int) -> Value:
        return self.b.zext(self.load(self.at(self._shapes, 16 + 2 * register), I16), I64)

    def _row(self, register: int, row: Value) -> Value:
        return self.scaled(self.at(self._registers, register * _REGISTER_BYTES), row, _ROW_BYTES)

    def _copy(self, source: Value, target: Value, count: Value) -> None:
        def byte(index: Value, _: list[Value]) -> list[Value]:
            self.store(self.load(self.at(source, index), I8), self.at(target, index), 1)
            return []

        self.loop(count, [], byte)

    def _multiply(self, result: int, left: int, right: int) -> None:
        """Add signed bytes times signed bytes; a row of `right` has four rows of its matrix."""

        def row(index: Value, _: list[Value]) -> list[Value]:
            def four(k: Value, sums: list[Value]) -> list[Value]:
                word = self.splat_load(self.scaled(self._row(left, index), k, 4), I32)
                dot, codes = PortableDot(self, 1, 8), self.load(self._row(right, k), self.i32)
                dot.begin([self.b.sub(sums[0], self._times_128(word))])  # its codes are unsigned
                dot.step(0, self.b.xor(codes, self.byte_mask(0x80)), word)
                return dot.finish()

            at = self._row(result, index)
            self.store(self.loop(self._rows(right), [self.load(at, self.i32)], four)[0], at)
            return []

        self.loop(self._rows(result), [], row)

    def _times_128(self, word: Value) -> Value:
        """The sum of a word's signed bytes, times 128."""
        total = self.const_i32(0)
        for byte in range(4):
            signed = self.b.ashr(self.b.shl(word, self.const_i32(24 - 8 * byte)), self.const_i32(24))
            total = self.b.add(total, self.b.shl(signed, self.const_i32(7)))
        return total
