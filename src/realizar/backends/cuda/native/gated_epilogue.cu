// The activation of the gated epilogue.
// Defined around it: ACTIVATION (1 silu, 2 gelu by tanh, 3 gelu, 4 the clamped SwiGLU of gpt-oss, with SWIGLU_ALPHA and
// SWIGLU_LIMIT, 5 ReLU squared).

INLINE float activated(float x) {  // as kernels/activate.py; exp to infinity leaves 0
  if constexpr (ACTIVATION == 1) return __fdividef(x, 1.f + __expf(-x));
  if constexpr (ACTIVATION == 2) return __fdividef(x, 1.f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
  if constexpr (ACTIVATION == 5) return x < 0.f ? 0.f : x * x;
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
}

// activation(gate) * up, or what the clamped SwiGLU makes of both. NaN stays NaN.
INLINE float gated(float gate, float up) {
#if ACTIVATION == 4
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(gate) : "f"(gate), "f"(SWIGLU_LIMIT));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(up) : "f"(up), "f"(SWIGLU_LIMIT));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(up) : "f"(up), "f"(-SWIGLU_LIMIT));
  return __fdividef(gate, 1.f + __expf(-SWIGLU_ALPHA * gate)) * (up + 1.f);
#else
  return activated(gate) * up;
#endif
}
