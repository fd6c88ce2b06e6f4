// Matmuls for 8 tokens to whole prompts on compute capability 9.0a: weights become the tensor cores' A operand in
// registers, activations are their B operand in shared memory. One producer warp copies blocks into a ring of stages.
// Defined around it: TOKENS (of a block: 8-256) STRIPS (of 64 output features, per warpgroup) GROUPS (of consumer
// warpgroups, each with strips of its own) TURNS (warpgroups of a group, which take its stages in turn) SUMMED (parts
// of the columns, each with products of its own, that a block adds in order) STAGES STEP (chunks per stage: 1, 2 or 4)
// BLOCKS (per multiprocessor) REGISTERS (per consumer thread, or 0), and ACTIVATION beside wgmma_gated.cu for the gated
// epilogue.

constexpr int STRIP_STAGE = STEP * BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = GROUPS * STRIPS * STRIP_STAGE;
constexpr int X_CHUNK = TOKENS * 128;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + STEP * X_CHUNK;
// Outputs of large tiles leave through the ring's memory, 64 floats a token; 68 apart, so a warp's stores hit all
// banks.
constexpr int OUT_PITCH = 68, OUT_BYTES = TOKENS * OUT_PITCH * 4;
constexpr bool STAGED_OUT =
    TOKENS > 64 && GROUPS * STRIPS >= 4 && (STAYS || GROUPS * OUT_BYTES <= STAGES * STAGE_BYTES);
constexpr int SUMS = STRIPS * TOKENS / 2;         // of a thread
constexpr int CONSUMERS = GROUPS * TURNS * 128;  // threads
constexpr int HANDED = TURNS > 1 ? TURNS * GROUPS * 4 : 0;
static_assert(SUMMED == 1 || (STEP == 1 && TURNS == 1));

// The producer warp: copies `count` chunks from `first` on of the block's strips, and of its tokens, into the ring.
INLINE void fill_ring(const char* weights, int chunks, int strip0, int strips, int first, int count, int stages, int lane,
                      const char* values, u32 full, u32 empty, u32 base) {
  const char* x = values + ((long)blockIdx.z * chunks + first) * X_CHUNK;
  const int used = strips - strip0 < GROUPS * STRIPS ? strips - strip0 : GROUPS * STRIPS;  // the last block's may end early
  auto chunks_of = [&](int stage) { return count - stage * STEP < STEP ? count - stage * STEP : STEP; };
  auto fetch_weights = [&](int stage, int slot) {
    const int c = chunks_of(stage), chunk = first + stage * STEP;
    barrier_expect(full + slot * 8, used * (c * BLOCK_BYTES + SUPER_BYTES) + c * X_CHUNK);
    for (int i = 0; i < used; i++) {
      const char* strip = weights + (strip0 + i) * strip_bytes(chunks);
      const u32 to = base + slot * STAGE_BYTES + i * STRIP_STAGE;
      copy_bulk_once(to, strip + block_at(chunk), c * BLOCK_BYTES, full + slot * 8);
      if constexpr (TWO_LEVEL) copy_bulk_once(to + STEP * BLOCK_BYTES, strip + supers_at(chunk), SUPER_BYTES, full + slot * 8);
    }
  };
  auto fetch_x = [&](int stage, int slot) {
    copy_bulk(base + slot * STAGE_BYTES + WEIGHTS_STAGE, x + (long)stage * STEP * X_CHUNK, chunks_of(stage) * X_CHUNK, full + slot * 8);
  };
  const int ahead = stages < STAGES ? stages : STAGES;
  if (lane == 0)
    for (int s = 0; s < ahead; s++) fetch_weights(s, s);
  __syncwarp();
  let_next_start();
  wait_for_previous();
  if (lane == 0)
    for (int s = 0; s < ahead; s++) fetch_x(s, s);
  if (lane == 0) {
    int slot = 0, parity = 0;
    for (int s = ahead; s < stages; s++) {
      barrier_wait(empty + slot * 8, parity);
      fetch_weights(s, slot);
      fetch_x(s, slot);
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
  }
}

// A stage's chunk of a warpgroup's strips, decoded to the tensor cores' A operand.
INLINE void read_strips(u32 (&operand)[STRIPS][4][4], u32 stage, int inner, int group, int tile, int lane,
                        const void* table) {
#pragma unroll
  for (int i = 0; i < STRIPS; i++) {
    const char* strip = (const char*)__cvta_shared_to_generic(stage + (group * STRIPS + i) * STRIP_STAGE);
    const Staged block{strip + inner * BLOCK_BYTES}, supers{strip + STEP * BLOCK_BYTES};
    Raw raw;
    read_codes(raw, block, tile, lane);
    read_scales(raw, block, supers, tile, lane);
    decode(operand[i], raw, table);
  }
}

// Core matrices of activations are 128 bytes apart along rows, TOKENS / 8 * 128 along K; no swizzle.
constexpr u32 CORE = TOKENS / 8 * 128 / 16;
INLINE u32 first_descriptor(u32 base) { return (CORE << 16) + (((base + WEIGHTS_STAGE) & 0x3ffff) >> 4); }
// The products of a chunk; `low`: of the descriptor of its activations.
INLINE void multiply_chunk(float (&c)[STRIPS][TOKENS / 2], const u32 (&operand)[STRIPS][4][4], u32 low) {
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < STRIPS; i++) multiply(c[i], operand[i][j], (u64)(128 >> 4) << 32 | (low + 2 * j * CORE));
}

