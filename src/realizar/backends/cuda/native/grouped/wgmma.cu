// Grouped matmuls on compute capability 9.0a. A fixed number of blocks takes items, an expert's tile of pairs by some
// of its output features, one after the other in the order of experts; how many there are stands in memory. The ring of
// stages goes on from item to item, so weights of the next one come while sums of this one leave.
// Defined around it: TOKENS STRIPS (of 64 output features, per warpgroup) GROUPS (consumer warpgroups) BLOCKS (per
// multiprocessor) STAGES STEP (2: chunks per stage) REGISTERS (per consumer thread, or 0) ODD (1 where the number of
// chunks is).

constexpr int STRIP_STAGE = STEP * BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = GROUPS * STRIPS * STRIP_STAGE;
constexpr int X_CHUNK = TOKENS * 128;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + STEP * X_CHUNK;
constexpr int WIDTH = GROUPS * STRIPS;                     // strips of an item
constexpr int OWN_ROWS = (TOKENS + 31) / 32;  // rows of x that a lane of the producer gathers
constexpr bool SHARED_ROWS = 32 % TOKENS == 0;  // whether lanes share out the columns of a row
// Strips whose weights are decoded before their matmuls start: one takes fewer registers, for more blocks; two keep the
// tensor cores busier where a multiprocessor has one block.
constexpr int TOGETHER = TOKENS < 64 || BLOCKS > 1 ? 1 : STRIPS;

// The body.
// The producer warp: fills the ring with the stages of all of the block's items.
INLINE void produce(const Experts& experts, u32 full, u32 empty, u32 base, int total, int per_tile) {
  const int lane = threadIdx.x % 32, chunks = experts.chunks, strips = (experts.out_features + 63) / 64;
  const int stages = (chunks + STEP - 1) / STEP;
  int slot = 0, parity = 1, tile = 0, entry = 0, pairs[OWN_ROWS];
  auto read_list = [&](int item) {
    tile = item / per_tile;
    entry = load_listed(experts.work + 1 + tile);
    if constexpr (GATHER)
#pragma unroll
      for (int i = 0; i < OWN_ROWS; i++) {
        const int place = SHARED_ROWS ? lane % TOKENS : i * 32 + lane;
        pairs[i] = place < TOKENS ? load_listed(experts.slots + tile * TOKENS + place) : -1;
      }
  };
  auto chunks_of = [&](int stage) { return !ODD || stage + 1 < stages ? STEP : chunks - stage * STEP; };
  if ((int)blockIdx.x < total) read_list(blockIdx.x);
  for (int item = blockIdx.x; item < total; item += gridDim.x) {
    const int strip0 = item % per_tile * WIDTH, used = strips - strip0 < WIDTH ? strips - strip0 : WIDTH;
    const bool again = entry & 1;  // another tile reads the same weights
    const char* weights = experts.weights + (entry >> 1) * experts.stride + strip0 * strip_bytes(chunks);
    const char* tiles = experts.x + (long)tile * chunks * X_CHUNK;
    int rows[OWN_ROWS];  // where a row begins, in units of 16 bytes, or -1
    if constexpr (GATHER)
#pragma unroll
      for (int i = 0; i < OWN_ROWS; i++) rows[i] = pairs[i] < 0 ? -1 : row_of(experts, pairs[i]);
    if (item + (int)gridDim.x < total) read_list(item + gridDim.x);
    auto fetch_weights = [&](int stage) {
      const int c = chunks_of(stage), chunk = stage * STEP;
      barrier_expect(full + slot * 8, used * (c * BLOCK_BYTES + SUPER_BYTES) + (GATHER ? 0 : c * X_CHUNK));
      for (int i = 0; i < used; i++) {
        const char* strip = weights + i * strip_bytes(chunks);
        const u32 to = base + slot * STAGE_BYTES + i * STRIP_STAGE;
        auto fetch = [&](u32 at, const char* from, u32 bytes) {
          if (again) copy_bulk(at, from, bytes, full + slot * 8);
          else copy_bulk_once(at, from, bytes, full + slot * 8);
        };
        fetch(to, strip + block_at(chunk), c * BLOCK_BYTES);
        if constexpr (TWO_LEVEL) fetch(to + STEP * BLOCK_BYTES, strip + supers_at(chunk), SUPER_BYTES);
      }
    };
    auto fetch_x = [&](int stage) {
      const u32 to = base + slot * STAGE_BYTES + WEIGHTS_STAGE;
      if constexpr (GATHER) {
        for (int c = 0; c < chunks_of(stage); c++) {
          const char* chunk = experts.x + (long)(stage * STEP + c) * 128 * experts.x_block;
          if constexpr (SHARED_ROWS) {
#pragma unroll
            for (int k = 0; k < TOKENS / 4; k++)
              if (rows[0] >= 0) {
                const long from = (long)rows[0] + (k * (32 / TOKENS) + lane / TOKENS) * experts.x_block;
                copy16(to + c * X_CHUNK + (k * 32 + lane) * 16, chunk + from * 16);
              }
          } else {
#pragma unroll 1
            for (int core = 0; core < 8; core++)
#pragma unroll
              for (int i = 0; i < OWN_ROWS; i++)
                if (rows[i] >= 0) {
                  const u32 place = to + c * X_CHUNK + (core * TOKENS + i * 32 + lane) * 16;
                  copy16(place, chunk + ((long)rows[i] + core * experts.x_block) * 16);
                }
          }
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + slot * 8) : "memory");
      } else if (lane == 0) {
        copy_bulk(to, tiles + (long)stage * STEP * X_CHUNK, chunks_of(stage) * X_CHUNK, full + slot * 8);
      }
    };
    auto advance = [&]() { if (++slot == STAGES) { slot = 0; parity ^= 1; } };
    int stage = 0;
    if (!GATHER && item == (int)blockIdx.x) {  // the first weights need not wait for the kernel before
      const int ahead = stages < STAGES ? stages : STAGES;
      for (int s = 0; s < ahead; s++) { if (lane == 0) fetch_weights(s); advance(); }
      wait_for_previous();
      let_next_start();
      slot = 0; parity = 1;
      for (; stage < ahead; stage++) { fetch_x(stage); advance(); }
    }
    for (; stage < stages; stage++) {
      barrier_wait(empty + slot * 8, parity);
      if (lane == 0) fetch_weights(stage);
      fetch_x(stage);
      advance();
    }
  }
}

