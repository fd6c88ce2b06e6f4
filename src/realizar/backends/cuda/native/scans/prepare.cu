// What the tokens of a tile are to one another: with A[t, s] = beta[t] * (k[t] . k[s]) * d[t] / d[s] for s < t the
// inverse of I + A, its columns times beta[s], and scores (q[t] . k[s]) * d[t] / d[s] for s <= t. Neither has a number
// beyond one. A warp has 16 tokens. Tokens that are not certain lie in a row's last tile. Grid: value heads, tiles.
// Defined around it: what tiles.cu has.

constexpr int GATES = CHANNELS + VALUE_HEADS * HEAD;  // the first column of betas
constexpr int PITCH = 20;                              // floats: rows of a block of 16 lie in other banks each

// c += a * b, of 16 x 8
INLINE void multiply_few(float (&c)[4], const u32 (&a)[4], u32 low, u32 high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
INLINE void load_block(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
INLINE void store_transposed(u32 at, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}
INLINE void store_pair(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
INLINE void store_half(u32 at, float x) {
  asm volatile("{.reg .b16 h; cvt.rn.f16.f32 h, %1; st.shared.b16 [%0], h;}" ::"r"(at), "f"(x) : "memory");
}
// Where a lane's row of the four 8 x 8 parts of block (i, k) lies: parts along a row first.
INLINE u32 block_row(int i, int k, int lane) {
  return interleaved(i * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2);
}

struct Gates { const float *partials, *bias, *decay_bias, *rate; int splits, split_stride, token_stride; };

// Sums of the matmul's parts of one number.
INLINE float gate(const Gates& in, int token, int column) {
  const float* at = in.partials + (long)token * in.token_stride + column;
  float x = load_float(at);
#pragma unroll 1
  for (int s = 1; s < in.splits; s++) x += load_float(at + (long)s * in.split_stride);
  return in.bias ? x + in.bias[column] : x;
}

// Betas and decays of a tile by one warp, two tokens a lane. `summed`: logarithms to base two of `d`.
INLINE void make_factors(const Gates& in, int head, int start, int first, int count, int certain, float* factors,
                         float* betas, float* summed, int lane) {
  const float log2e = 1.4426950408889634f;
  float beta[2], log_decay[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int offset = first + lane * 2 + e;
    beta[e] = log_decay[e] = 0.f;
    if (offset < count) {
      beta[e] = 1.f / (1.f + expf(-gate(in, start + offset, GATES + head)));
      const float x = gate(in, start + offset, GATES + VALUE_HEADS + head) + in.decay_bias[head];
      log_decay[e] = in.rate[head] * (x > 30.f ? x : log1pf(expf(x)));
    }
  }
  float total = log_decay[0] + log_decay[1];
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const float before = __shfl_up_sync(~0u, total, apart);
    if (lane >= apart) total += before;
  }
  float before = __shfl_up_sync(~0u, total, 1);
  if (lane == 0) before = 0.f;
  const float sums[2] = {before + log_decay[0], before + log_decay[0] + log_decay[1]};
  const int last = min(TILE, certain - first) - 1;  // certain token of the tile, or below zero
  const float ends[2] = {__shfl_sync(~0u, sums[0], max(last, 0) / 2), __shfl_sync(~0u, sums[1], max(last, 0) / 2)};
  const float end = last < 0 ? 0.f : last % 2 ? ends[1] : ends[0];
  float d[2], to_end[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int t = lane * 2 + e;
    d[e] = expf(sums[e]);
    to_end[e] = t <= last ? expf(end - sums[e]) : 0.f;
    betas[t] = beta[e];
    summed[t] = sums[e] * log2e;
  }
  *(float2*)(factors + lane * 2) = make_float2(d[0], d[1]);
  *(float2*)(factors + TILE + lane * 2) = make_float2(to_end[0], to_end[1]);
  if (lane == 0) factors[2 * TILE] = expf(end);
}

// A block of 16 of the diagonal: column `lane % 16` of its inverse, which takes its place in A, and in the result.
INLINE void invert_block(const float* a, float beta, u32 a_at, u32 to, int block, int lane) {
  const int column = lane % 16;
  float x[16];
#pragma unroll
  for (int t = 0; t < 16; t++) {
    x[t] = t == column ? 1.f : 0.f;
#pragma unroll
    for (int s = 0; s < t; s++) x[t] -= a[t * PITCH + s] * x[s];
  }
  // Half of the lanes write the one, half the other.
  const u32 at = lane < 16 ? a_at : to;
  const float factor = lane < 16 ? 1.f : beta;
#pragma unroll
  for (int t = 0; t < 16; t++)
    store_half(at + interleaved(block * 16 + t, block * 2 + column / 8) + column % 8 * 2, x[t] * factor);
}

// Blocks of the inverse below the diagonal, of one column of blocks: T(i, j) = -D(i) * sum over k of A(i, k) T(k, j),
// each transposed, so that sums become operands where they are. D, the inverse of blocks of the diagonal, lies in A.
INLINE void invert_column(const float* betas, u32 a_at, u32 to, int j, int lane) {
  const float beta[2] = {betas[j * 16 + lane / 4], betas[j * 16 + lane / 4 + 8]};
  u32 column[4][4];
#pragma unroll
  for (int k = 0; k < 3; k++)
    if (k == j) load_transposed(column[k], a_at + block_row(k, k, lane));
#pragma unroll
  for (int i = 1; i < 4; i++) {
    if (i <= j) continue;
    float z[2][4] = {}, y[2][4] = {};
    u32 b[4], scaled[4];
#pragma unroll
    for (int k = 0; k < i; k++)
      if (k >= j) {
        load_block(b, a_at + block_row(i, k, lane));
        multiply_few(z[0], column[k], b[0], b[1]);
        multiply_few(z[1], column[k], b[2], b[3]);
      }
#pragma unroll
    for (int p = 0; p < 4; p++) scaled[p] = pair(-z[p / 2][p % 2 * 2], -z[p / 2][p % 2 * 2 + 1]);
    load_block(b, a_at + block_row(i, i, lane));
    multiply_few(y[0], scaled, b[0], b[1]);
    multiply_few(y[1], scaled, b[2], b[3]);
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const float *low = &y[p / 2][p % 2 * 2], by = beta[p % 2];
      column[i][p] = pair(low[0], low[1]);
      scaled[p] = pair(low[0] * by, low[1] * by);
    }
    store_transposed(to + block_row(i, j, lane), scaled);
  }
}

// A warp's 16 rows of A and of scores, from sums of products: blocks of 16 columns below the diagonal, on it, and above
// it. Of the one on the diagonal A stays in float32.
INLINE void link_tokens(const float (&alike)[TILE / 2], const float (&scores)[TILE / 2], const float* betas,
                        const float* summed, float* diagonal, u32 a_at, u32 scores_at, u32 to, int warp, int lane) {
  const int row = lane / 4, pair_at = lane % 4 * 2;
  float beta[2], from[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    beta[r] = betas[warp * 16 + row + r * 8];
    from[r] = summed[warp * 16 + row + r * 8];
  }
#pragma unroll
  for (int i = 0; i < TILE / 8; i++) {
    u32 at[2];
    for (int r = 0; r < 2; r++) at[r] = interleaved(warp * 16 + row + r * 8, i) + pair_at * 2;
    const float2 until = *(const float2*)(summed + i * 8 + pair_at);
    if (i / 2 > warp) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        store_pair(scores_at + at[r], 0);
        store_pair(to + at[r], 0);
      }
    } else if (i / 2 < warp) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int c = i * 4 + r * 2;
        const float first = power2(from[r] - until.x), second = power2(from[r] - until.y);
        store_pair(scores_at + at[r], pair(scores[c] * first, scores[c + 1] * second));
        store_pair(a_at + at[r], pair(alike[c] * first * beta[r], alike[c + 1] * second * beta[r]));
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int c = i * 4 + r * 2, t = row + r * 8, s = i % 2 * 8 + pair_at;
        const float first = s <= t ? power2(from[r] - until.x) : 0.f, second = s < t ? power2(from[r] - until.y) : 0.f;
        store_pair(scores_at + at[r], pair(scores[c] * first, scores[c + 1] * second));
        *(float2*)(diagonal + t * PITCH + s) = make_float2(alike[c] * first * beta[r], alike[c + 1] * second * beta[r]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
NAME(const float* partials, const float* bias, const float* decay_bias, const float* rate, const int* recurring,
     const int* tile_rows, const int* tile_firsts, const u16* mixed, char* links, float* factors, int splits,
     int split_stride, int token_stride) {
  __shared__ __align__(8) u64 barrier;
  __shared__ float betas[TILE], summed[TILE];
  const int head = blockIdx.x, tile = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 full = shared_address(&barrier), queries_at = shared_address(ring), keys_at = queries_at + HEAD_BYTES;
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  const int index = load_int(tile_rows + tile);
  if (index < 0) return;
  const int* row = recurring + index * FIELDS;
  const int first = load_int(tile_firsts + tile), start = load_int(row + 1), count = load_int(row + 2);
  const int certain = load_int(row + 4);
  if (threadIdx.x == 0) {
    barrier_expect(full, 2 * HEAD_BYTES);
    copy_bulk(queries_at, mixed_head(mixed, tile, key_head_of(head)), HEAD_BYTES, full);
    copy_bulk(keys_at, mixed_head(mixed, tile, KEY_HEADS + key_head_of(head)), HEAD_BYTES, full);
  }
  const long at = (long)tile * VALUE_HEADS + head;
  __syncwarp();
  if (warp == 0) {
    const Gates gates{partials, bias, decay_bias, rate, splits, split_stride, token_stride};
    make_factors(gates, head, start, first, count, certain, factors + at * FACTORS, betas, summed, lane);
  }
  __syncthreads();
  barrier_wait(full, 0);
  float alike[TILE / 2], scores[TILE / 2];
  const u64 queries = descriptor(queries_at, 0), keys = descriptor(keys_at, 0);
  begin_matmuls();
  multiply_heads(alike, keys, keys);
  multiply_heads(scores, queries, keys);
  end_matmuls();
  await_matmuls<0>();
  pin(alike);
  pin(scores);
  __syncthreads();  // queries and keys are done with: results and A take their place
  const u32 inverse_at = queries_at, scores_at = queries_at + RUN, a_at = keys_at;
  float* diagonal = (float*)(ring + HEAD_BYTES + RUN) + warp * (16 * PITCH);
  link_tokens(alike, scores, betas, summed, diagonal, a_at, scores_at, inverse_at, warp, lane);
  __syncwarp();
  invert_block(diagonal, betas[warp * 16 + lane % 16], a_at, inverse_at, warp, lane);
  __syncthreads();
  if (warp < 3) invert_column(betas, a_at, inverse_at, warp, lane);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    store_bulk(links + at * LINK_BYTES, inverse_at, LINK_BYTES);
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
