// Matmuls of long prompts in 8-bit floats (e4m3) on compute capability 9.0a: weights of any format become the tensor
// cores' A operand in registers, activations are their B operand in shared memory, as layouts/activations.py says. Sums
// of 128 columns are scaled by their tokens' scales and added in float32. One producer thread copies 128 columns of
// weights, activations and scales into each stage of a ring; two warpgroups have 64 output features each, and one
// decodes and adds while the other multiplies. Parts of a block's tokens take turns in two sets of accumulators.
// Defined around it: TOKENS (of a block) STAGES POWER (2^POWER times weights as decoded fit e4m3).

constexpr int STRIP_STAGE = 2 * BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = 2 * STRIP_STAGE;
constexpr int X_CHUNK = TOKENS * 64, X_STAGE = 2 * X_CHUNK, SCALES_BYTES = TOKENS * 4;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + X_STAGE + SCALES_BYTES;
constexpr int PART = TOKENS / 4;  // tokens of a matrix instruction
constexpr int OUT_PITCH = 68, OUT_BYTES = TOKENS * OUT_PITCH * 4;  // as in wgmma.cu
static_assert(2 * OUT_BYTES <= STAGES * STAGE_BYTES);

// The producer: the block's strips and tokens, 128 columns a stage.
INLINE void fill_ring(const char* weights, int chunks, int strip0, int strips, const char* values, const char* scales,
                      u32 full, u32 empty, u32 base) {
  const int used = strips - strip0 < 2 ? 1 : 2, steps = (chunks + 1) / 2;
  int slot = 0, parity = 1;
#pragma unroll 1
  for (int s = 0; s < steps; s++) {
    barrier_wait(empty + slot * 8, parity);
    const int chunk = s * 2, second = chunk + 1 < chunks ? chunk + 1 : chunk;  // beyond, activations are zeros
    const u32 barrier = full + slot * 8, to = base + slot * STAGE_BYTES;
    barrier_expect(barrier, used * STRIP_STAGE + X_STAGE + SCALES_BYTES);
#pragma unroll 1
    for (int i = 0; i < used; i++) {
      const char* strip = weights + (strip0 + i) * strip_bytes(chunks);
      copy_bulk(to + i * STRIP_STAGE, strip + block_at(chunk), BLOCK_BYTES, barrier);
      copy_bulk(to + i * STRIP_STAGE + BLOCK_BYTES, strip + block_at(second), BLOCK_BYTES, barrier);
      if constexpr (TWO_LEVEL)
        copy_bulk(to + i * STRIP_STAGE + 2 * BLOCK_BYTES, strip + supers_at(chunk), SUPER_BYTES, barrier);
    }
    copy_bulk(to + WEIGHTS_STAGE, values + (long)s * X_STAGE, X_STAGE, barrier);
    copy_bulk(to + WEIGHTS_STAGE + X_STAGE, scales + (long)s * SCALES_BYTES, SCALES_BYTES, barrier);
    if (++slot == STAGES) { slot = 0; parity ^= 1; }
  }
}

// Four weights as 8-bit floats, from two pairs of halves.
INLINE u32 to_e4m3(u32 first, u32 second) {
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, %1; cvt.rn.satfinite.e4m3x2.f16x2 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(r) : "r"(mul2(first, half_power(POWER))), "r"(mul2(second, half_power(POWER))));
  return r;
}

// A tile's weights of 64 columns: two K steps of 32.
INLINE void decode_chunk(u32 (&a)[2][4], const Staged& block, const Staged& supers, int tile, int lane,
                         const void* table) {
  Raw raw;
  u32 halves[4][4];
  read_codes(raw, block, tile, lane);
  read_scales(raw, block, supers, tile, lane);
  decode(halves, raw, table);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32* four = halves[i / 2];
    u32& operand = a[i / 4][i % 4];  // column group i / 2 of the chunk, half i % 2
    operand = to_e4m3(four[i % 2], four[i % 2 + 2]);
    asm volatile("" : "+r"(operand));  // made here, beside the products of those before
  }
}

