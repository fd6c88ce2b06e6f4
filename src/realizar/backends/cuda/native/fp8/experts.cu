// Matmuls over experts in 8-bit floats: a tile has places, as grouped/route.cu fills them, where dense ones have
// tokens, and all of its places are of one expert. What the end of a tile asks for comes from memory in three steps, so
// a warp beside the producer stages it while the tile is multiplied.
// Defined around it: TOKENS (places of a tile) HALVES (1: sums of pairs leave as halves) and ACTIVATION with the gated
// epilogue. Before it: wgmma_instructions.cu, grouped/work.cu, and with an activation wgmma_gated.cu.

struct TileEnd {
  int expert;
  int pairs[TOKENS];      // of the places, or -1
  float factors[TOKENS];  // of their sums
};

// bias, features: of the tile's output features, of which `left` are there, or null. out: of the first of them, of pair
// 0.
INLINE void store_pairs(const float (&sums)[PARTS][PART], const TileEnd& own, const float* bias, const float* features,
                        char* out, int out_features, int left) {
  const int thread = anew(threadIdx.x), g = thread % 32 >> 2, t = thread & 3;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = thread / 32 * 16 + r * 8 + g, pair = own.pairs[row];
    const float factor = own.factors[row];
#pragma unroll
    for (int strip = 0; strip < FEATURES / 64; strip++) {
      if (strip * 64 >= left) break;
#pragma unroll
      for (int i = 0; i < 2; i++) {  // four octets of features
        float2 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float* sum = sums[strip / 2] + (strip % 2 * 8 + i * 4 + k) * 4 + r * 2;
          x[k] = make_float2(sum[0] * factor, sum[1] * factor);
          const int feature = strip * 64 + (i * 4 + k) * 8 + t * 2;
          if (features && feature < left) {
            x[k].x *= __ldg(features + feature);
            x[k].y *= __ldg(features + feature + 1);
          }
          if (bias && feature < left) {
            x[k].x += __ldg(bias + feature) * factor;
            x[k].y += __ldg(bias + feature + 1) * factor;
          }
        }
        if constexpr (HALVES) {
          u32 words[4];
#pragma unroll
          for (int k = 0; k < 4; k++) words[k] = limited_halves(x[k].x, x[k].y);
          transpose_words(words, t);
          const int feature = strip * 64 + i * 32 + t * 8;
          if (pair >= 0 && feature < left)
            *(uint4*)((u16*)out + (long)pair * out_features + feature) =
                make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const int feature = strip * 64 + (i * 4 + k) * 8 + t * 2;
            if (pair >= 0 && feature < left) *(float2*)((float*)out + (long)pair * out_features + feature) = x[k];
          }
        }
      }
    }
  }
}

struct Grouped {
  static constexpr bool EARLY = false;  // which weights there are is a result of the kernel before
  const char* weights;    // as decode.cu writes them, and their scales, expert after expert; STORED: their map
  const float* scales;
  const float* features;  // STORED: factors of output features, of each expert up to a whole strip, or null
  const float* bias;      // [experts, out_features], or null
  char* out;              // of pairs; with the gated epilogue the next matmul's codes
  float* out_scales;      // with the gated epilogue: the next matmul's scales
  const float* pair_weights;  // factors of outputs, or null
  const int* slots;       // as grouped/route.cu writes them
  const int* work;
  int out_features, chunks;
  int* total;             // tiles of places times those of output features; in shared memory, as registers are scarce
  TileEnd* staged;        // two, in shared memory
  u32 barriers;           // of them: full, then empty

  INLINE int columns() const { return (anew(out_features) + FEATURES - 1) / FEATURES; }
  INLINE int token_blocks() const { return 1 << 30; }  // of dense ones, beyond which a cluster may reach
  INLINE int first() const { return blockIdx.x; }
  INLINE bool next(int& tile) const {
    tile += gridDim.x;
    return tile < *total;
  }
  INLINE Place place(int tile) const { return {tile % columns(), tile / columns()}; }
  INLINE int first_group(int split, int groups) const { return split * groups; }  // there is one
  INLINE Segment segment(const Place& place) const {
    const long expert = load_listed(work + 1 + place.token_block) >> 1;
    const long groups = (chunks + 1) / 2;
    const long tiles = expert * columns() * groups;
    return {weights + (STORED ? 0 : tiles * WEIGHTS_STAGE), scales + tiles * (FEATURES / 64), (float*)out, out_features,
            place.column, out_scales, nullptr, (int)expert};
  }
  INLINE void begin() const {
    *total = load_listed(work) * columns();
    for (int i = 0; i < 2; i++) { barrier_init(barriers + i * 8, 32); barrier_init(barriers + 16 + i * 8, 8); }
  }
  INLINE void stage() const {
    const int lane = threadIdx.x % 32;
    int tile = first(), turn = 0;
#pragma unroll 1
    do {
      const Place at = place(tile);
      TileEnd& to = staged[turn & 1];
      const u32 full = barriers + (turn & 1) * 8;
      const int expert = load_listed(work + 1 + at.token_block) >> 1;
      barrier_wait(full + 16, ~turn >> 1 & 1);
      if (lane == 0) to.expert = expert;
#ifndef ACTIVATION
#pragma unroll
      for (int i = 0; i < TOKENS / 32; i++) {
        const int pair = load_listed(slots + at.token_block * TOKENS + i * 32 + lane);
        const float weight = pair >= 0 && pair_weights ? load_float(pair_weights + pair) : 1.f;
        to.pairs[i * 32 + lane] = pair;
        to.factors[i * 32 + lane] = weight / OUTPUT_FACTOR;
      }
#endif
      barrier_arrive(full);
      turn++;
    } while (next(tile));
  }
  INLINE void store(const float (&sums)[PARTS][PART], const Place& place, int turn) const {
    const TileEnd& own = staged[turn & 1];
    const u32 full = barriers + (turn & 1) * 8;
    barrier_wait(full, turn >> 1 & 1);
    const int first = place.column * FEATURES;
    const float* tile_bias = bias ? bias + (long)own.expert * out_features + first : nullptr;
    const float* factors = features ? features + (long)own.expert * ((out_features + 63) / 64 * 64) + first : nullptr;
#ifdef ACTIVATION
    const Segment matrix{nullptr, nullptr, (float*)out, out_features, place.column, out_scales};
    store_gated(sums, matrix, tile_bias, factors, place.token_block);
#else
    store_pairs(sums, own, tile_bias, factors, out + first * (HALVES ? 2 : 4), out_features, out_features - first);
#endif
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(full + 16);
  }
};
