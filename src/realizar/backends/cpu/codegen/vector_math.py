"""exp, tanh and erf on vectors of float32, emitted inline: the compiler has no vector library to call.

exp: range reduction by ln 2 in two parts and a polynomial of degree 5, fitted for the least relative error on
[-ln 2 / 2, ln 2 / 2]; relative error below 2.5e-7 on [-87, 88].
"""

from __future__ import annotations

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import F32, I32, Emitter
from realizar.backends.cpu.emitted import Value
from realizar.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT

CLAMPED = "clamped"  # the activation of `models.spec.Experts.clamped`
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.428606765330187e-06
_EXP_TERMS = (
    0.008290272206068039, 0.04189816117286682, 0.1666763871908188, 0.4999914765357971, 0.9999997019767761, 1.0,
)  # fmt: skip
_LEAST, _MOST = -87.0, 88.0
_ROUNDER = 12582912.0  # 1.5 * 2 ** 23: adding it rounds to an integer, which the low bits of the sum then hold
_ERF_P = 0.3275911  # Abramowitz and Stegun 7.1.26
_ERF_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


class VectorMath(Emitter):
    """An emitter that knows elementary functions. `lanes` need not be the machine's: LLVM splits."""

    def minimum(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def polynomial(self, x: Value, terms: tuple[float, ...]) -> Value:
        result = self.const_f32(terms[0])
        for term in terms[1:]:
            result = self.fma(result, x, self.const_f32(term))
        return result

    def exp(self, x: Value) -> Value:
        """exp of x, which is held to [-87, 88]."""
        return self._exp(self.maximum(self.minimum(x, self.const_f32(_MOST)), self.const_f32(_LEAST)))

    def exp_or_zero(self, x: Value) -> Value:
        """exp of x <= 88; exactly zero below -87."""
        value = self.b.bitcast(self._exp(x), self.i32)
        seen = self.b.fcmp_ordered(">=", x, self.const_f32(_LEAST))
        return self.b.bitcast(self.b.select(seen, value, self.const_i32(0)), self.f32)

    def _exp(self, x: Value) -> Value:
        shifted = self.fma(x, self.const_f32(_LOG2_E), self.const_f32(_ROUNDER))
        n = self.b.fsub(shifted, self.const_f32(_ROUNDER))
        r = self.fma(n, self.const_f32(-_LN2_HIGH), x)
        r = self.fma(n, self.const_f32(-_LN2_LOW), r)
        exponent = self.b.shl(self.b.bitcast(shifted, self.i32), self.const_i32(23))
        return self.b.bitcast(self.b.add(self.b.bitcast(self.polynomial(r, _EXP_TERMS), self.i32), exponent), self.f32)

    def tanh(self, x: Value) -> Value:
        """1 - 2 / (exp(2 x) + 1); near zero x - x^3 / 3 + 2 x^5 / 15 - 17 x^7 / 315, which does not cancel."""
        one, two = self.const_f32(1.0), self.const_f32(2.0)
        large = self.b.fsub(one, self.b.fdiv(two, self.b.fadd(self.exp(self.b.fmul(two, x)), one)))
        square = self.b.fmul(x, x)
        small = self.b.fmul(x, self.polynomial(square, (-17 / 315, 2 / 15, -1 / 3, 1.0)))
        return self.b.select(self.b.fcmp_ordered("<", square, self.const_f32(0.04)), small, large)

    def erf(self, x: Value) -> Value:
        """Error below 6e-7 absolute."""
        negative = self.b.fcmp_ordered("<", x, self.const_f32(0.0))
        size = self.b.select(negative, self.b.fsub(self.const_f32(0.0), x), x)
        one = self.const_f32(1.0)
        t = self.b.fdiv(one, self.fma(self.const_f32(_ERF_P), size, one))
        series = self.b.fmul(t, self.polynomial(t, _ERF_TERMS))
        decay = self.exp(self.b.fsub(self.const_f32(0.0), self.b.fmul(size, size)))
        value = self.b.fsub(one, self.b.fmul(series, decay))
        return self.b.select(negative, self.b.fsub(self.const_f32(0.0), value), value)

    def sigmoid(self, x: Value) -> Value:
        return self._over_one_plus_exp(self.const_f32(1.0), x)

    def silu(self, x: Value) -> Value:
        return self._over_one_plus_exp(x, x)

    def _over_one_plus_exp(self, y: Value, x: Value) -> Value:
        one = self.const_f32(1.0)
        return self.b.fdiv(y, self.b.fadd(one, self.exp(self.b.fsub(self.const_f32(0.0), x))))

    def gelu_tanh(self, x: Value) -> Value:
        cube = self.b.fmul(self.b.fmul(x, x), x)
        inner = self.b.fmul(self.fma(self.const_f32(0.044715), cube, x), self.const_f32(0.7978845608028654))
        return self._half_one_plus(x, self.tanh(inner))

    def gelu(self, x: Value) -> Value:
        return self._half_one_plus(x, self.erf(self.b.fmul(x, self.const_f32(0.7071067811865476))))

    def relu_squared(self, x: Value) -> Value:
        positive = self.maximum(self.const_f32(0.0), x)  # NaN stays
        return self.b.fmul(positive, positive)

    def gated(self, name: str, gate: Value, up: Value) -> Value:
        """An activation of gate, times up; or what `Experts.clamped` makes of both."""
        if name != CLAMPED:
            return self.b.fmul(getattr(self, name)(gate), up)
        one, limit = self.const_f32(1.0), self.const_f32(SWIGLU_LIMIT)
        gate, up = self.minimum(gate, limit), self.maximum(self.minimum(up, limit), self.const_f32(-SWIGLU_LIMIT))
        divisor = self.b.fadd(one, self.exp(self.b.fmul(gate, self.const_f32(-SWIGLU_ALPHA))))
        return self.b.fmul(self.b.fdiv(gate, divisor), self.b.fadd(up, one))

    def _half_one_plus(self, x: Value, value: Value) -> Value:
        half = self.b.fmul(x, self.const_f32(0.5))
        return self.b.fmul(half, self.b.fadd(self.const_f32(1.0), value))

    def reduce_add(self, x: Value) -> Value:
        """Sum of the lanes by halving: a fixed order."""
        return self._reduce(x, self.b.fadd if x.type.element == F32 else self.b.add)

    def reduce_max(self, x: Value) -> Value:
        def larger(a: Value, b: Value) -> Value:
            greater = self.b.fcmp_ordered(">", a, b) if x.type.element == F32 else self.b.icmp_unsigned(">", a, b)
            return self.b.select(greater, a, b)

        return self._reduce(x, larger)

    def _reduce(self, x: Value, combine: object) -> Value:
        count = x.type.count
        while count > 1:
            count //= 2
            undefined = ir.Constant(x.type, ir.Undefined)
            low = ir.Constant(ir.VectorType(I32, count), list(range(count)))
            high = ir.Constant(ir.VectorType(I32, count), list(range(count, 2 * count)))
            first, second = self.b.shuffle_vector(x, undefined, low), self.b.shuffle_vector(x, undefined, high)
            x = combine(first, second)  # type: ignore[operator]
        return self.b.extract_element(x, ir.Constant(I32, 0))
