// The Hopper kernel of long steps: blocks that stay and take tile after tile of their matrix, while the producer goes
// on to the next tile during the last one's outputs. Sums have the order of multiply_matrix.
// Defined around it: what wgmma.cu has, with TOKENS_BESIDE (blocks of tokens whose tiles run beside each other with the
// same weights, so that both stay in the second-level cache) and HALVES (1: sums leave as halves). Before it: wgmma.cu.

static_assert(TURNS == 1 && SUMMED == 1 && STEP == 1 && REGISTERS > 0 && STAGED_OUT);
constexpr int GIVEN = 8;  // registers that a consumer thread leaves to the producer, which finds its tiles

// One tile of a block.
struct Place {
  int block_x, token_block, split, first, count;  // the last two of its chunks
  INLINE int strip0() const { return block_x * GROUPS * STRIPS; }
};
// The order of a matrix's tiles.
struct Tiles {
  int blocks_x, tokens, chunks, splits;
  INLINE int token_blocks() const { return (anew(tokens) + TOKENS - 1) / TOKENS; }
  INLINE int columns() const { return anew(blocks_x) * anew(splits); }
  INLINE bool next(int& tile) const {
    tile += gridDim.x;
    return tile < columns() * token_blocks();
  }
  INLINE Place place(int tile) const {
    const int all = columns() * TOKENS_BESIDE, first = tile / all * TOKENS_BESIDE;
    const int left = token_blocks() - first, beside = left < TOKENS_BESIDE ? left : TOKENS_BESIDE;
    const int column = tile % all / beside, across = anew(blocks_x), split = column / across;
    const int pairs = chunks / 2;
    const int begin = pairs * split / splits * 2, end = pairs * (split + 1) / splits * 2;
    return {column % across, first + tile % all % beside, split, begin, end - begin};
  }
};

// The producer: tile after tile, a chunk a stage.
INLINE void fill_ring_of_tiles(const Matrix& matrix, const Tiles& tiles, const char* values, u32 full) {
  const u32 empty = full + STAGES * 8, base = shared_address(ring);
  int slot = 0, parity = 1, tile = blockIdx.x;
#pragma unroll 1
  do {
    const Place place = tiles.place(tile);
    const int left = (matrix.out_features + 63) / 64 - place.strip0();
    const int used = left < GROUPS * STRIPS ? left : GROUPS * STRIPS;
    const char* x = values + ((long)place.token_block * tiles.chunks + place.first) * X_CHUNK;
    const char* weights = matrix.weights + place.strip0() * strip_bytes(tiles.chunks);
#pragma unroll 1
    for (int chunk = place.first; chunk < place.first + place.count; chunk++) {
      const u32 barrier = full + slot * 8, to = base + slot * STAGE_BYTES;
      barrier_wait(empty + slot * 8, parity);
      barrier_expect(barrier, used * (BLOCK_BYTES + SUPER_BYTES) + X_CHUNK);
      copy_bulk(to + WEIGHTS_STAGE, x, X_CHUNK, barrier);
      const char* strip = weights;
#pragma unroll 1
      for (int i = 0; i < used; i++, strip += strip_bytes(tiles.chunks)) {
        copy_bulk(to + i * STRIP_STAGE, strip + block_at(chunk), BLOCK_BYTES, barrier);
        if constexpr (TWO_LEVEL)
          copy_bulk(to + i * STRIP_STAGE + BLOCK_BYTES, strip + supers_at(chunk), SUPER_BYTES, barrier);
      }
      x += X_CHUNK;
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
  } while (tiles.next(tile));
}

#if HALVES
// A warpgroup's sums to its outputs, whose features are a multiple of 128, as halves: both strips of a token at once.
INLINE void store_halves(const float (&c)[STRIPS][TOKENS / 2], const float (&strip_scales)[STRIPS],
                         const Matrix& matrix, const Shape& shape, long split, int token_block, int first_strip,
                         int strips, const float* scales, char* room) {
  static_assert(STRIPS == 2);
  if (first_strip >= strips) return;
  constexpr int PITCH = OUT_PITCH * 4;
  const int group = threadIdx.x / 128, tile = threadIdx.x / 32 % 4, g = threadIdx.x % 32 >> 2, t = threadIdx.x & 3;
  char* staged = room + group * OUT_BYTES;
  char* to = staged + t * 2 * PITCH + (tile * 16 + g) * 2;
#pragma unroll
  for (int i = 0; i < STRIPS; i++)
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float scale = strip_scales[i] * scales[m * 8 + t * 2 + e] * (1.f / SUM_FACTOR);
        const u32 both = limited_halves(c[i][m * 4 + e] * scale, c[i][m * 4 + 2 + e] * scale);
        u16* row = (u16*)(to + (m * 8 + e) * PITCH) + i * 64;
        row[0] = (u16)both;
        row[8] = (u16)(both >> 16);
      }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
  const int m = threadIdx.x % 128, token = token_block * TOKENS + m;
  u16* out = (u16*)matrix.partials + split * shape.split_stride + (long)token * shape.token_stride + first_strip * 64;
  if (m < TOKENS && token < shape.tokens) store_bulk(out, shared_address(staged) + m * PITCH, 256);
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
#endif

INLINE void multiply_tiles(const Matrix& matrix, const Shape& shape, const char* values, const float* token_scales) {
  constexpr int FEATURES = GROUPS * STRIPS * 64;
  const Tiles tiles{(matrix.out_features + FEATURES - 1) / FEATURES, shape.tokens, shape.chunks, shape.splits};
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  __shared__ float scales[2][TOKENS];                // of a tile's tokens, and of the next one's
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    const u32 full = shared_address(barriers), empty = full + STAGES * 8;
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, GROUPS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= CONSUMERS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(24 + GROUPS * GIVEN));
    if (threadIdx.x == CONSUMERS) fill_ring_of_tiles(matrix, tiles, values, shared_address(barriers));
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS - GIVEN));
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, base = shared_address(ring);
    const int strips = (matrix.out_features + 63) / 64;
    const int group = warp / 4, warp_tile = warp % 4, lane = threadIdx.x % 32;
    const u32 x_low = first_descriptor(base);
    char* room = ring + STAGES * STAGE_BYTES;  // of outputs
    int slot = 0, parity = 0, tile = blockIdx.x, odd = 0;
