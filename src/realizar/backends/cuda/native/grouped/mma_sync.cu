// Grouped matmuls from compute capability 8.0 on. A fixed number of blocks takes items, an expert's tile of pairs by
// some of its output features, one after the other in the order of experts; how many there are stands in memory.
// Defined around it: TOKENS (8 to 64) STRIPS (of 64 output features, a warp for every 16 of them) STAGES.

constexpr int THREADS = STRIPS * 128;
constexpr int STRIP_STAGE = BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = STRIPS * STRIP_STAGE;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + TOKENS * 128;
static_assert(TOKENS <= THREADS, "a thread for each place of a tile");

// The body.
INLINE void multiply_experts(const Experts& experts) {
  __shared__ float2 factors[TOKENS];
  __shared__ int pairs[TOKENS];
  const u32 base = (u32)__cvta_generic_to_shared(ring);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tile16 = warp % 4, own = warp / 4;
  const int chunks = experts.chunks, strips = (experts.out_features + 63) / 64;
  const int per_tile = (strips + STRIPS - 1) / STRIPS;
  wait_for_previous();
  let_next_start();
  const int total = load_listed(experts.work) * per_tile;
  for (int item = blockIdx.x; item < total; item += gridDim.x) {
    const int tile = item / per_tile, strip0 = item % per_tile * STRIPS, strip = strip0 + own;
    const int expert = load_listed(experts.work + 1 + tile) >> 1;
    const char* weights = experts.weights + expert * experts.stride + strip0 * strip_bytes(chunks);
    const char* tiles = experts.x + (long)tile * chunks * (TOKENS * 128);
    __syncthreads();  // nobody reads the ring, factors and pairs of the item before
    if (threadIdx.x < TOKENS) {
      const int pair = load_listed(experts.slots + tile * TOKENS + threadIdx.x);
      pairs[threadIdx.x] = pair;
      factors[threadIdx.x] = pair_factors(experts, pair);
    }
    __syncthreads();
    auto fetch = [&](int k) {
      if (k < chunks) {
        const u32 to = base + k % STAGES * STAGE_BYTES;
        for (int i = threadIdx.x; i < STRIPS * (STRIP_STAGE / 16); i += THREADS) {
          const int s = i / (STRIP_STAGE / 16), at = i % (STRIP_STAGE / 16) * 16;
          if (strip0 + s >= strips) break;
          const long from = at < BLOCK_BYTES ? block_at(k) + at : supers_at(k) + at - BLOCK_BYTES;
          copy16(to + s * STRIP_STAGE + at, weights + s * strip_bytes(chunks) + from);
        }
        // Eight core-matrix columns of TOKENS rows of 16 bytes.
        for (int i = threadIdx.x; i < TOKENS * 8; i += THREADS) {
          if constexpr (GATHER) {
            const int pair = pairs[i % TOKENS];
            if (pair < 0) continue;
            const long from = row_of(experts, pair) + ((long)k * 8 + i / TOKENS) * experts.x_block;
            copy16(to + WEIGHTS_STAGE + i * 16, experts.x + from * 16);
          } else copy16(to + WEIGHTS_STAGE + i * 16, tiles + (long)k * (TOKENS * 128) + i * 16);
        }
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int k = 0; k < STAGES - 1; k++) fetch(k);
    float c[TOKENS / 8][4];
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m++) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.f;
    for (int k = 0; k < chunks; k++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncthreads();
      fetch(k + STAGES - 1);
      const int at = k % STAGES * STAGE_BYTES;
      const Staged block{ring + at + own * STRIP_STAGE}, supers{ring + at + own * STRIP_STAGE + BLOCK_BYTES};
      Raw raw;
      u32 a[4][4];
      read_codes(raw, block, tile16, lane);
      read_scales(raw, block, supers, tile16, lane);
      decode(a, raw, experts.table);
      // Lane l addresses row l % 8 of core matrix 4 h + l / 8: two K steps at once.
      const u32 core_row = base + at + WEIGHTS_STAGE + (lane / 8 * TOKENS + lane % 8) * 16;
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++) {
          u32 b[4];
          load_matrices(b, core_row + h * 4 * TOKENS * 16 + m * 128);
          multiply(c[m], a[2 * h], b[0], b[1]);
          multiply(c[m], a[2 * h + 1], b[2], b[3]);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    float bias[2];
#pragma unroll
    for (int half = 0; half < 2; half++) bias[half] = bias_of(experts, expert, strip * 64 + tile16 * 16 + half * 8 + g);
    const float strip_scale = strip < strips ? __ldg(experts.block_scales + (long)expert * strips + strip) : 0.f;
    finish(c, strip_scale, bias, experts, Item{tile, strip, strips, factors, pairs});
  }
}
