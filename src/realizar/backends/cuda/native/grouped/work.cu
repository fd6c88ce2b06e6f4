// The work of a grouped matmul: tiles of pairs, each of one expert, by output features.
// Defined around it: TOKENS (places of a tile) GATHER (1: rows of x are found by pairs, 0: they lie as tiles), and
// ACTIVATION where gate and up of a feed-forward are multiplied, HALVES (1: sums of pairs leave as halves).

constexpr float OUTPUT_FACTOR = HALVES ? SUM_FACTOR : 1.f;

struct Experts {
  const char* weights;        // of expert e at e * stride
  const float* block_scales;  // [experts, strips]
  const void* table;
  const float* bias;  // [experts, out_features], or null
  char* out;          // halves in tiles, or float or halves [pairs, out_features]
  const float* pair_weights;  // factors of outputs, or null
  const char* x;
  const float* x_scales;  // of the rows of x; null where they are what gate and up left
  const int* slots;       // as route.cu writes them
  const int* work;
  long stride;
  int out_features, chunks;
  int x_share, x_block;  // pairs that share a row of x; rows of its blocks
};

// A tile by output features: the first of a warpgroup's or a warp's strips, of an expert's `strips`.
struct Item {
  int tile, strip, strips;
  const float2* factors;  // of the tile's places: see `pair_factors`
  const int* pairs;       // or -1
};

// What the kernel before the last has written; never from a cache that its values may have missed.
INLINE int load_listed(const int* at) {
  int r;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}

// The factors of a pair's sums and of its bias.
INLINE float2 pair_factors(const Experts& experts, int pair) {
  if (pair < 0) return make_float2(0.f, 0.f);
  const bool scaled = GATHER || experts.x_scales;
  const float scale = scaled ? load_float(experts.x_scales + pair / experts.x_share) : TOKEN_FACTOR;
  const float weight = (experts.pair_weights ? load_float(experts.pair_weights + pair) : 1.f) / OUTPUT_FACTOR;
  return make_float2(scale * weight, weight);
}

INLINE float bias_of(const Experts& experts, int expert, int feature) {
  if (experts.bias == nullptr || feature >= experts.out_features) return 0.f;
  return __ldg(experts.bias + (long)expert * experts.out_features + feature);
}

// Where a pair's row of x begins, in units of 16 bytes.
INLINE int row_of(const Experts& experts, int pair) {
  const int row = pair / experts.x_share;
  return row / experts.x_block * experts.chunks * experts.x_block * 8 + row % experts.x_block;
}
