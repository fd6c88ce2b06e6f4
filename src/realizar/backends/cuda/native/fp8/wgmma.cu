// Matmuls of long prompts in 8-bit floats (e4m3) on compute capability 9.0a: tokens are the tensor cores' rows and
// output features their columns, so that a thread has two tokens of a tile. Its sums of 128 columns are added in
// float32, each times the scales of its token and of its 64 output features. Blocks stay and take tile after tile of
// 128 tokens and 256 output features; one producer thread copies 128 columns of weights, as decode.cu writes them, of
// activations and of their scales into each stage of a ring, also those of the next tile while the last one's results
// are stored; two warpgroups have 64 tokens each, and one adds while the other multiplies. The blocks of a cluster have
// the same weights, and each copies a part of them for all.
// Before it: wgmma_instructions.cu, and dense.cu or experts.cu.

#if STORED
// A chunk of a tile's output features, from their map: bytes of a strip, features, strips, experts.
INLINE void copy_chunk(u32 to, const Segment& segment, int chunk, u32 barrier) {
  const int strip = segment.tile * (FEATURES / 64);
  if constexpr (CLUSTER == 1)
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %2, %3, %4, %5}], [%6];"
                 ::"r"(to), "l"(segment.weights), "r"(0), "r"(strip), "r"(segment.expert), "r"(chunk), "r"(barrier)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %2, %3, %4, %5}], [%6], %7;"
                 ::"r"(to), "l"(segment.weights), "r"(0), "r"(strip), "r"(segment.expert), "r"(chunk), "r"(barrier),
                 "h"((u16)((1 << CLUSTER) - 1))
                 : "memory");
}
#endif

