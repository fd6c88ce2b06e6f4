"""float32 activations to records of 32 (`activation_layout`), and the functions that feed them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit

from realizar.backends.cpu import activation_layout as layout
from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.emit import F32, I8, I32
from realizar.backends.cpu.codegen.vector_math import CLAMPED, VectorMath
from realizar.backends.cpu.emitted import Value, emitted

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", CLAMPED, "relu_squared")

offset_of = njit(layout.record_offset)


def emit_record(e: VectorMath, x: Value, record: Value) -> None:
    """Store the record of 32 floats `x`: scale is the largest magnitude over 127."""
    b = e.b
    bits = b.and_(b.bitcast(x, e.i32), e.const_i32(0x7FFFFFFF))
    largest = b.bitcast(e.reduce_max(bits), F32)
    scale = b.fmul(largest, ir.Constant(F32, 1 / 127))
    zero = b.fcmp_ordered("==", largest, ir.Constant(F32, 0.0))
    inverse = b.select(zero, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, 127.0), largest))
    scaled = b.fmul(x, e.splat(inverse))
    codes = b.fptosi(e.call(f"llvm.rint.v{GROUP}f32", e.f32, [scaled]), e.i32)
    e.store(b.trunc(codes, ir.VectorType(I8, GROUP)), record, 1)
    halves = []
    undefined = ir.Constant(e.i32, ir.Undefined)
    for half in range(2):
        lanes = ir.Constant(ir.VectorType(I32, 16), list(range(16 * half, 16 * half + 16)))
        halves.append(e.reduce_add(b.shuffle_vector(codes, undefined, lanes)))
    total = b.add(*halves)
    e.store(scale, e.at(record, layout.SCALE))
    e.store(b.fmul(scale, b.sitofp(total, F32)), e.at(record, layout.SCALED_SUM))
    for offset, byte in layout.OFFSET_SUMS.items():
        e.store(b.mul(total, ir.Constant(I32, -offset)), e.at(record, byte))
    for value, byte in zip(halves, layout.HALF_SUMS, strict=True):
        e.store(b.mul(value, ir.Constant(I32, -layout.HALF_OFFSET)), e.at(record, byte))


@emitted
def quantize_group(builder: Any, values: Value, record: Value) -> None:
    """Write the record of the 32 float32 at address `values`."""
    e = VectorMath(builder, GROUP)
    emit_record(e, e.load(values, e.f32, 4), record)


@emitted
def quantize_residual(builder: Any, values: Value, record: Value, second: Value) -> None:
    """Write at `second` the record of what `record`, already written, leaves of the 32 float32 at `values`."""
    e = VectorMath(builder, GROUP)
    codes = builder.sitofp(e.load(record, ir.VectorType(I8, GROUP), 1), e.f32)
    scale = e.splat(builder.fneg(e.load(e.at(record, layout.SCALE), F32, 4)))
    emit_record(e, e.fma(codes, scale, e.load(values, e.f32, 4)), second)


@emitted
def gate_group(builder: Any, values: Value, gate: Value) -> None:
    """Multiply the 32 float32 at address `values` by the sigmoids of those at `gate`."""
    e = VectorMath(builder, GROUP)
    factors = e.sigmoid(e.load(gate, e.f32, 4))
    e.store(builder.fmul(e.load(values, e.f32, 4), factors), values)


@emitted
def activate_group(builder: Any, kind: int, gated: int, gate: Value, up: Value, out: Value) -> None:
    """out = activation(gate) * up, or what else it makes of both, for 32 float32; activation(up) where not gated.

    Addresses.
    """
    name = ACTIVATIONS[kind]
    e = VectorMath(builder, GROUP)
    second = e.load(up, e.f32, 4)
    value = e.gated(name, e.load(gate, e.f32, 4), second) if gated else getattr(e, name)(second)
    e.store(value, out)
