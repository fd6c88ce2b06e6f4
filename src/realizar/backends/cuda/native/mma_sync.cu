// Matmuls for 8 tokens and more from compute capability 8.0 on: weights become the A operand of mma.sync in registers,
// activations come through shared memory by ldmatrix. All warps fill a ring of stages with cp.async.
// Defined around it: TOKENS (of an activation block: 8-256) STRIPS (of 64 output features, per block) STAGES BLOCKS
// (per multiprocessor).

constexpr int PART_TOKENS = TOKENS < 64 ? TOKENS : 64;  // tokens that one thread block takes
constexpr int PARTS = TOKENS / PART_TOKENS;
constexpr int THREADS = STRIPS * 128;
constexpr int STRIP_STAGE = BLOCK_BYTES + SUPER_BYTES;
constexpr int WEIGHTS_STAGE = STRIPS * STRIP_STAGE;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + PART_TOKENS * 128;

INLINE void multiply_matrix(const Matrix& matrix, const Shape& shape, int block_x, const char* values, const float* token_scales) {
  const char* weights = matrix.weights;
  const float* block_scales = matrix.block_scales;
  const void* table = matrix.table;
  float* partials = matrix.partials;
  const int out_features = matrix.out_features;
  const int tokens = shape.tokens, chunks = shape.chunks, splits = shape.splits;
  const long token_stride = shape.token_stride, split_stride = shape.split_stride;
  const u32 base = (u32)__cvta_generic_to_shared(ring);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, tile = warp % 4, own = warp / 4;
  const int first = (int)((long)chunks * blockIdx.y / splits), count = (int)((long)chunks * (blockIdx.y + 1) / splits) - first;
  const int strips = (out_features + 63) / 64, strip0 = block_x * STRIPS;
  const int x_block = blockIdx.z / PARTS, x_part = blockIdx.z % PARTS;
  const char* x = values + ((long)x_block * chunks + first) * (TOKENS * 128) + x_part * (PART_TOKENS * 16);

  auto fetch_weights = [&](int k) {
    if (k >= count) return;
    const u32 to = base + k % STAGES * STAGE_BYTES;
    for (int i = threadIdx.x; i < STRIPS * (STRIP_STAGE / 16); i += THREADS) {
      const int strip = i / (STRIP_STAGE / 16), at = i % (STRIP_STAGE / 16) * 16;
      if (strip0 + strip >= strips) break;
      const char* from = weights + (strip0 + strip) * strip_bytes(chunks) + (at < BLOCK_BYTES ? block_at(first + k) + at : supers_at(first + k) + at - BLOCK_BYTES);
      copy16(to + strip * STRIP_STAGE + at, from);
    }
  };
  auto fetch_x = [&](int k) {
    if (k >= count) return;
    const u32 to = base + k % STAGES * STAGE_BYTES + WEIGHTS_STAGE;
    // Eight core-matrix columns of PART_TOKENS rows of 16 bytes.
    for (int i = threadIdx.x; i < PART_TOKENS * 8; i += THREADS)
      copy16(to + i * 16, x + (long)k * (TOKENS * 128) + i / PART_TOKENS * (TOKENS * 16) + i % PART_TOKENS * 16);
  };
  auto close = [&]() { asm volatile("cp.async.commit_group;" ::: "memory"); };

  for (int k = 0; k < STAGES - 1; k++) fetch_weights(k);
  let_next_start();
  wait_for_previous();
  for (int k = 0; k < STAGES - 1; k++) { fetch_x(k); close(); }
  __shared__ float scales[PART_TOKENS];  // of the tokens; read after the loop's barriers
  if (threadIdx.x < PART_TOKENS) scales[threadIdx.x] = token_scale(token_scales, shape, x_block * TOKENS + x_part * PART_TOKENS + threadIdx.x);

  float c[PART_TOKENS / 8][4];
#pragma unroll
  for (int m = 0; m < PART_TOKENS / 8; m++) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.f;
  for (int k = 0; k < count; k++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    fetch_weights(k + STAGES - 1);
    fetch_x(k + STAGES - 1);
    close();
    const int at = k % STAGES * STAGE_BYTES;
    if (strip0 + own < strips) {
      const char* strip = ring + at + own * STRIP_STAGE;
      const Staged block{strip}, supers{strip + BLOCK_BYTES};
      Raw raw;
      u32 a[4][4];
      read_codes(raw, block, tile, lane);
      read_scales(raw, block, supers, tile, lane);
      decode(a, raw, table);
      // Lane l addresses row l % 8 of core matrix 4 h + l / 8: two K steps at once.
      const u32 core_row = base + at + WEIGHTS_STAGE + (lane / 8 * PART_TOKENS + lane % 8) * 16;
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int m = 0; m < PART_TOKENS / 8; m++) {
          u32 b[4];
          load_matrices(b, core_row + h * 4 * PART_TOKENS * 16 + m * 128);
          multiply(c[m], a[2 * h], b[0], b[1]);
          multiply(c[m], a[2 * h + 1], b[2], b[3]);
        }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

  const int strip = strip0 + own, feature = strip * 64 + tile * 16 + g;
  if (strip >= strips) return;
  const float block_scale = __ldg(block_scales + strip);
  float* out = partials + (long)blockIdx.y * split_stride;
#pragma unroll
  for (int m = 0; m < PART_TOKENS / 8; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = x_block * TOKENS + x_part * PART_TOKENS + m * 8 + t * 2 + e;
      if (token < tokens) {
        const float scale = block_scale * scales[m * 8 + t * 2 + e];
        float* to = out + (long)token * token_stride + feature;
        if (feature < out_features) to[0] = c[m][e] * scale;
        if (feature + 8 < out_features) to[8] = c[m][2 + e] * scale;
      }
    }
}
