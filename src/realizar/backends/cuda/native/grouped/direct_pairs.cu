// The end of an item whose sums go to their pairs' rows.

struct ItemEnd {
  static constexpr int OUTPUTS = SLOTS * 32 * TOKENS, OWN = (OUTPUTS + THREADS - 1) / THREADS;
  float scales[OWN], bias[OWN];  // of the thread's outputs
  INLINE static int unit_of(int item, int i) { return item * SLOTS + i / (32 * TOKENS); }

  // item: among those of its tile.
  INLINE void read(const Experts& experts, int expert, int item, int strips) {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const int i = n * THREADS + threadIdx.x, unit = unit_of(item, i);
      const bool is_own = i < OUTPUTS && unit < strips * 2;
      scales[n] = is_own ? __ldg(experts.block_scales + (long)expert * strips + strip_of(unit, 0)) : 0.f;
      bias[n] = is_own ? bias_of(experts, expert, unit * 32 + i % 32) : 0.f;
    }
  }

  INLINE void finish(const Sums& sums, const Experts& experts, const Tile& tile, int item, int strips) const {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const int i = n * THREADS + threadIdx.x, token = i / 32 % TOKENS, feature = unit_of(item, i) * 32 + i % 32;
      const int pair = i < OUTPUTS ? tile.pairs[token] : -1;
      if (pair < 0 || feature >= experts.out_features) continue;
      const float2 factor = tile.factors[token];
      const float sum = sum_parts(sums, i / (32 * TOKENS), i % 32, token);
      float* row = (float*)experts.out + (long)pair * experts.out_features;
      row[feature] = sum * (scales[n] * factor.x) + bias[n] * factor.y;
    }
  }
};