INLINE void multiply_experts(const Experts& experts) {
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  __shared__ float2 all_factors[2][GROUPS][TOKENS];
  __shared__ int all_pairs[2][GROUPS][TOKENS];
  const u32 shared_full = (u32)__cvta_generic_to_shared(barriers), shared_empty = shared_full + STAGES * 8;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so the compiler sees one number
  const int lane = threadIdx.x % 32, chunks = experts.chunks;
  const int strips = (experts.out_features + 63) / 64, per_tile = (strips + WIDTH - 1) / WIDTH;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(shared_full + s * 8, GATHER ? 33 : 1);  // gathered rows: each lane of the producer arrives
      barrier_init(shared_empty + s * 8, GROUPS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (GATHER) { wait_for_previous(); let_next_start(); }
  const int total = load_listed(experts.work) * per_tile;
  if (warp >= GROUPS * 4) {
    if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const u32 base = (u32)__cvta_generic_to_shared(ring);
    if (warp == GROUPS * 4) produce(experts, shared_full, shared_empty, base, total, per_tile);
    return;
  }
  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS ? REGISTERS : 24));
  if constexpr (!GATHER) wait_for_previous();

  // Made once; the producer has no registers to keep them.
  const u32 full = shared_address(barriers), empty = full + STAGES * 8, base = shared_address(ring);
  const int group = warp / 4, tile16 = warp % 4, thread = threadIdx.x % 128, g = lane >> 2, t = lane & 3;
  // Core matrices are 128 bytes apart along rows, TOKENS / 8 * 128 along K; no swizzle.
  constexpr u32 CORE = TOKENS / 8 * 128 / 16;
  const u32 x_low = (CORE << 16) + (((base + WEIGHTS_STAGE) & 0x3ffff) >> 4);
  u32 a[2][TOGETHER][4][4];
  float c[STRIPS][TOKENS / 2];
  int slot = 0, parity = 0, turn = 0;
  auto pair_at = [&](int item) {
    return thread < TOKENS ? load_listed(experts.slots + item / per_tile * TOKENS + thread) : -1;
  };
  int next_pair = (int)blockIdx.x < total ? pair_at(blockIdx.x) : -1;
  int next_expert = (int)blockIdx.x < total ? load_listed(experts.work + 1 + blockIdx.x / per_tile) >> 1 : 0;
  for (int item = blockIdx.x; item < total; item += gridDim.x, turn ^= 1) {
    const int tile = item / per_tile, strip0 = item % per_tile * WIDTH + group * STRIPS;
    const int expert = next_expert, pair = next_pair;
    // Asked for now: at the end their latency would be seen.
    const float2 factors = pair_factors(experts, pair);
    float strip_scales[STRIPS], bias[STRIPS][2];
#pragma unroll
    for (int i = 0; i < STRIPS; i++) {
      const int strip = strip0 + i, feature = strip * 64 + tile16 * 16 + g;
      strip_scales[i] = strip < strips ? __ldg(experts.block_scales + (long)expert * strips + strip) : 0.f;
#pragma unroll
      for (int half = 0; half < 2; half++) bias[i][half] = bias_of(experts, expert, feature + half * 8);
    }
    if (item + (int)gridDim.x < total) {
      next_pair = pair_at(item + gridDim.x);
      next_expert = load_listed(experts.work + 1 + (item + gridDim.x) / per_tile) >> 1;
    }
#pragma unroll
    for (int i = 0; i < STRIPS; i++)
#pragma unroll
      for (int e = 0; e < TOKENS / 2; e++) c[i][e] = 0.f;
    auto step = [&](int inner, bool real, int first, u32(&operand)[TOGETHER][4][4]) {
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const u32 staged = base + slot * STAGE_BYTES + (group * STRIPS + first + i) * STRIP_STAGE;
        const char* strip = (const char*)__cvta_shared_to_generic(staged);
        const Staged block{strip + inner * BLOCK_BYTES}, supers{strip + STEP * BLOCK_BYTES};
        Raw raw;
        read_codes(raw, block, tile16, lane);
        read_scales(raw, block, supers, tile16, lane);
        decode(operand[i], raw, experts.table);
        if (ODD && !real)
#pragma unroll
          for (int j = 0; j < 16; j++) operand[i][j / 4][j % 4] = 0;
      }
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const u32 low = x_low + slot * (STAGE_BYTES / 16) + inner * (X_CHUNK / 16);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
          multiply(c[first + i], operand[i][j], (u64)(128 >> 4) << 32 | (low + 2 * j * CORE));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    };
    int previous = -1;
    for (int k = 0; k < chunks; k += STEP) {
      barrier_wait(full + slot * 8, parity);
      if constexpr (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      const bool real = !ODD || k + 1 < chunks;
#pragma unroll
      for (int n = 0; n < STEP * STRIPS / TOGETHER; n++) {
        const int inner = n * TOGETHER / STRIPS, first = n * TOGETHER % STRIPS;
        // Behind an odd last chunk zeros meet that chunk's rows again.
        if (inner == 0) step(0, true, first, a[n % 2]);
        else step(real, real, first, a[n % 2]);
        if (n == 0 && previous >= 0 && lane == 0) barrier_arrive(empty + previous * 8);  // its last matmul is done
      }
      previous = slot;
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0) barrier_arrive(empty + previous * 8);
    if (thread < TOKENS) { all_factors[turn][group][thread] = factors; all_pairs[turn][group][thread] = pair; }
    const Item end{tile, strip0, strips, all_factors[turn][group], all_pairs[turn][group]};
    finish(c, strip_scales, bias, experts, end);
  }
  close();
}
