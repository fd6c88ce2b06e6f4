// The end of an item whose sums go to their pairs' rows, as floats or as halves.

// The transpose of a matrix of 8 x 8 halves, of which a lane has two of a row.
INLINE u32 transposed(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

INLINE void finish(const float (&c)[STRIPS][TOKENS / 2], const float (&strip_scales)[STRIPS],
                   const float (&bias)[STRIPS][2], const Experts& experts, const Item& item) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, g = thread % 32 >> 2, t = thread & 3;
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  const auto sum = [&](int i, int m, int half, int e, float2 factor) {
    return c[i][m * 4 + half * 2 + e] * (strip_scales[i] * factor.x) + bias[i][half] * factor.y;
  };
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++) {
    const float2 factors[2] = {item.factors[m * 8 + t * 2], item.factors[m * 8 + t * 2 + 1]};
    if constexpr (HALVES) {
      // A lane's sums are of two pairs and of features 8 apart; now it gets four features of one pair side by side.
      const int pair = item.pairs[m * 8 + g];
#pragma unroll
      for (int i = 0; i < STRIPS; i++) {
        u32 own[2];  // of pair g: features 2t and 2t + 1, and those 8 further on
#pragma unroll
        for (int half = 0; half < 2; half++)
          own[half] = transposed(limited_halves(sum(i, m, half, 0, factors[0]), sum(i, m, half, 1, factors[1])));
        const u32 other = __shfl_xor_sync(~0u, t & 1 ? own[0] : own[1], 1);
        const uint2 four = t & 1 ? make_uint2(other, own[1]) : make_uint2(own[0], other);
        const int feature = (item.strip + i) * 64 + thread / 32 * 16 + (t & 1) * 8 + (t >> 1) * 4;
        if (pair >= 0 && feature < experts.out_features)
          *(uint2*)((u16*)experts.out + (long)pair * experts.out_features + feature) = four;
      }
      continue;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int pair = item.pairs[m * 8 + t * 2 + e];
      if (pair < 0) continue;
      float* row = (float*)experts.out + (long)pair * experts.out_features;
#pragma unroll
      for (int i = 0; i < STRIPS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int feature = (item.strip + i) * 64 + thread / 32 * 16 + half * 8 + g;
          if (feature < experts.out_features) row[feature] = sum(i, m, half, e, factors[e]);
        }
    }
  }
}
