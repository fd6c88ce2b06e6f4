// The end of an item of gate and up, whose outputs leave as halves in the next matmul's order.

struct ItemEnd {
  static constexpr int OUTPUTS = SLOTS * 16 * TOKENS, OWN = (OUTPUTS + THREADS - 1) / THREADS;
  float scales[OWN][2], bias[OWN][2];  // of the thread's gates and ups
  INLINE static int unit_of(int item, int i) { return item * SLOTS + i / (16 * TOKENS); }
  INLINE static int column_of(int i) { return i / TOKENS % 16; }

  // item: among those of its tile.
  INLINE void read(const Experts& experts, int expert, int item, int strips) {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const int i = n * THREADS + threadIdx.x, unit = unit_of(item, i);
      const bool is_own = i < OUTPUTS && unit < strips * 2;
#pragma unroll
      for (int second = 0; second < 2; second++) {
        const int strip = strip_of(unit, second), feature = strip * 64 + tile_of(unit, second) * 16 + column_of(i);
        scales[n][second] = is_own ? __ldg(experts.block_scales + (long)expert * strips + strip) : 0.f;
        bias[n][second] = is_own ? bias_of(experts, expert, feature) : 0.f;
      }
    }
  }

  INLINE void finish(const Sums& sums, const Experts& experts, const Tile& tile, int item, int strips) const {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const int i = n * THREADS + threadIdx.x, unit = unit_of(item, i), token = i % TOKENS, column = column_of(i);
      if (i >= OUTPUTS || unit >= strips * 2) return;
      const float factor = tile.factors[token].x;
      const float gate = sum_parts(sums, i / (16 * TOKENS), column, token) * (scales[n][0] * factor) + bias[n][0];
      const float up = sum_parts(sums, i / (16 * TOKENS), column + 16, token) * (scales[n][1] * factor) + bias[n][1];
      // Column d of a chunk: core matrix d % 16 / 4 * 2 + d % 2, place d / 16 * 2 + d % 4 / 2.
      u16* out = (u16*)experts.out + ((long)tile.index * (strips / 2) + unit / 4) * (TOKENS * 64);
      u16* core = out + (column / 4 * 2 + column % 2) * (TOKENS * 8) + token * 8;
      core[unit % 4 * 2 + column % 4 / 2] = limited_half(gated(gate, up) * (1.f / TOKEN_FACTOR));
    }
  }
};