// Products of a strip have one order, so its warpgroups multiply one after the other, and decode meanwhile. A warp hands
// its sums to the same warp of the next warpgroup, by shared memory behind the ring. Stages are whole.
INLINE void multiply_in_turn(float (&c)[STRIPS][TOKENS / 2], int stages, int group, int turn, int tile, int lane, u32 full,
                             u32 base, u32 x_low, const void* table) {
  static_assert(TURNS <= STAGES);
  constexpr int WARPS = GROUPS * 4;
  const int place = group * 4 + tile;
  const u32 empty = full + STAGES * 8, handed = empty + STAGES * 8;
  const u32 own = handed + (turn * WARPS + place) * 8, next = handed + ((turn + 1) % TURNS * WARPS + place) * 8;
  float4* sums = (float4*)__cvta_shared_to_generic(base + STAGES * STAGE_BYTES) + place * (SUMS / 4 * 32) + lane;
  u32 a[STEP][STRIPS][4][4];
  int slot = turn, parity = 0, own_parity = 0;
  for (int s = turn; s < stages; s += TURNS) {
    barrier_wait(full + slot * 8, parity);
#pragma unroll
    for (int inner = 0; inner < STEP; inner++) {
      read_strips(a[inner], base + slot * STAGE_BYTES, inner, group, tile, lane, table);
#pragma unroll
      for (int i = 0; i < STRIPS * 16; i++) {
        u32& operand = a[inner][i / 16][i / 4 % 4][i % 4];
        asm volatile("" : "+r"(operand));  // decoded before the wait
      }
    }
    if (s > 0) {
      barrier_wait(own, own_parity);
      own_parity ^= 1;
#pragma unroll
      for (int e = 0; e < SUMS; e += 4) {
        const float4 sum = sums[e / 4 * 32];
        float* to = &c[e / (TOKENS / 2)][e % (TOKENS / 2)];
        to[0] = sum.x; to[1] = sum.y; to[2] = sum.z; to[3] = sum.w;
      }
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int inner = 0; inner < STEP; inner++)
      multiply_chunk(c, a[inner], x_low + slot * (STAGE_BYTES / 16) + inner * (X_CHUNK / 16));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (s + 1 < stages) {
#pragma unroll
      for (int e = 0; e < SUMS; e += 4) {
        const float* from = &c[e / (TOKENS / 2)][e % (TOKENS / 2)];
        sums[e / 4 * 32] = make_float4(from[0], from[1], from[2], from[3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(next);
    }
    if (lane == 0) barrier_arrive(empty + slot * 8);
    if ((slot += TURNS) >= STAGES) { slot -= STAGES; parity ^= 1; }
  }
}

// Adds a part's products to those of the parts before it, which a thread keeps behind the ring, as the next kernel
// would add the sums of splits: rounded after the scale and after each addition. The last part's sums stay in `c`.
INLINE void add_part(float (&c)[STRIPS][TOKENS / 2], int part, const float (&strip_scales)[STRIPS], const float* scales,
                     int t, u32 base) {
  if (part == 0) asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // all scales are there
  float4* kept = (float4*)__cvta_shared_to_generic(base + STAGES * STAGE_BYTES) + threadIdx.x;
#pragma unroll
  for (int e = 0; e < SUMS; e += 4) {
    const int i = e / (TOKENS / 2), m = e % (TOKENS / 2) / 4;
    float* of = &c[i][m * 4];
    const float first = strip_scales[i] * scales[m * 8 + t * 2], second = strip_scales[i] * scales[m * 8 + t * 2 + 1];
    float4 sum = make_float4(__fmul_rn(of[0], first), __fmul_rn(of[1], second),
                             __fmul_rn(of[2], first), __fmul_rn(of[3], second));
    float4& before = kept[e / 4 * CONSUMERS];
    if (part > 0) {
      const float4 b = before;
      sum = make_float4(__fadd_rn(b.x, sum.x), __fadd_rn(b.y, sum.y), __fadd_rn(b.z, sum.z), __fadd_rn(b.w, sum.w));
    }
    const bool is_last = part + 1 == SUMMED;
    if (!is_last) before = sum;
    of[0] = is_last ? sum.x : 0.f;
    of[1] = is_last ? sum.y : 0.f;
    of[2] = is_last ? sum.z : 0.f;
    of[3] = is_last ? sum.w : 0.f;
  }
}

// Multiplies `count` chunks by steps of one. With several parts, of equal, even numbers of chunks, `end_part` takes in
// the products of each.
template <class Step, class EndPart>
INLINE void multiply_chunks(u32 (&a)[2][STRIPS][4][4], int count, const Step& step, const EndPart& end_part) {
  if constexpr (SUMMED == 1) {
    int k = 0;
    for (; k + 1 < count; k += 2) { step(k, a[0]); step(k + 1, a[1]); }
    if (k < count) step(k, a[0]);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  } else {
#pragma unroll 1
    for (int part = 0; part < SUMMED; part++) {
      for (int k = 0; k < count / SUMMED; k += 2) { step(k, a[0]); step(k + 1, a[1]); }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      end_part(part);
    }
  }
}

// A warpgroup's sums to its outputs, from `first_strip` on. room: shared memory of OUT_BYTES for each group, which
// where blocks stay the copy engine may still read then.
INLINE void store_sums(const float (&c)[STRIPS][TOKENS / 2], const float (&strip_scales)[STRIPS], const Matrix& matrix,
                       const Shape& shape, long split, int token_block, int first_strip, int strips,
                       const float* scales, int group, int tile, int lane, char* room) {
  const int tokens = shape.tokens, out_features = matrix.out_features;
  const long token_stride = shape.token_stride, split_stride = shape.split_stride;
  const int g = lane >> 2, t = lane & 3;
  float* out = matrix.partials + split * split_stride;
  const int token0 = token_block * TOKENS + t * 2;
  const bool aligned = STAGED_OUT && token_stride % 4 == 0 && split_stride % 4 == 0 && (u64)matrix.partials % 16 == 0;
#pragma unroll
  for (int i = 0; i < STRIPS; i++) {
    const int strip = first_strip + i, feature = strip * 64 + tile * 16 + g;
    if (strip >= strips) break;
    const float block_scale = strip_scales[i];
    if (aligned && strip * 64 + 64 <= out_features) {
      float* staged = (float*)(room + group * OUT_BYTES);
      float* to = staged + t * 2 * OUT_PITCH + tile * 16 + g;
#pragma unroll
      for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float scale = SUMMED > 1 ? 1.f : block_scale * scales[m * 8 + t * 2 + e];
          to[(m * 8 + e) * OUT_PITCH] = c[i][m * 4 + e] * scale;
          to[(m * 8 + e) * OUT_PITCH + 8] = c[i][m * 4 + 2 + e] * scale;
        }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
      for (int m = threadIdx.x % 128; m < TOKENS; m += 128)
        if (token_block * TOKENS + m < tokens)
          store_bulk(out + (long)(token_block * TOKENS + m) * token_stride + strip * 64, shared_address(staged) + m * OUT_PITCH * 4, 256);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      if (!STAYS || i + 1 < STRIPS) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      if (i + 1 < STRIPS) asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
      continue;
    }
    float* to = out + (long)token0 * token_stride + feature;
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float scale = SUMMED > 1 ? 1.f : block_scale * scales[m * 8 + t * 2 + e];
        if (token0 + m * 8 + e < tokens) {
          if (feature < out_features) to[(long)e * token_stride] = c[i][m * 4 + e] * scale;
          if (feature + 8 < out_features) to[(long)e * token_stride + 8] = c[i][m * 4 + 2 + e] * scale;
        }
      }
      to += 8 * token_stride;
    }
  }
}

