// Grouped matmuls on compute capability 9.0a: an item is an expert's tile of pairs by some of its output features. The
// producer warp of a block fills a ring of stages, which goes on from item to item, so that weights of the next one
// come while sums of this one leave; the other warps multiply.
// Defined around it: TOKENS STRIPS (of 64 output features, per warpgroup) GROUPS (consumer warpgroups) BLOCKS (per
// multiprocessor) STAGES STEP (2: chunks per stage) REGISTERS (per consumer thread, or 0) ODD (1 where the number of
// chunks is) LEAST_STAGE (bytes of a stage, at the least) ARRIVALS (at a stage's full barrier: 33 where each lane of
// the producer arrives, which lanes that gather rows must, or 1).

constexpr int STRIP_STAGE = STEP * BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = GROUPS * STRIPS * STRIP_STAGE;
constexpr int X_CHUNK = TOKENS * 128;
constexpr int OWN_STAGE = WEIGHTS_STAGE + STEP * X_CHUNK;
constexpr int STAGE_BYTES = OWN_STAGE > LEAST_STAGE ? OWN_STAGE : LEAST_STAGE;
constexpr int WIDTH = GROUPS * STRIPS;                     // strips of an item
constexpr int OWN_ROWS = (TOKENS + 31) / 32;  // rows of x that a lane of the producer gathers
constexpr bool SHARED_ROWS = 32 % TOKENS == 0;  // whether lanes share out the columns of a row
// Strips whose weights are decoded before their matmuls start: one takes fewer registers, for more blocks; two keep the
// tensor cores busier where a multiprocessor has one block.
constexpr int TOGETHER = TOKENS < 64 || BLOCKS > 1 ? 1 : STRIPS;
// Whether behind an odd last chunk zeros meet that chunk's rows again; with many places it has products of its own. With
// few the compiler would wait for every product then.
constexpr bool ZEROS = ODD && TOKENS < 64;
static_assert(!GATHER || ARRIVALS == 33, "each lane of the producer arrives");

// The body.
INLINE int items_of_tile(const Experts& experts) { return ((experts.out_features + 63) / 64 + WIDTH - 1) / WIDTH; }

// The i-th place of a tile that a lane of the producer gathers; TOKENS and more are none.
INLINE int own_place(int i) { return SHARED_ROWS ? threadIdx.x % 32 % TOKENS : i * 32 + threadIdx.x % 32; }

// Of the producer warp: fills the ring with the stages of an item. entry: of the tile in `work`; pairs: those of the
// lane's places, where rows are gathered. ready() says whether the rows of x are there already; wait() waits for them,
// while weights are on their way.
template <typename Ready, typename Wait>
INLINE void produce_item(
    const Experts& experts, const Ring& ring, Turn& turn, int tile, int strip0, int entry,
    const int (&pairs)[OWN_ROWS], Ready ready, Wait wait) {
  const int lane = threadIdx.x % 32, chunks = experts.chunks, strips = (experts.out_features + 63) / 64;
  const int stages = (chunks + STEP - 1) / STEP, used = strips - strip0 < WIDTH ? strips - strip0 : WIDTH;
  const bool again = entry & 1;  // another tile reads the same weights
  const char* weights = experts.weights + (entry >> 1) * experts.stride + strip0 * strip_bytes(chunks);
  const char* tiles = experts.x + (long)tile * chunks * X_CHUNK;
  int rows[OWN_ROWS];  // where a row begins, in units of 16 bytes, or -1
  if constexpr (GATHER)
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) rows[i] = pairs[i] < 0 ? -1 : row_of(experts, pairs[i]);
  auto chunks_of = [&](int stage) { return !ODD || stage + 1 < stages ? STEP : chunks - stage * STEP; };
  auto fetch_weights = [&](int stage, int slot) {
    const int c = chunks_of(stage), chunk = stage * STEP;
    barrier_expect(ring.full + slot * 8, used * (c * BLOCK_BYTES + SUPER_BYTES) + (GATHER ? 0 : c * X_CHUNK));
    for (int i = 0; i < used; i++) {
      const char* strip = weights + i * strip_bytes(chunks);
      const u32 to = ring.base + slot * STAGE_BYTES + i * STRIP_STAGE;
      auto fetch = [&](u32 at, const char* from, u32 bytes) {
        if (again) copy_bulk(at, from, bytes, ring.full + slot * 8);
        else copy_bulk_once(at, from, bytes, ring.full + slot * 8);
      };
      fetch(to, strip + block_at(chunk), c * BLOCK_BYTES);
      if constexpr (TWO_LEVEL) fetch(to + STEP * BLOCK_BYTES, strip + supers_at(chunk), SUPER_BYTES);
    }
  };
  auto fetch_x = [&](int stage, int slot) {
    const u32 to = ring.base + slot * STAGE_BYTES + WEIGHTS_STAGE;
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
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full + slot * 8) : "memory");
    } else {
      const char* from = tiles + (long)stage * STEP * X_CHUNK;
      if (lane == 0) copy_bulk(to, from, chunks_of(stage) * X_CHUNK, ring.full + slot * 8);
      if constexpr (ARRIVALS > 1) barrier_arrive(ring.full + slot * 8);
    }
  };
  int stage = 0;
  if (!GATHER && !ready()) {
    const int ahead = stages < STAGES ? stages : STAGES;
    Turn of_weights = turn;
    for (int s = 0; s < ahead; s++) {
      barrier_wait(ring.empty + of_weights.slot * 8, of_weights.parity);
      if (lane == 0) fetch_weights(s, of_weights.slot);
      of_weights.advance();
    }
    wait();
    for (; stage < ahead; stage++) { fetch_x(stage, turn.slot); turn.advance(); }
  }
  for (; stage < stages; stage++) {
    barrier_wait(ring.empty + turn.slot * 8, turn.parity);
    if (lane == 0) fetch_weights(stage, turn.slot);
    fetch_x(stage, turn.slot);
    turn.advance();
  }
}