// sums += c * the scales of its tokens, 16 tokens by four floats of each lane
INLINE void add_scaled(float (&sums)[PART / 2], const float (&c)[PART / 2], const float4* scales, int t) {
#pragma unroll
  for (int q = 0; q < PART / 16; q++) {
    const float4 s = scales[q * 4 + t];
    float* to = sums + q * 8;
    const float* from = c + q * 8;
    to[0] += from[0] * s.x; to[1] += from[1] * s.y; to[2] += from[2] * s.x; to[3] += from[3] * s.y;
    to[4] += from[4] * s.z; to[5] += from[5] * s.w; to[6] += from[6] * s.z; to[7] += from[7] * s.w;
  }
}

// A warpgroup's sums of 64 output features, through the ring's memory where the output's places allow it.
INLINE void store_sums(const float (&sums)[4][PART / 2], const Matrix& matrix, long token_stride, int tokens,
                       int token0, int strip, float block_scale, u32 base) {
  const int group = threadIdx.x / 128, tile = threadIdx.x / 32 % 4, g = threadIdx.x % 32 >> 2, t = threadIdx.x & 3;
  float* out = matrix.partials;
  const bool aligned = token_stride % 4 == 0 && (u64)out % 16 == 0;
  if (aligned && strip * 64 + 64 <= matrix.out_features) {
    float* to = (float*)(ring + group * OUT_BYTES) + t * 2 * OUT_PITCH + tile * 16 + g;
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float* sum = sums[m / (PART / 8)] + m % (PART / 8) * 4 + e;
        to[(m * 8 + e) * OUT_PITCH] = sum[0] * block_scale;
        to[(m * 8 + e) * OUT_PITCH + 8] = sum[2] * block_scale;
      }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
    for (int m = threadIdx.x % 128; m < TOKENS; m += 128) {
      float* row = out + (long)(token0 + m) * token_stride + strip * 64;
      if (token0 + m < tokens) store_bulk(row, base + group * OUT_BYTES + m * OUT_PITCH * 4, 256);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    return;
  }
  const int feature = strip * 64 + tile * 16 + g;
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = token0 + m * 8 + t * 2 + e;
      const float* sum = sums[m / (PART / 8)] + m % (PART / 8) * 4 + e;
      float* to = out + (long)token * token_stride + feature;
      if (token < tokens && feature < matrix.out_features) to[0] = sum[0] * block_scale;
      if (token < tokens && feature + 8 < matrix.out_features) to[8] = sum[2] * block_scale;
    }
}

