// The end of an item whose sums go to their pairs' rows.

INLINE void close() {}

INLINE void finish(const float (&c)[STRIPS][TOKENS / 2], const float (&strip_scales)[STRIPS],
                   const float (&bias)[STRIPS][2], const Experts& experts, const Item& item) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, g = thread % 32 >> 2, t = thread & 3;
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int pair = item.pairs[m * 8 + t * 2 + e];
      if (pair < 0) continue;
      const float2 factor = item.factors[m * 8 + t * 2 + e];
      float* row = (float*)experts.out + (long)pair * experts.out_features;
#pragma unroll
      for (int i = 0; i < STRIPS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int feature = (item.strip + i) * 64 + thread / 32 * 16 + half * 8 + g;
          if (feature >= experts.out_features) continue;
          row[feature] = c[i][m * 4 + half * 2 + e] * (strip_scales[i] * factor.x) + bias[i][half] * factor.y;
        }
    }
}