// The places of an item's results: factors and pairs of each.
struct Places { float2 factors[GROUPS][TOKENS]; int pairs[GROUPS][TOKENS]; };

// Of the warps that multiply: an item, whose stages follow in the ring. strip0: its first; pair: of place threadIdx.x %
// 128 of the tile, or -1; x_low: of the descriptor of x in the first stage.
INLINE void multiply_item(
    const Experts& experts, const Ring& ring, Turn& turn, int tile, int strip0, int expert, int pair, u32 x_low,
    Places& places) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // so the compiler sees one number
  const int lane = threadIdx.x % 32, chunks = experts.chunks, strips = (experts.out_features + 63) / 64;
  const int group = warp / 4, tile16 = warp % 4, thread = threadIdx.x % 128, g = lane >> 2;
  constexpr u32 CORE = TOKENS / 8 * 128 / 16;
  strip0 += group * STRIPS;
  if (strip0 >= strips) {  // behind the last strip: the other warpgroup has the tensor cores to itself
    for (int k = 0; k < chunks; k += STEP) {
      barrier_wait(ring.full + turn.slot * 8, turn.parity);
      if (lane == 0) barrier_arrive(ring.empty + turn.slot * 8);
      turn.advance();
    }
    return;
  }
  u32 a[2][TOGETHER][4][4];
  float c[STRIPS][TOKENS / 2];
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
#pragma unroll
  for (int i = 0; i < STRIPS; i++)
#pragma unroll
    for (int e = 0; e < TOKENS / 2; e++) c[i][e] = 0.f;
  auto step = [&](int inner, bool real, int first, u32(&operand)[TOGETHER][4][4]) {
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const u32 staged = ring.base + turn.slot * STAGE_BYTES + (group * STRIPS + first + i) * STRIP_STAGE;
      const char* strip = (const char*)__cvta_shared_to_generic(staged);
      const Staged block{strip + inner * BLOCK_BYTES}, supers{strip + STEP * BLOCK_BYTES};
      Raw raw;
      read_codes(raw, block, tile16, lane);
      read_scales(raw, block, supers, tile16, lane);
      decode(operand[i], raw, experts.table);
      if (ZEROS && !real)
#pragma unroll
        for (int j = 0; j < 16; j++) operand[i][j / 4][j % 4] = 0;
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const u32 low = x_low + turn.slot * (STAGE_BYTES / 16) + inner * (X_CHUNK / 16);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        multiply(c[first + i], operand[i][j], (u64)(128 >> 4) << 32 | (low + 2 * j * CORE));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  };
  int previous = -1;
  auto multiply_stage = [&](auto own_chunks, bool real) {  // real: its last chunk is one
    barrier_wait(ring.full + turn.slot * 8, turn.parity);
    if constexpr (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
    for (int n = 0; n < decltype(own_chunks)::value * STRIPS / TOGETHER; n++) {
      const int inner = n * TOGETHER / STRIPS, first = n * TOGETHER % STRIPS;
      if (inner == 0 || !ZEROS) step(inner, true, first, a[n % 2]);
      else step(real, real, first, a[n % 2]);
      if (n == 0 && previous >= 0 && lane == 0) barrier_arrive(ring.empty + previous * 8);  // its last matmul is done
    }
    previous = turn.slot;
    turn.advance();
  };
  for (int k = 0; k + (ZEROS ? 1 : STEP) <= chunks; k += STEP) multiply_stage(Index<STEP>{}, k + 1 < chunks);
  if constexpr (ODD && !ZEROS) multiply_stage(Index<1>{}, true);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (lane == 0) barrier_arrive(ring.empty + previous * 8);
  if (thread < TOKENS) { places.factors[group][thread] = factors; places.pairs[group][thread] = pair; }
  const Item end{tile, strip0, strips, places.factors[group], places.pairs[group]};
  finish(c, strip_scales, bias, experts, end);
}

// Core matrices are 128 bytes apart along rows, TOKENS / 8 * 128 along K; no swizzle.
INLINE u32 x_descriptor(u32 base) { return (TOKENS / 8 * 128 / 16 << 16) + (((base + WEIGHTS_STAGE) & 0x3ffff) >> 4); }
