// Values as the codes and terms that the mat-vec reads: 16 neighbours, in 16 lanes beside each other, share a scale.

INLINE float larger(float x, float y) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); return r; }

struct Code {
  int code;
  float scale, sum;  // of all 16
  INLINE void store(char* codes, float2* terms, long group, int column) const {
    codes[group * 16 + column] = (char)code;
    if (column == 0) terms[group] = make_float2(scale, sum);
  }
};
// All lanes of a warp come here.
INLINE Code code_of(float x) {
  float top = fabsf(x);  // NaN stays NaN, in the scale
#pragma unroll
  for (int o = 8; o; o >>= 1) top = larger(top, __shfl_xor_sync(~0u, top, o));
  const float scale = top / 127.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
  const int code = __float2int_rn(x * inverse);
  int sum = code;
#pragma unroll
  for (int o = 8; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  return Code{code, scale, scale * (float)sum};
}
