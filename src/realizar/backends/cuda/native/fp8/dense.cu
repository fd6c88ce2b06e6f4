// Dense matmuls in 8-bit floats: the order of tiles, and where their sums go.
// Defined around it: TOKENS and CLUSTER, BESIDE (clusters of tokens that run beside each other with the same weights),
// HALVES (1: sums leave as halves), and ACTIVATION with the gated epilogue. Before it: wgmma_instructions.cu, and with
// an activation wgmma_gated.cu.

// The order of tiles: those of BESIDE clusters of tokens share weights in the second-level cache, where the activations
// of all of them stay as well. The blocks of a cluster have the same weights. With several splits each tile is as many
// times there, with a part of the columns each time, whose sums lie apart.
struct Tiles {
  int last_first, last_features, tokens;  // of the last matrix: its first tile of output features; of the step
  int splits;
  INLINE int columns() const { return anew(last_first) + (anew(last_features) + FEATURES - 1) / FEATURES; }
  INLINE int token_blocks() const { return (anew(tokens) + TOKENS - 1) / TOKENS; }
  INLINE int clusters() const { return (token_blocks() + CLUSTER - 1) / CLUSTER; }
  INLINE int first() const { return blockIdx.x / CLUSTER; }
  INLINE bool next(int& tile) const {
    tile += gridDim.x / CLUSTER;
    return tile < columns() * clusters() * splits;
  }
  INLINE Place place(int tile) const {
    const int whole = columns() * clusters(), split = tile / whole;
    tile %= whole;
    const int all = columns() * BESIDE, first = tile / all * BESIDE;
    const int left = clusters() - first, beside = left < BESIDE ? left : BESIDE;
    return {tile % all / beside, (first + tile % all % beside) * CLUSTER + (int)blockIdx.x % CLUSTER, split};
  }
  // The first group of 128 columns of a split, of so many groups in all.
  INLINE int first_group(int split, int groups) const { return split * groups / anew(splits); }
};

// A warpgroup's sums of 64 tokens: by sixteen bytes where the output's places allow it. As halves, divided by
// SUM_FACTOR, they are of whole strips.
INLINE void store_sums(const float (&sums)[PARTS][PART], const Segment& segment, long token_stride, int tokens,
                       int token_block) {
  const int thread = anew(threadIdx.x), g = thread % 32 >> 2, t = thread & 3;
  const int left = segment.out_features - segment.tile * FEATURES, token = token_block * TOKENS + thread / 32 * 16 + g;
  const long at = token * token_stride + segment.tile * FEATURES;
  float* out = segment.out + at;
  const float* features = segment.features ? segment.features + segment.tile * FEATURES : nullptr;
  const bool whole = HALVES || left >= FEATURES && token_stride % 4 == 0 && (u64)out % 16 == 0;
  const bool odd = t % 2;
  constexpr float factor = HALVES ? 1.f / SUM_FACTOR : 1.f;
#pragma unroll
  for (int strip = 0; strip < FEATURES / 64; strip++) {
    if (strip * 64 >= left) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {  // two octets of features
      const float* sum = sums[strip / 2] + (strip % 2 * 4 + i) * 8;
      float4 own = make_float4(factor, factor, factor, factor);
      if (features) {
        const float* at = features + strip * 64 + i * 16 + t * 2;
        own = make_float4(__ldg(at) * factor, __ldg(at + 1) * factor, __ldg(at + 8) * factor, __ldg(at + 9) * factor);
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float2 first = make_float2(sum[r * 2] * own.x, sum[r * 2 + 1] * own.y);
        const float2 second = make_float2(sum[r * 2 + 4] * own.z, sum[r * 2 + 5] * own.w);
        float* row = out + r * 8 * token_stride + strip * 64 + i * 16;
        if (whole) {  // lanes t and t ^ 1 have an octet each
          const float2 sent = odd ? first : second, kept = odd ? second : first;
          const float2 other = make_float2(__shfl_xor_sync(~0u, sent.x, 1), __shfl_xor_sync(~0u, sent.y, 1));
          if constexpr (HALVES) {
            const float2 low = odd ? other : kept, high = odd ? kept : other;
            u16* halves = (u16*)segment.out + at + r * 8 * token_stride + strip * 64 + i * 16 + t % 2 * 8 + t / 2 * 4;
            if (token + r * 8 < tokens)
              *(uint2*)halves = make_uint2(limited_halves(low.x, low.y), limited_halves(high.x, high.y));
          } else if (token + r * 8 < tokens)
            *(float4*)(row + t % 2 * 8 + t / 2 * 4) =
                odd ? make_float4(other.x, other.y, kept.x, kept.y) : make_float4(kept.x, kept.y, other.x, other.y);
        } else if (token + r * 8 < tokens) {
          const int feature = strip * 64 + i * 16 + t * 2;
          if (feature < left) row[t * 2] = first.x;
          if (feature + 1 < left) row[t * 2 + 1] = first.y;
          if (feature + 8 < left) row[t * 2 + 8] = second.x;
          if (feature + 9 < left) row[t * 2 + 9] = second.y;
        }
      }
    }
  }
}

// segment_of: the matrix of a tile of all matrices' output features.
template <class SegmentOf>
struct Dense : Tiles {
  static constexpr bool EARLY = STORED;  // weights are no results of the kernel before
  const SegmentOf& segment_of;
  int token_stride, split_stride;
  INLINE Dense(const Tiles& tiles, const SegmentOf& segment_of, int token_stride, int split_stride)
      : Tiles(tiles), segment_of(segment_of), token_stride(token_stride), split_stride(split_stride) {}
  INLINE Segment segment(const Place& place) const { return segment_of(place.column); }
  INLINE void begin() const {}
  INLINE void stage() const {}
  INLINE void store(const float (&sums)[PARTS][PART], const Place& place, int) const {
#ifdef ACTIVATION
    const Segment own = segment(place);
    store_gated(sums, own, nullptr, own.features ? own.features + own.tile * FEATURES : nullptr, place.token_block);
#else
    Segment own = segment(place);
    own.out += (long)place.split * split_stride;
    store_sums(sums, own, token_stride, tokens, place.token_block);
#endif
  }
};
