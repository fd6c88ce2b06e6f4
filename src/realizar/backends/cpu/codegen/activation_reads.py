"""Reads of an activation record beside its codes and its scale: sums, broadcast to every lane."""

from __future__ import annotations

from llvmlite import ir

from realizar.backends.cpu.codegen import activation_layout as layout
from realizar.backends.cpu.codegen.emit import F32, I32, Emitter, Value


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