// The producer: tile after tile, 128 columns a stage. The first stages' weights are asked for before the kernel before
// this one has ended, if they are no results of one.
template <class Work>
INLINE void fill_ring(const Work& work, int groups, const char* values, const char* scales, u32 full) {
  const u32 empty = full + STAGES * 8, base = shared_address(ring);
  const int rank = blockIdx.x % CLUSTER;
  auto weights = [&](const Segment& segment, int group, int slot) {
    const u32 barrier = full + slot * 8, to = base + slot * STAGE_BYTES;
    barrier_expect(barrier, WEIGHTS_STAGE + X_STAGE + SCALES_BYTES + STRIPS_BYTES);
#if STORED
    for (int c = rank; c < 2; c += CLUSTER) copy_chunk(to + c * (WEIGHTS_STAGE / 2), segment, group * 2 + c, barrier);
#else
    const char* from = segment.weights + ((long)segment.tile * groups + group) * WEIGHTS_STAGE + rank * WEIGHTS_PART;
    if constexpr (CLUSTER == 1) copy_bulk(to, from, WEIGHTS_STAGE, barrier);
    else copy_bulk_to_all(to + rank * WEIGHTS_PART, from, WEIGHTS_PART, barrier, CLUSTER);
#endif
    const char* strips = (const char*)segment.scales + ((long)segment.tile * groups + group) * STRIPS_BYTES;
    copy_bulk(to + WEIGHTS_STAGE + X_STAGE + SCALES_BYTES, strips, STRIPS_BYTES, barrier);
  };
  int slot = 0, parity = 1;
  int tile = work.first(), early = 0;
  if constexpr (Work::EARLY) {
    const Place place = work.place(tile);
    const Segment segment = work.segment(place);
    const int begin = work.first_group(place.split, groups), end = work.first_group(place.split + 1, groups);
#pragma unroll 1
    for (; early < STAGES && begin + early < end; early++) weights(segment, begin + early, early);
  }
  wait_for_previous();
#pragma unroll 1
  do {
    const Place place = work.place(tile);
    const Segment segment = work.segment(place);
    const int last = work.token_blocks() - 1, block = place.token_block < last ? place.token_block : last;
    const int begin = work.first_group(place.split, groups), end = work.first_group(place.split + 1, groups);
    const char* x = values + ((long)block * groups + begin) * X_STAGE;
    const char* x_scales = scales + ((long)block * groups + begin) * SCALES_BYTES;
#pragma unroll 1
    for (int group = begin; group < end; group++) {
      const u32 barrier = full + slot * 8, to = base + slot * STAGE_BYTES;
      if (early > 0) early--;
      else {
        barrier_wait(empty + slot * 8, parity);
        weights(segment, group, slot);
      }
      copy_bulk(to + WEIGHTS_STAGE, x, X_STAGE, barrier);
      copy_bulk(to + WEIGHTS_STAGE + X_STAGE, x_scales, SCALES_BYTES, barrier);
      x += X_STAGE, x_scales += SCALES_BYTES;
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
  } while (work.next(tile));
}

// All tiles of a block's `work`, which says what they are and where their sums go: `Dense` or `Grouped`.
template <class Work>
INLINE void multiply_tiles(const Work& work, int chunks, const char* values, const float* scales) {
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int groups = (chunks + 1) / 2;
  if (threadIdx.x == 0) {
    const u32 full = shared_address(barriers), empty = full + STAGES * 8;
    for (int s = 0; s < STAGES; s++) { barrier_init(full + s * 8, 1); barrier_init(empty + s * 8, 8 * CLUSTER); }
    work.begin();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  if constexpr (CLUSTER > 1) { arrive_at_cluster(); wait_for_cluster(); }  // a block's barriers are there once it came

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) fill_ring(work, groups, values, (const char*)scales, shared_address(barriers));
    __syncwarp();
    if (warp == 9) work.stage();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous();
    const u32 full = shared_address(barriers), empty = full + STAGES * 8, base = shared_address(ring);
    const int lane = threadIdx.x % 32;
    float sums[PARTS][PART];
    // Core matrices of eight tokens and 16 columns are 128 bytes apart, a column of them along K; no swizzle. Eight
    // features have 64 columns each in 512 bytes, with the swizzle of 64 bytes.
    constexpr u32 X_CORE = TOKENS * 16;
    constexpr u64 octets = (u64)(128 >> 4) << 32, features = (u64)(512 >> 4) << 32 | (u64)2 << 62;
    const u32 w_low = (1 << 16) + ((base & 0x3ffff) >> 4);
    const u32 x_low = (X_CORE / 16 << 16) + (((base + WEIGHTS_STAGE + warp / 4 * 1024) & 0x3ffff) >> 4);
    // The scale of this thread's first token; that of its second is two places on.
    const float* own = (const float*)(ring + WEIGHTS_STAGE + X_STAGE) + warp * 16 + lane / 8 * 4 + lane / 4 % 2;
    int slot = 0, parity = 0;
    auto stage = [&]() {
      barrier_wait(full + slot * 8, parity);
      const float* token = (const float*)((const char*)own + slot * STAGE_BYTES);
      const float first = token[0], second = token[2];
      const float2* strips = (const float2*)(ring + slot * STAGE_BYTES + WEIGHTS_STAGE + X_STAGE + SCALES_BYTES);
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const float2 both = strips[part];
        const float factors[2][2] = {{first * both.x, first * both.y}, {second * both.x, second * both.y}};
        float c[PART];  // an instruction that does not add to them writes them first
        const u32 x = x_low + slot * (STAGE_BYTES / 16), w = w_low + slot * (STAGE_BYTES / 16) + part * 512;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int j = 0; j < 4; j++)
          multiply(c, octets | (x + j * (X_CORE / 8)), features | (w + j / 2 * (WEIGHTS_STAGE / 32) + j % 2 * 2), j > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < PART; i++) asm volatile("" : "+f"(c[i]));
        if (part == PARTS - 1) {
          __syncwarp();
          const int to = anew(threadIdx.x) % 32;
          if (to < CLUSTER) {
            if constexpr (CLUSTER == 1) barrier_arrive(empty + slot * 8);
            else arrive_in_cluster(empty + slot * 8, to);
          }
        }
        // One token after the other: its scales are read from the registers once.
#pragma unroll
        for (int i = 0; i < PART; i++) {
          const int at = i % (PART / 2) / 2 * 4 + i / (PART / 2) * 2 + i % 2;
          sums[part][at] += c[at] * factors[at % 4 / 2][at / (PART / 2)];
        }
      }
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    };
    int tile = work.first(), turn = 0;
#pragma unroll 1
    do {
#pragma unroll
      for (int i = 0; i < PARTS * PART; i++) sums[i / PART][i % PART] = 0.f;
      const Place place = work.place(tile);
      int left = work.first_group(place.split + 1, groups) - work.first_group(place.split, groups);
#pragma unroll 1
      for (; left > 0; left--) stage();
      if (place.token_block < work.token_blocks()) work.store(sums, place, turn);
      turn++;
    } while (work.next(tile));
  }
  if constexpr (CLUSTER > 1) { arrive_at_cluster(); wait_for_cluster(); }  // others may still write here
}