INLINE void multiply_matrix(const Matrix& matrix, const Shape& shape, int block_x, const char* values, const float* token_scales) {
  const float* block_scales = matrix.block_scales;
  const void* table = matrix.table;
  const int chunks = shape.chunks, splits = shape.splits;
  __shared__ __align__(8) u64 barriers[2 * STAGES + HANDED];  // full, then empty, then of sums that are handed on
  __shared__ float scales[TOKENS];                              // of the tokens
  const u32 full = shared_address(barriers), empty = full + STAGES * 8, base = shared_address(ring);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // so the compiler sees one number
  const int units = (chunks + STEP - 1) / STEP;
  const int first = (int)((long)units * blockIdx.y / splits) * STEP, end = (int)((long)units * (blockIdx.y + 1) / splits) * STEP;
  const int count = (end < chunks ? end : chunks) - first, stages = (count + STEP - 1) / STEP;
  const int strips = (matrix.out_features + 63) / 64, strip0 = block_x * GROUPS * STRIPS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { barrier_init(full + s * 8, 1); barrier_init(empty + s * 8, GROUPS * 4); }
    for (int s = 0; s < HANDED; s++) barrier_init(empty + (STAGES + s) * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= CONSUMERS / 32) {
    if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == CONSUMERS / 32) {
      fill_ring(matrix.weights, chunks, strip0, strips, first, count, stages, lane, values, full, empty, base);
    }
    return;
  }

  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS ? REGISTERS : 24));
  // Consumers find their tokens' scales while the first stage is on its way; they too may write only after the wait.
  wait_for_previous();
  for (int i = threadIdx.x; i < TOKENS; i += CONSUMERS) scales[i] = token_scale(token_scales, shape, blockIdx.z * TOKENS + i);
  __syncwarp();
  const int group = warp / 4 % GROUPS, turn = warp / 4 / GROUPS, tile = warp % 4;
  float c[STRIPS][TOKENS / 2];
