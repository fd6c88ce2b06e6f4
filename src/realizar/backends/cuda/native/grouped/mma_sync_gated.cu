// The end of an item of gate and up: the first half of the warps holds sums of gate, the second those of up.

INLINE void finish(const float (&c)[TOKENS / 8][4], float strip_scale, const float (&bias)[2], const Experts& experts,
                   const Item& item) {
  static_assert(STRIPS == 2, "gate and up of the same outputs");
  static_assert(TOKENS / 2 * 128 * 4 <= STAGES * STAGE_BYTES, "the ring holds the sums of up");
  float* ups = (float*)ring;
  const int thread = threadIdx.x % 128, g = thread % 32 >> 2, t = thread & 3;
  __syncthreads();
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (threadIdx.x >= 128) {
        const float scale = strip_scale * item.factors[m * 8 + t * 2 + i % 2].x;
        ups[(m * 4 + i) * 128 + thread] = c[m][i] * scale + bias[i / 2];
      }
  __syncthreads();
  if (threadIdx.x >= 128 || item.strip >= item.strips) return;
  // Of column d = 16 tile + g (+ 8) of the chunk: core matrix d % 16 / 4 * 2 + d % 2, place d / 16 * 2 + d % 4 / 2.
  u16* out = (u16*)experts.out + ((long)item.tile * (item.strips / 2) + item.strip / 2) * (TOKENS * 64);
  u16* to = out + ((g >> 2) * 2 + (g & 1)) * (TOKENS * 8) + t * 16 + thread / 32 * 2 + (g >> 1 & 1);
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float gate = c[m][i] * (strip_scale * item.factors[m * 8 + t * 2 + i % 2].x) + bias[i / 2];
      const float value = gated(gate, ups[(m * 4 + i) * 128 + thread]);
      to[i / 2 * 4 * (TOKENS * 8) + m * 64 + i % 2 * 8] = limited_half(value * (1.f / TOKEN_FACTOR));
    }
}
