// Products for 8 rows to whole prompts on compute capability 9.0a: weights become the tensor cores' A operand in
// registers, activations are their B operand in shared memory. One producer warp copies blocks into a ring of stages.
// Defined by the loader: NAME ROWS (of a block: 8-256) STRIPS (of 64 rows, per warpgroup) GROUPS (consumer warpgroups)
// STAGES STEP (chunks per stage: 1, 2 or 4) BLOCKS (per multiprocessor) REGISTERS (per consumer thread, or 0)
// ACCUMULATORS (the list of accumulator operands of one wgmma) OPERANDS (their bindings).

INLINE void barrier_init(u32 at, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals)); }
INLINE void barrier_expect(u32 at, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
INLINE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
INLINE void barrier_wait(u32 at, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again_%=;\n}" ::"r"(at), "r"(parity) : "memory");
}
INLINE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// c += a * b; a from registers, b by its descriptor
INLINE void multiply(float* c, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" ROWS_TEXT "k16.f32.f16.f16 {" ACCUMULATORS "}, " INPUTS ", 1, 1, 1, 0;" : OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

constexpr int STRIP_STAGE = STEP * BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = GROUPS * STRIPS * STRIP_STAGE;
constexpr int X_CHUNK = ROWS * 128;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + STEP * X_CHUNK;
constexpr int PRODUCER_THREADS = REGISTERS ? 128 : 32;

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + PRODUCER_THREADS, BLOCKS)
NAME(const char* __restrict__ weights, const float* __restrict__ block_scales, const void* __restrict__ table,
     const char* __restrict__ values, const float* __restrict__ row_scales, float* __restrict__ partials,
     int rows, int rows_out, int chunks, int splits, int row_stride, int split_stride) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  __shared__ float scales[ROWS];                     // of the activation rows
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + STAGES * 8, base = (u32)__cvta_generic_to_shared(ring);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int units = (chunks + STEP - 1) / STEP;
  const int first = (int)((long)units * blockIdx.y / splits) * STEP, end = (int)((long)units * (blockIdx.y + 1) / splits) * STEP;
  const int count = (end < chunks ? end : chunks) - first, stages = (count + STEP - 1) / STEP;
  const int strips = (rows_out + 63) / 64, strip0 = blockIdx.x * GROUPS * STRIPS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { barrier_init(full + s * 8, 1); barrier_init(empty + s * 8, GROUPS * 4); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= GROUPS * 4) {
    if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == GROUPS * 4) {
      const char* x = values + ((long)blockIdx.z * chunks + first) * X_CHUNK;
      const int used = strips - strip0 < GROUPS * STRIPS ? strips - strip0 : GROUPS * STRIPS;  // the last block's may end early
      auto chunks_of = [&](int stage) { return count - stage * STEP < STEP ? count - stage * STEP : STEP; };
      auto fetch_weights = [&](int stage, int slot) {
        const int c = chunks_of(stage), chunk = first + stage * STEP;
        barrier_expect(full + slot * 8, used * (c * BLOCK_BYTES + SUPER_BYTES) + c * X_CHUNK);
        for (int i = 0; i < used; i++) {
          const char* strip = weights + (strip0 + i) * strip_bytes(chunks);
          const u32 to = base + slot * STAGE_BYTES + i * STRIP_STAGE;
          copy_bulk(to, strip + block_at(chunk), c * BLOCK_BYTES, full + slot * 8);
          if constexpr (TWO_LEVEL) copy_bulk(to + STEP * BLOCK_BYTES, strip + supers_at(chunk), SUPER_BYTES, full + slot * 8);
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
      __syncwarp();
      for (int i = lane; i < ROWS; i += 32) scales[i] = load_float(row_scales + blockIdx.z * ROWS + i);
      __threadfence_block();
      asm volatile("bar.arrive 1, %0;" ::"n"(GROUPS * 128 + 32) : "memory");
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
    return;
  }

  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS ? REGISTERS : 24));
  const int group = warp / 4, tile = warp % 4, g = lane >> 2, t = lane & 3;
  float c[STRIPS][ROWS / 2];
#pragma unroll
  for (int i = 0; i < STRIPS; i++)
#pragma unroll
    for (int e = 0; e < ROWS / 2; e++) c[i][e] = 0.f;
  // Core matrices are 128 bytes apart along rows, ROWS / 8 * 128 along K; no swizzle.
  constexpr u64 descriptor = ((u64)((ROWS / 8 * 128) >> 4) << 16) | ((u64)(128 >> 4) << 32);
  u32 a[2][STRIPS][4][4];
  int slot = 0, parity = 0, previous = 0;
  auto step = [&](int k, u32(&operand)[STRIPS][4][4]) {
    const int inner = k % STEP;
    if (inner == 0) barrier_wait(full + slot * 8, parity);
    const char* stage = ring + slot * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < STRIPS; i++) {
      const char* strip = stage + (group * STRIPS + i) * STRIP_STAGE;
      const Staged block{strip + inner * BLOCK_BYTES}, supers{strip + STEP * BLOCK_BYTES};
      Raw raw;
      read_codes(raw, block, tile, lane);
      read_scales(raw, block, supers, tile, lane);
      decode(operand[i], raw, table);
    }
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const u32 x = base + slot * STAGE_BYTES + WEIGHTS_STAGE + inner * X_CHUNK;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int i = 0; i < STRIPS; i++) multiply(c[i], operand[i][j], descriptor | (u64)(((x + 2 * j * (ROWS / 8) * 128) & 0x3ffff) >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (inner == 0 && k > 0 && lane == 0) barrier_arrive(empty + previous * 8);  // its last product is done
    if (inner == STEP - 1) {
      previous = slot;
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
  };
  int k = 0;
  for (; k + 1 < count; k += 2) { step(k, a[0]); step(k + 1, a[1]); }
  if (k < count) step(k, a[0]);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128 + 32) : "memory");  // the producer has waited for the kernel before

  float* out = partials + (long)blockIdx.y * split_stride;
  const int x_row0 = blockIdx.z * ROWS + t * 2;
#pragma unroll
  for (int i = 0; i < STRIPS; i++) {
    const int strip = strip0 + group * STRIPS + i, row = strip * 64 + tile * 16 + g;
    if (strip >= strips) break;
    const float block_scale = __ldg(block_scales + strip);
    float* to = out + (long)x_row0 * row_stride + row;
    const bool whole = blockIdx.z * ROWS + ROWS <= rows && strip * 64 + 64 <= rows_out;
#pragma unroll
    for (int m = 0; m < ROWS / 8; m++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float scale = block_scale * scales[m * 8 + t * 2 + e];
        const bool real = whole || x_row0 + m * 8 + e < rows;
        if (real && (whole || row < rows_out)) to[(long)e * row_stride] = c[i][m * 4 + e] * scale;
        if (real && (whole || row + 8 < rows_out)) to[(long)e * row_stride + 8] = c[i][m * 4 + 2 + e] * scale;
      }
      to += 8 * (long)row_stride;
    }
  }
}
