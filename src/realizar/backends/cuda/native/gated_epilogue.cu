// The activation of the gated epilogue.
// Defined around it: ACTIVATION (1 silu, 2 gelu by tanh, 3 gelu).

INLINE float activated(float x) {  // as kernels/activate.py; exp to infinity leaves 0
  if constexpr (ACTIVATION == 1) return __fdividef(x, 1.f + __expf(-x));
  if constexpr (ACTIVATION == 2) return __fdividef(x, 1.f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
}
