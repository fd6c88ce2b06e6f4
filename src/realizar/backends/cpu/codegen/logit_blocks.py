"""Passes over the logits of a row as vector code: the largest of each block, and the weights of each block.

Logits are compared as keys: their bits as an integer whose order is that of the floats, NaN beyond the infinities at
both ends. Weights are exp((logit - top) / temperature) in float64: range reduction by ln 2 in two parts and the powers
of the exponential series up to the tenth; relative error below 3e-13 on [-700, 0].
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import F32, I32, I64, Emitter
from realizar.backends.cpu.emitted import Double, Value, emitted

BLOCK = 64  # logits
LISTED = 8  # ids of a group in `weigh_listed`
NO_WEIGHT = -700.0  # scaled logits from here down have weight 0: below lie denormals, a hundred times slower

_KEYS, _LANES = 16, LISTED  # of a vector of keys, and of one of float64
_F64 = ir.DoubleType()
_FUSED = ("contract",)  # multiplying and adding may be rounded once
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # the first has 32 bits
_ROUNDER = 6755399441055744.0  # 1.5 * 2 ** 52: adding it rounds to an integer, which the low bits of the sum then hold
_TERMS = tuple(1.0 / math.factorial(power) for power in range(10, -1, -1))


@emitted
def find_tops(builder: Any, source: Value, blocks: Value, tops: Value) -> Value:
    """Write the largest key of each block, int32 [blocks], of the float32 at `source`; returns the smallest key of all.

    There is at least one block.
    """
    e = Emitter(builder, _KEYS)
    zero, flipped = e.const_f32(0.0), e.const_i32(0x7FFFFFFF)

    def keys(address: Value) -> Value:
        bits = builder.bitcast(builder.fadd(e.load(address, e.f32, 4), zero), e.i32)  # -0 becomes 0
        return builder.xor(bits, builder.and_(builder.ashr(bits, e.const_i32(31)), flipped))

    def body(i: Value, least: list[Value]) -> list[Value]:
        first = e.scaled(source, i, 4 * BLOCK)
        parts = [keys(e.at(first, 4 * start)) for start in range(0, BLOCK, _KEYS)]
        most, lowest = parts[0], least[0]
        for part in parts[1:]:
            most = e.call("llvm.smax.v16i32", e.i32, [most, part])
        for part in parts:
            lowest = e.call("llvm.smin.v16i32", e.i32, [lowest, part])
        top = e.call("llvm.vector.reduce.smax.v16i32", I32, [most])
        e.store(top, e.scaled(tops, i, 4))
        return [lowest]

    (least,) = e.loop(blocks, [flipped], body)
    return builder.sext(e.call("llvm.vector.reduce.smin.v16i32", I32, [least]), I64)


class _Weights:
    def __init__(self, builder: Any, top: Value, inverse: Value) -> None:
        self.e, self._b = Emitter(builder, _LANES), builder
        self.kind = ir.VectorType(_F64, _LANES)
        self._top, self._inverse = self.e.splat(top), self.e.splat(inverse)

    def constant(self, value: float) -> Value:
        return ir.Constant(self.kind, [value] * _LANES)

    def multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        return self._b.fadd(self._b.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    def at(self, address: Value) -> tuple[Value, Value]:
        """Weights and scaled logits of the float32 at an address."""
        return self.of(self.e.load(address, ir.VectorType(F32, _LANES), 4))

    def listed(self, source: Value, ids: Value) -> tuple[Value, Value]:
        """Weights and scaled logits of the ids, int32, at an address; their float32 lie at `source`."""
        logits: Value = ir.Constant(ir.VectorType(F32, _LANES), ir.Undefined)
        for lane in range(_LANES):
            index = self._b.sext(self.e.load(self.e.at(ids, 4 * lane), I32, 4), I64)
            logit = self.e.load(self.e.scaled(source, index, 4), F32, 4)
            logits = self._b.insert_element(logits, logit, ir.Constant(I32, lane))
        return self.of(logits)

    def of(self, floats: Value) -> tuple[Value, Value]:
        """Weights and scaled logits of float32."""
        b, least = self._b, self.constant(NO_WEIGHT)
        logits = b.fpext(floats, self.kind)
        scaled = b.fmul(b.fsub(logits, self._top), self._inverse)
        seen = b.fcmp_ordered(">", scaled, least)
        scaled = b.select(seen, scaled, least)
        return b.select(seen, self._exp(scaled), self.constant(0.0)), scaled

    def _exp(self, x: Value) -> Value:
        b, integers = self._b, ir.VectorType(I64, _LANES)
        shifted = self.multiply_add(x, self.constant(_LOG2_E), self.constant(_ROUNDER))
        n = b.fsub(shifted, self.constant(_ROUNDER))
        r = self.multiply_add(n, self.constant(-_LN2_HIGH), x)
        r = self.multiply_add(n, self.constant(-_LN2_LOW), r)
        result = self.constant(_TERMS[0])
        for term in _TERMS[1:]:
            result = self.multiply_add(result, r, self.constant(term))
        exponent = b.shl(b.bitcast(shifted, integers), ir.Constant(integers, [52] * _LANES))
        return b.bitcast(b.add(b.bitcast(result, integers), exponent), self.kind)

    def total(self, parts: list[Value]) -> Value:
        """The sum of all lanes: by halves, in a fixed order."""
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self._b.fadd(x, y) for x, y in zip(parts[:half], parts[half:], strict=True)]
        lanes = [self._b.extract_element(parts[0], ir.Constant(I32, lane)) for lane in range(_LANES)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [self._b.fadd(x, y) for x, y in zip(lanes[:half], lanes[half:], strict=True)]
        return lanes[0]


@emitted
def weigh_blocks(
    builder: Any, source: Value, blocks: Value, top: Double, inverse: Double, sums: Value, moments: Value
) -> None:
    """Write the weight of each block, and the sum of its weights times scaled logits: float64 [blocks] each.

    Scaled logits are (logit - top) * inverse, at least NO_WEIGHT. There is at least one block, and no NaN.
    """
    w = _Weights(builder, top, inverse)

    def body(i: Value, _: list[Value]) -> list[Value]:
        first = w.e.scaled(source, i, 4 * BLOCK)
        parts = [w.at(w.e.at(first, 4 * start)) for start in range(0, BLOCK, _LANES)]
        w.e.store(w.total([weights for weights, _ in parts]), w.e.scaled(sums, i, 8), 8)
        multiplied = [builder.fmul(weights, scaled) for weights, scaled in parts]
        w.e.store(w.total(multiplied), w.e.scaled(moments, i, 8), 8)
        return []

    w.e.loop(blocks, [], body)


@emitted
def weigh_listed(
    builder: Any, source: Value, ids: Value, groups: Value, top: Double, inverse: Double, keys: Value, weights: Value
) -> None:
    """Write weights and keys, the negatives of scaled logits, of ids, int32 [8 groups]: float64 [8 groups] each.

    There is at least one group, and all of its ids are ids.
    """
    w = _Weights(builder, top, inverse)

    def body(i: Value, _: list[Value]) -> list[Value]:
        found, scaled = w.listed(source, w.e.scaled(ids, i, 4 * LISTED))
        w.e.store(builder.fsub(w.constant(0.0), scaled), w.e.scaled(keys, i, 8 * LISTED), 8)
        w.e.store(found, w.e.scaled(weights, i, 8 * LISTED), 8)
        return []

    w.e.loop(groups, [], body)


@emitted
def sum_blocks(builder: Any, source: Value, blocks: Value, mean: Double, sums: Value) -> None:
    """Write how many logits are not -inf, and the sums of their differences from `mean` and of the squares of those.

    float64 [3]. There is at least one block, and no NaN.
    """
    w = _Weights(builder, mean, mean)
    floats = ir.VectorType(F32, _LANES)
    none, lowest = w.constant(0.0), ir.Constant(floats, [-math.inf] * _LANES)

    def body(i: Value, carried: list[Value]) -> list[Value]:
        for part in range(2):  # two chains of sums hide the latency of an addition
            logits = w.e.load(w.e.scaled(w.e.at(source, 4 * _LANES * part), i, 8 * _LANES), floats, 4)
            seen = builder.fcmp_ordered(">", logits, lowest)
            away = builder.fsub(builder.fpext(logits, w.kind), w.e.splat(mean))
            away = builder.select(seen, away, none)
            counts, totals, squares = carried[3 * part : 3 * part + 3]
            carried[3 * part] = builder.fadd(counts, builder.select(seen, w.constant(1.0), none))
            carried[3 * part + 1] = builder.fadd(totals, away)
            carried[3 * part + 2] = w.multiply_add(away, away, squares)
        return carried

    carried = w.e.loop(builder.mul(blocks, w.e.const(BLOCK // (2 * _LANES))), [none] * 6, body)
    for field in range(3):
        w.e.store(w.total([carried[field], carried[field + 3]]), w.e.at(sums, 8 * field), 8)
