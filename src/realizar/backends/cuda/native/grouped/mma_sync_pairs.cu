// The end of an item whose sums go to their pairs' rows.

INLINE void finish(const float (&c)[TOKENS / 8][4], float strip_scale, const float (&bias)[2], const Experts& experts,
                   const Item& item) {
  const int thread = threadIdx.x % 128, g = thread % 32 >> 2, t = thread & 3;
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int pair = item.pairs[m * 8 + t * 2 + e];
      if (pair < 0) continue;
      const float2 factor = item.factors[m * 8 + t * 2 + e];
      float* row = (float*)experts.out + (long)pair * experts.out_features;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int feature = item.strip * 64 + thread / 32 * 16 + half * 8 + g;
        if (feature >= experts.out_features) continue;
        row[feature] = c[m][half * 2 + e] * (strip_scale * factor.x) + bias[half] * factor.y;
      }
    }
}