INLINE void multiply_matrix(const Matrix& matrix, const Shape& shape, int block_x, const char* values,
                            const float* scales) {
  const void* table = matrix.table;
  const int out_features = matrix.out_features, tokens = shape.tokens, chunks = shape.chunks;
  const long token_stride = shape.token_stride;
  const int token_block = place_of().token_block, token0 = token_block * TOKENS;
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  const u32 full = shared_address(barriers), empty = full + STAGES * 8, base = shared_address(ring);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int strips = (out_features + 63) / 64, strip0 = block_x * 2, steps = (chunks + 1) / 2;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { barrier_init(full + s * 8, 1); barrier_init(empty + s * 8, 8); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#ifdef ACTIVATION
  __shared__ float tops[TOKENS];  // of the cluster's other block
  arrive_at_cluster();  // whose shared memory is there once it has come
  wait_for_cluster();
  if (strip0 >= strips) {  // an odd number of chunks leaves the last block without one
    if (threadIdx.x < TOKENS) store_in_cluster(tops + threadIdx.x, blockIdx.x % 2 ^ 1, 0.f);
    arrive_at_cluster();
    wait_for_cluster();
    return;
  }
#else
  __syncthreads();
#endif

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256)
      fill_ring(matrix.weights, chunks, strip0, strips, values + (long)token_block * steps * X_STAGE,
                (const char*)scales + (long)token_block * steps * SCALES_BYTES, full, empty, base);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int group = warp / 4, tile = warp % 4, g = lane >> 2, t = lane & 3, strip = strip0 + group;
  const float block_scale = strip < strips ? __ldg(matrix.block_scales + strip) * power(-(POWER)) : 0.f;
  float sums[4][PART / 2], c[2][PART / 2];
#pragma unroll
  for (int e = 0; e < PART * 2; e++) sums[e / (PART / 2)][e % (PART / 2)] = 0.f;
#pragma unroll
  for (int e = 0; e < PART; e++) c[e / (PART / 2)][e % (PART / 2)] = 0.f;
  u32 a[2][2][2][4];  // of this stage and the next: two chunks
  const char* weights = ring + group * STRIP_STAGE;
  auto decode_stage = [&](u32 (&to)[2][2][4], int slot) {
    const char* at = weights + slot * STAGE_BYTES;
    const Staged supers{at + 2 * BLOCK_BYTES};
    decode_chunk(to[0], Staged{at}, supers, tile, lane, table);
    decode_chunk(to[1], Staged{at + BLOCK_BYTES}, supers, tile, lane, table);
  };
  // Core matrices are 128 bytes apart along tokens, TOKENS / 8 * 128 along K; no swizzle.
  constexpr u32 CORE = TOKENS / 8 * 128 / 16;
  const u32 x_low = (CORE << 16) + (((base + WEIGHTS_STAGE) & 0x3ffff) >> 4);
  auto start = [&](const u32 (&operand)[2][2][4], int slot, int part) {
    const u32 low = x_low + slot * (STAGE_BYTES / 16) + part * (PART / 8 * 128 / 16);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 4; j++)
      multiply(c[part % 2], operand[j / 2][j % 2], (u64)(128 >> 4) << 32 | (low + 2 * j * CORE), j > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
  // Waits for a part while `later` of those after it may go on.
  auto finish = [&](int slot, int part, auto later) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(decltype(later)::value) : "memory");
#pragma unroll
    for (int e = 0; e < PART / 2; e++) asm volatile("" : "+f"(c[part % 2][e]));
    const char* scales_at = ring + slot * STAGE_BYTES + WEIGHTS_STAGE + X_STAGE;
    add_scaled(sums[part], c[part % 2], (const float4*)scales_at + part * (PART / 4), t);
  };
  auto first_parts = [&](const u32 (&operand)[2][2][4], int slot) {
    start(operand, slot, 0);
    start(operand, slot, 1);
    finish(slot, 0, Index<1>{});
    start(operand, slot, 2);
    finish(slot, 1, Index<1>{});
    start(operand, slot, 3);
    finish(slot, 2, Index<1>{});
  };
  int slot = 0, parity = 0;
  auto step = [&](int s, const u32 (&operand)[2][2][4], u32 (&next)[2][2][4]) {
    const int now = slot;
    if (++slot == STAGES) { slot = 0; parity ^= 1; }
    first_parts(operand, now);
    if (s + 1 < steps) barrier_wait(full + slot * 8, parity);
    decode_stage(next, slot);
    finish(now, 3, Index<0>{});
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + now * 8);
  };
  barrier_wait(full, 0);
  decode_stage(a[0], 0);
  int s = 0;
  while (true) {
    step(s, a[0], a[1]);
    if (++s == steps) break;
    step(s, a[1], a[0]);
    if (++s == steps) break;
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");  // nobody reads the ring any more

#ifdef ACTIVATION
  store_gated(sums, block_scale, matrix, block_x, strips / 2, token_block, tops);
#else
  if (strip < strips) store_sums(sums, matrix, token_stride, tokens, token0, strip, block_scale, base);
#endif
}
