// Matmuls for 8 tokens to whole prompts on compute capability 9.0a: weights become the tensor cores' A operand in
// registers, activations are their B operand in shared memory. One producer warp copies blocks into a ring of stages.
// Defined around it: TOKENS (of a block: 8-256) STRIPS (of 64 output features, per warpgroup) GROUPS (consumer
// warpgroups) STAGES STEP (chunks per stage: 1, 2 or 4) BLOCKS (per multiprocessor) REGISTERS (per consumer thread, or
// 0), and ACTIVATION beside wgmma_gated.cu for the gated epilogue.

constexpr int STRIP_STAGE = STEP * BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = GROUPS * STRIPS * STRIP_STAGE;
constexpr int X_CHUNK = TOKENS * 128;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + STEP * X_CHUNK;
// Outputs of large tiles leave through the ring's memory, 64 floats a token; 68 apart, so a warp's stores hit all
// banks.
constexpr int OUT_PITCH = 68, OUT_BYTES = TOKENS * OUT_PITCH * 4;
constexpr bool STAGED_OUT = TOKENS >= 128 && GROUPS * STRIPS >= 4 && GROUPS * OUT_BYTES <= STAGES * STAGE_BYTES;

INLINE void multiply_matrix(const Matrix& matrix, const Shape& shape, int block_x, const char* values, const float* token_scales) {
  const char* weights = matrix.weights;
  const float* block_scales = matrix.block_scales;
  const void* table = matrix.table;
  float* partials = matrix.partials;
  const int out_features = matrix.out_features;
  const int tokens = shape.tokens, chunks = shape.chunks, splits = shape.splits;
  const long token_stride = shape.token_stride, split_stride = shape.split_stride;
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  __shared__ float scales[TOKENS];                     // of the tokens
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + STAGES * 8, base = (u32)__cvta_generic_to_shared(ring);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int units = (chunks + STEP - 1) / STEP;
  const int first = (int)((long)units * blockIdx.y / splits) * STEP, end = (int)((long)units * (blockIdx.y + 1) / splits) * STEP;
  const int count = (end < chunks ? end : chunks) - first, stages = (count + STEP - 1) / STEP;
  const int strips = (out_features + 63) / 64, strip0 = block_x * GROUPS * STRIPS;
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
    return;
  }

  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS ? REGISTERS : 24));
  // Consumers find their tokens' scales while the first stage is on its way; they too may write only after the wait.
  wait_for_previous();
  for (int i = threadIdx.x; i < TOKENS; i += GROUPS * 128) scales[i] = token_scale(token_scales, shape, blockIdx.z * TOKENS + i);
  __syncwarp();
  const int group = warp / 4, tile = warp % 4, g = lane >> 2, t = lane & 3;
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
  // Core matrices are 128 bytes apart along rows, TOKENS / 8 * 128 along K; no swizzle.
  constexpr u64 descriptor = ((u64)((TOKENS / 8 * 128) >> 4) << 16) | ((u64)(128 >> 4) << 32);
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
      for (int i = 0; i < STRIPS; i++) multiply(c[i], operand[i][j], descriptor | (u64)(((x + 2 * j * (TOKENS / 8) * 128) & 0x3ffff) >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (inner == 0 && k > 0 && lane == 0) barrier_arrive(empty + previous * 8);  // its last matmul is done
    if (inner == STEP - 1) {
      previous = slot;
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
  };
  int k = 0;
  for (; k + 1 < count; k += 2) { step(k, a[0]); step(k + 1, a[1]); }
  if (k < count) step(k, a[0]);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");  // all scales are there; nobody reads the ring any more

#ifdef ACTIVATION
  static_assert(GROUPS * GATED_BYTES <= STAGES * STAGE_BYTES);
  store_gated(c, strip_scales, matrix, block_x, strip0 + group * STRIPS, strips, scales);
#else
  float* out = partials + (long)blockIdx.y * split_stride;
  const int token0 = blockIdx.z * TOKENS + t * 2;
  const bool aligned = STAGED_OUT && token_stride % 4 == 0 && split_stride % 4 == 0 && (u64)partials % 16 == 0;
#pragma unroll
  for (int i = 0; i < STRIPS; i++) {
    const int strip = strip0 + group * STRIPS + i, feature = strip * 64 + tile * 16 + g;
    if (strip >= strips) break;
    const float block_scale = strip_scales[i];
    if (aligned && strip * 64 + 64 <= out_features) {
      float* staged = (float*)(ring + group * OUT_BYTES);
      float* to = staged + t * 2 * OUT_PITCH + tile * 16 + g;
#pragma unroll
      for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float scale = block_scale * scales[m * 8 + t * 2 + e];
          to[(m * 8 + e) * OUT_PITCH] = c[i][m * 4 + e] * scale;
          to[(m * 8 + e) * OUT_PITCH + 8] = c[i][m * 4 + 2 + e] * scale;
        }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
      for (int m = threadIdx.x % 128; m < TOKENS; m += 128)
        if ((int)blockIdx.z * TOKENS + m < tokens)
          store_bulk(out + (long)(blockIdx.z * TOKENS + m) * token_stride + strip * 64, base + group * OUT_BYTES + m * OUT_PITCH * 4, 256);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      if (i + 1 < STRIPS) asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
      continue;
    }
    float* to = out + (long)token0 * token_stride + feature;
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float scale = block_scale * scales[m * 8 + t * 2 + e];
        if (token0 + m * 8 + e < tokens) {
          if (feature < out_features) to[(long)e * token_stride] = c[i][m * 4 + e] * scale;
          if (feature + 8 < out_features) to[(long)e * token_stride + 8] = c[i][m * 4 + 2 + e] * scale;
        }
      }
      to += 8 * token_stride;
    }
  }
#endif
}