#pragma unroll 1
    do {
      const Place place = tiles.place(tile);
      if (place.strip0() + group * STRIPS >= strips) {  // behind the last strip
#pragma unroll 1
        for (int k = 0; k < place.count; k++) {
          barrier_wait(full + slot * 8, parity);
          if (lane == 0) barrier_arrive(empty + slot * 8);
          if (++slot == STAGES) { slot = 0; parity ^= 1; }
        }
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
        odd ^= 1;
        continue;
      }
      float strip_scales[STRIPS];  // requested now: at the end their latency would be seen
#pragma unroll
      for (int i = 0; i < STRIPS; i++) {
        const int strip = place.strip0() + group * STRIPS + i;
        strip_scales[i] = strip < strips ? __ldg(matrix.block_scales + strip) : 0.f;
      }
      float token_factor = 0.f;
      if (threadIdx.x < TOKENS)
        token_factor = token_scale(token_scales, shape, place.token_block * TOKENS + threadIdx.x);
      float c[STRIPS][TOKENS / 2];
#pragma unroll
      for (int i = 0; i < STRIPS; i++)
#pragma unroll
        for (int e = 0; e < TOKENS / 2; e++) c[i][e] = 0.f;
      u32 a[2][STRIPS][4][4];
      int previous = slot;
      auto step = [&](int k, u32(&operand)[STRIPS][4][4]) {
        barrier_wait(full + slot * 8, parity);
        read_strips(operand, base + slot * STAGE_BYTES, 0, group, warp_tile, lane, matrix.table);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply_chunk(c, operand, x_low + slot * (STAGE_BYTES / 16));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (k > 0 && lane == 0) barrier_arrive(empty + previous * 8);  // its matmul is done
        previous = slot;
        if (++slot == STAGES) { slot = 0; parity ^= 1; }
      };
#pragma unroll 1
      for (int k = 0; k < place.count; k += 2) { step(k, a[0]); step(k + 1, a[1]); }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (lane == 0) barrier_arrive(empty + previous * 8);
      if (threadIdx.x < TOKENS) scales[odd][threadIdx.x] = token_factor;
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // all scales are there, and nobody uses `room`
      const Place of = tiles.place(anew(tile));  // again, so that no register keeps it
      const int strip = of.strip0() + group * STRIPS;
#ifdef ACTIVATION
      static_assert(GATED_ROOM <= GROUPS * OUT_BYTES);
      store_gated(c, strip_scales, matrix, of.block_x, of.token_block, strip, strips, scales[odd], room);
#elif HALVES
      store_halves(c, strip_scales, matrix, shape, of.split, of.token_block, strip, strips, scales[odd], room);
#else
      store_sums(c, strip_scales, matrix, shape, of.split, of.token_block, strip, strips, scales[odd], group, warp_tile,
                 lane, room);
#endif
      odd ^= 1;
    } while (tiles.next(tile));
  }
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