#pragma unroll
  for (int i = 0; i < STRIPS; i++)
#pragma unroll
    for (int e = 0; e < TOKENS / 2; e++) c[i][e] = 0.f;
  float strip_scales[STRIPS];  // requested now: at the end their latency would be seen
#pragma unroll
  for (int i = 0; i < STRIPS; i++) {
    const int strip = strip0 + group * STRIPS + i;
    strip_scales[i] = strip < strips ? __ldg(block_scales + strip) : 0.f;
  }
  const u32 x_low = first_descriptor(base);
  if constexpr (TURNS == 1) {
    u32 a[2][STRIPS][4][4];
    int slot = 0, parity = 0, previous = 0;
    auto step = [&](int k, u32(&operand)[STRIPS][4][4]) {
      const int inner = k % STEP;
      if (inner == 0) barrier_wait(full + slot * 8, parity);
      read_strips(operand, base + slot * STAGE_BYTES, inner, group, tile, lane, table);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      multiply_chunk(c, operand, x_low + slot * (STAGE_BYTES / 16) + inner * (X_CHUNK / 16));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (inner == 0 && k > 0 && lane == 0) barrier_arrive(empty + previous * 8);  // its last matmul is done
      if (inner == STEP - 1) {
        previous = slot;
        if (++slot == STAGES) { slot = 0; parity ^= 1; }
      }
    };
    multiply_chunks(a, count, step, [&](int part) {
      if (lane == 0) barrier_arrive(empty + previous * 8);
      add_part(c, part, strip_scales, scales, lane & 3, base);
    });
  } else {
    multiply_in_turn(c, stages, group, turn, tile, lane, full, base, x_low, table);
    if (turn != (stages - 1) % TURNS) {
      asm volatile("bar.arrive 1, %0;" ::"n"(CONSUMERS) : "memory");
      return;
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // all scales are there; nobody reads the ring any more

#ifdef ACTIVATION
  static_assert(GATED_ROOM <= STAGES * STAGE_BYTES);
  store_gated(c, strip_scales, matrix, block_x, blockIdx.z, strip0 + group * STRIPS, strips, scales, ring);
#else
  store_sums(c, strip_scales, matrix, shape, blockIdx.y, blockIdx.z, strip0 + group * STRIPS, strips, scales, group,
             tile, lane, ring);
#endif
}
