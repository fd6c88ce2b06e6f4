// Scores of experts and their choice, for many tokens: a cluster of blocks has some tokens of the residual stream, each
// of its blocks some columns of the router, and each warp some experts of those. Tensor cores multiply: a float is the
// sum of two that they take but for a bit or two, and of the four products the smallest is left out.
// The sums of warps, then of blocks, are added in one order.
// Defined around it: WIDTH (of the stream, a multiple of 4) TOKENS (of a cluster: 4, or a multiple of 8) PADDED
// (experts: a multiple of 32) UNITS (of 16 columns, of a block) AHEAD (units of a warp that are asked for at once, a
// divisor of its own) FLOATS (of a block's dynamic shared memory) NAME. Before it: primitives.cu, clusters.cu,
// choice.cu.

constexpr int BLOCKS = 8, WARPS = 8;  // of a cluster, of a block
constexpr int TILES = PADDED / 16, TOKEN_TILES = (TOKENS + 7) / 8;  // of a multiplication, whose columns are 8
constexpr int EXPERT_WARPS = TILES < WARPS ? TILES : WARPS, COLUMN_WARPS = WARPS / EXPERT_WARPS;
constexpr int WARP_TILES = TILES / EXPERT_WARPS;
constexpr int WARP_UNITS = UNITS / COLUMN_WARPS;
static_assert(UNITS % COLUMN_WARPS == 0 && WARP_UNITS % AHEAD == 0);
constexpr int COLUMNS = UNITS * 16, X_STRIDE = COLUMNS + (UNITS % 2 ? 0 : 16);  // two rows are in different banks
constexpr int SUM_STRIDE = PADDED + 4;  // so that tokens are in different banks
// Threads that registers are for, if possible more than there are: with all registers, no block of the kernel before or
// behind would have room beside.
constexpr int BOUND = WARPS * (TOKENS * WARP_TILES > 32 ? 32 : TOKENS * WARP_TILES > 8 ? 48 : 64);
constexpr int OWN_TOKENS = (TOKENS + BLOCKS - 1) / BLOCKS;  // which a block chooses for
static_assert(FLOATS == TOKENS * X_STRIDE + COLUMN_WARPS * TOKENS * SUM_STRIDE + BLOCKS * OWN_TOKENS * PADDED);

// A float as the sum of two of 11 bits: of the first's lower bits, tensor cores cut off at most the last, or the last
// two where it is not rounded. Rounding both would take longer.
INLINE void split_rounded(u32 bits, u32& high, u32& low) {
  high = (bits + 0x1000) & 0xffffe000;
  low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
}
INLINE void split(float x, u32& high, u32& low) {
  high = __float_as_uint(x) & 0xffffe000;
  low = __float_as_uint(x - __uint_as_float(high));
}

// sum += a * b, of 16 experts, 8 columns and 8 tokens.
INLINE void multiply(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Sums of a warp's tile of experts: of products of the high parts, and of a high and a low part.
struct Sums {
  float whole[TOKEN_TILES][4], left[TOKEN_TILES][4], right[TOKEN_TILES][4];
};

// Two multiplications of a tile of experts. Tensor cores cut their sums off, so only these two are added by them.
INLINE void add_unit(Sums& sums, const uint4 (&weights)[2], const float4 (&x)[TOKEN_TILES]) {
  float unit[TOKEN_TILES][4] = {};
#pragma unroll
  for (int step = 0; step < 2; step++) {
    u32 high[4], low[4];
    split_rounded(weights[step].x, high[0], low[0]);
    split_rounded(weights[step].y, high[1], low[1]);
    split_rounded(weights[step].z, high[2], low[2]);
    split_rounded(weights[step].w, high[3], low[3]);
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
      u32 x_high[2], x_low[2];
      split(step ? x[j].z : x[j].x, x_high[0], x_low[0]);
      split(step ? x[j].w : x[j].y, x_high[1], x_low[1]);
      multiply(unit[j], high, x_high);
      multiply(sums.left[j], low, x_high);
      multiply(sums.right[j], high, x_low);
    }
  }
#pragma unroll
  for (int j = 0; j < TOKEN_TILES; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums.whole[j][i] += unit[j][i];
}

// Of what no block of a cluster reads again, and only if there is more of it.
INLINE void load_if(bool more, uint4& to, const uint4* from) {
  asm volatile("{.reg .pred more; setp.ne.u32 more, %5, 0; "
               "@more ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w) : "l"(from), "r"((u32)more));
}

// Of four columns: a part of the gate's score.
INLINE float gate_part(const float* gate, const float4& x) {
  const float4 g = __ldg((const float4*)gate);
  return (g.x * x.x + g.y * x.y) + (g.z * x.z + g.w * x.w);
}

INLINE void store4_in_cluster(const void* own, int block, const float4& x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(in_cluster(own, block)), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w) : "memory");
}

// Of a warp's rows, which lie WARPS apart: a block's columns to shared memory, zeros behind `columns`.
// to, lane_to: where a lane's first four go, for which `from` has the stream.
INLINE void copy_columns(
    u32 to, float* lane_to, const float* from, int warp, int rows, int columns, int lane) {
#pragma unroll
  for (int m = 0; m < TOKENS; m += WARPS)
#pragma unroll 4
    for (int column = 0; column < COLUMNS; column += 128)
      if (warp + m < rows && column + lane * 4 < COLUMNS) {
        if (column + lane * 4 < columns)
          copy16(to + (m * X_STRIDE + column) * 4, from + (long)m * WIDTH + column);
        else
          *(float4*)(lane_to + m * X_STRIDE + column) = make_float4(0.f, 0.f, 0.f, 0.f);
      }
}

// The sums of a warp's tiles, of its part of the columns, to shared memory: [COLUMN_WARPS][TOKENS][SUM_STRIDE].
INLINE void store_sums(float* to, const Sums (&tiles)[WARP_TILES], int part, int first_tile, int lane) {
#pragma unroll
  for (int t = 0; t < WARP_TILES; t++)
#pragma unroll
    for (int i = 0; i < TOKEN_TILES * 4; i++) {
      const Sums& all = tiles[t];
      const int m = i / 4 * 8 + lane % 4 * 2 + i % 2, e = (first_tile + t) * 16 + i % 4 / 2 * 8 + lane / 4;
      const float sum = all.whole[i / 4][i % 4] + (all.left[i / 4][i % 4] + all.right[i / 4][i % 4]);
      if (m < TOKENS) to[(part * TOKENS + m) * SUM_STRIDE + e] = sum;
    }
}

// Of a token's sums in the blocks of a cluster, or in all of their warps, `stride` apart.
template <int COUNT>
INLINE float sum_of(const float* sums, int stride) {
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < COUNT; i++) all += sums[i * stride];
  return all;
}

// Of a whole cluster of padding.
INLINE void choose_none(int* chosen, int first_token, int tokens) {
  for (int i = blockIdx.x * WARPS * 32 + threadIdx.x; i < TOKENS * PLACES; i += BLOCKS * WARPS * 32)
    if (first_token + i / PLACES < tokens) chosen[(long)first_token * PLACES + i] = -1;
}

// Grid: BLOCKS, clusters. router: float32, times the norm's weight, zeros behind EXPERTS and WIDTH, in the order in
// which tensor cores take it: [BLOCKS * UNITS, TILES, 2, 32 lanes, 4]; biases: of scores, or null; selection: of ranks,
// or null; scales: of experts' weights, or null; header[1]: tokens of the step without padding, of `tokens`; scores:
// [tokens, EXPERTS]; chosen, weights: [tokens, PLACES]; gate: float32 [WIDTH], times the norm's weight, whose bias is
// the last of `biases`; or null.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(BOUND, 1) NAME(
    const float* router, const float* biases, const float* selection, const float* scales, const float* hidden,
    const int* header, float* scores, int* chosen, float* weights, float eps, int normalized, float scale, int tokens,
    const float* gate) {
  float* x = (float*)ring;                                       // [TOKENS][X_STRIDE]
  float* warp_sums = x + TOKENS * X_STRIDE;                      // [COLUMN_WARPS][TOKENS][SUM_STRIDE]
  float* sums = warp_sums + COLUMN_WARPS * TOKENS * SUM_STRIDE;  // [BLOCKS][OWN_TOKENS][PADDED], of own tokens
  __shared__ float square_sums[BLOCKS][COLUMN_WARPS][OWN_TOKENS], gate_sums[BLOCKS][OWN_TOKENS];
  __shared__ float found[OWN_TOKENS][PADDED], gate_scores[OWN_TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, first_token = blockIdx.y * TOKENS;
  const int part = COLUMN_WARPS > 1 ? warp / EXPERT_WARPS : 0, first_tile = warp % EXPERT_WARPS * WARP_TILES;
  arrive_at_cluster();  // a block's shared memory is there once it has come
  const uint4* own = (const uint4*)router + (((long)block * UNITS + part) * TILES + first_tile) * 64 + lane;
  uint4 ahead[AHEAD][WARP_TILES][2];
  auto load = [&](int d, bool more) {
#pragma unroll
    for (int t = 0; t < WARP_TILES * 2; t++)
      load_if(more, ahead[d][t / 2][t % 2], own + (d * COLUMN_WARPS * TILES * 2 + t) * 32);
  };
#pragma unroll
  for (int d = 0; d < AHEAD; d++) load(d, true);
  const int first = block * COLUMNS, columns = max(0, min(COLUMNS, WIDTH - first));
  const int rows = min(TOKENS, tokens - first_token);  // with those of padding, which are chosen for nowhere
  const float* from = hidden + (long)(first_token + warp) * WIDTH + first + lane * 4;
  float* lane_to = x + warp * X_STRIDE + lane * 4;
  const u32 to = (u32)__cvta_generic_to_shared(lane_to);
  let_next_start();
  wait_for_previous();

  copy_columns(to, lane_to, from, warp, rows, columns, lane);
  const int live = min(load_int(header + 1), tokens);
  wait_for_cluster();
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (first_token >= live) return choose_none(chosen, first_token, tokens);
  __syncthreads();

  if (SHARED == 2)
    for (int m = warp; m < TOKENS; m += WARPS) {
      float gate_sum = 0.f;
      for (int column = lane * 4; column < columns; column += 128)
        gate_sum += gate_part(gate + first + column, *(const float4*)(x + m * X_STRIDE + column));
      gate_sum = sum_of_warp(gate_sum);
      if (lane == 0) store_in_cluster(&gate_sums[block][m % OWN_TOKENS], m / OWN_TOKENS, gate_sum);
    }
  Sums tile_sums[WARP_TILES] = {};
  float lane_squares[TOKEN_TILES] = {};  // sums of them, of a lane's columns
  const float* lane_x = x + lane / 4 % TOKENS * X_STRIDE + part * 16 + lane % 4 * 4;
#pragma unroll 1
  for (int at = 0; at < WARP_UNITS; at += AHEAD) {
    own += AHEAD * COLUMN_WARPS * TILES * 64;
#pragma unroll
    for (int d = 0; d < AHEAD; d++) {
      float4 values[TOKEN_TILES];
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
        values[j] = *(const float4*)(lane_x + j * 8 * X_STRIDE + d * COLUMN_WARPS * 16);
        lane_squares[j] += (values[j].x * values[j].x + values[j].y * values[j].y) +
                           (values[j].z * values[j].z + values[j].w * values[j].w);
      }
#pragma unroll
      for (int t = 0; t < WARP_TILES; t++) add_unit(tile_sums[t], ahead[d][t], values);
      load(d, at + AHEAD < WARP_UNITS);
    }
    lane_x += AHEAD * COLUMN_WARPS * 16;
  }
#pragma unroll
  for (int j = 0; j < TOKEN_TILES; j++)
    if (warp % EXPERT_WARPS == j % EXPERT_WARPS) {  // all of a part have the same
      float square = lane_squares[j] + __shfl_xor_sync(~0u, lane_squares[j], 1);
      square += __shfl_xor_sync(~0u, square, 2);
      const int m = j * 8 + lane / 4;
      if (lane % 4 == 0 && m < TOKENS)
        store_in_cluster(&square_sums[block][part][m % OWN_TOKENS], m / OWN_TOKENS, square);
    }
  store_sums(warp_sums, tile_sums, part, first_tile, lane);
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < TOKENS * PADDED / 4; i += WARPS * 32) {
    const int m = i / (PADDED / 4), e = i % (PADDED / 4) * 4;
    float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int p = 0; p < COLUMN_WARPS; p++) {
      const float4 each = *(const float4*)(warp_sums + (p * TOKENS + m) * SUM_STRIDE + e);
      all.x += each.x; all.y += each.y; all.z += each.z; all.w += each.w;
    }
    store4_in_cluster(sums + (block * OWN_TOKENS + m % OWN_TOKENS) * PADDED + e, m / OWN_TOKENS, all);
  }
  arrive_at_cluster();
  wait_for_cluster();

  const auto score_of = [&](const float* own_sums, int stride, int m, const float* bias) {
    const float square = sum_of<BLOCKS * COLUMN_WARPS>(&square_sums[0][0][m], OWN_TOKENS) * (1.f / WIDTH);
    return sum_of<BLOCKS>(own_sums, stride) * rsqrtf(square + eps) + (bias ? __ldg(bias) : 0.f);
  };
  const int own_first = first_token + block * OWN_TOKENS;
  const int own_end = min(own_first + OWN_TOKENS, min(first_token + TOKENS, tokens));
#pragma unroll 1
  for (int i = threadIdx.x; i < OWN_TOKENS * PADDED; i += WARPS * 32) {
    const int m = i / PADDED, e = i % PADDED, token = own_first + m;
    if (token >= own_end || token >= live || e >= EXPERTS) continue;
    const float score = score_of(sums + i, OWN_TOKENS * PADDED, m, biases ? biases + e : nullptr);
    found[m][e] = score;
    scores[(long)token * EXPERTS + e] = score;
  }
  if (SHARED == 2 && threadIdx.x < OWN_TOKENS)
    gate_scores[threadIdx.x] = score_of(
        &gate_sums[0][threadIdx.x], OWN_TOKENS, threadIdx.x, biases ? biases + EXPERTS : nullptr);
  __syncthreads();
  const int token = own_first + warp;
  if (warp >= OWN_TOKENS || token >= own_end) return;
  const long at = (long)token * PLACES;
  if (token >= live) {
    if (lane < PLACES) chosen[at + lane] = -1;
    return;
  }
  const auto score = [&](int e) { return SHARED == 2 && e == EXPERTS ? gate_scores[warp] : found[warp][e]; };
  choose(score, selection, scales, chosen + at, weights + at, lane, warp, normalized, scale);
}
