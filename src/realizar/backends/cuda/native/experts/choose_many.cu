// Scores of experts and their choice, for many tokens: a cluster of blocks has some tokens of the residual stream, and
// each of its warps some columns of the router, for all experts and some of those tokens. The sums of warps, then of
// blocks, are added in one order.
// Defined around it: WIDTH (of the stream, a multiple of 4) TOKENS (of a cluster) WARP_TOKENS (of a warp) LANE_EXPERTS
// (1, 2, 4 or 8: a lane's) FLOATS (of a block's dynamic shared memory) NAME. Before it: primitives.cu, clusters.cu,
// choice.cu.

constexpr int BLOCKS = 8, WARPS = 8;  // of a cluster, of a block
constexpr int TOKEN_WARPS = TOKENS / WARP_TOKENS, COLUMN_WARPS = WARPS / TOKEN_WARPS;
constexpr int SLICE = LANE_EXPERTS > 4 ? 4 : 8;  // columns whose weights are asked for together
constexpr int SLICES = (WIDTH + BLOCKS * COLUMN_WARPS * SLICE - 1) / (BLOCKS * COLUMN_WARPS * SLICE);
constexpr int COLUMNS = SLICES * SLICE;  // of a warp
constexpr int PADDED = 32 * LANE_EXPERTS;  // experts
static_assert(FLOATS == WARPS * WARP_TOKENS * (COLUMNS > PADDED ? COLUMNS : PADDED));
constexpr int OWN_TOKENS = (TOKENS + BLOCKS - 1) / BLOCKS;  // which a block chooses for

INLINE void load_weights(float (&w)[SLICE][LANE_EXPERTS], const float* router, int first, int end, int lane) {
#pragma unroll
  for (int k = 0; k < SLICE; k++) {
    const float* row = router + (long)(first + k) * PADDED + lane * LANE_EXPERTS;
    const bool inside = first + k < end;
    if constexpr (LANE_EXPERTS >= 4) {
#pragma unroll
      for (int v = 0; v < LANE_EXPERTS / 4; v++) {
        const float4 four = inside ? __ldg((const float4*)row + v) : make_float4(0.f, 0.f, 0.f, 0.f);
        w[k][v * 4] = four.x; w[k][v * 4 + 1] = four.y; w[k][v * 4 + 2] = four.z; w[k][v * 4 + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int v = 0; v < LANE_EXPERTS; v++) w[k][v] = inside ? __ldg(row + v) : 0.f;
    }
  }
}

// Of four columns: a part of the gate's score.
INLINE float gate_part(const float* gate, const u32 (&bits)[4]) {
  const float4 g = __ldg((const float4*)gate);
  const float first = g.x * __uint_as_float(bits[0]) + g.y * __uint_as_float(bits[1]);
  return first + (g.z * __uint_as_float(bits[2]) + g.w * __uint_as_float(bits[3]));
}

INLINE float sum_of_blocks(const float* own) {
  float all = 0.f;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) all += load_in_cluster(own, b);
  return all;
}

// Of a token's sums in the blocks of a cluster.
INLINE float score_of(const float* sums, const float* square_sums, float eps, const float* bias) {
  return sum_of_blocks(sums) / sqrtf(sum_of_blocks(square_sums) / WIDTH + eps) + (bias ? __ldg(bias) : 0.f);
}

// Of a whole cluster of padding.
INLINE void choose_none(int* chosen, int first_token, int tokens) {
  for (int i = blockIdx.x * WARPS * 32 + threadIdx.x; i < TOKENS * PLACES; i += BLOCKS * WARPS * 32)
    if (first_token + i / PLACES < tokens) chosen[(long)first_token * PLACES + i] = -1;
}

// Grid: BLOCKS, clusters. router: float32 [WIDTH, PADDED], times the norm's weight, zeros behind EXPERTS; biases: of
// scores, or null; selection: of ranks, or null; scales: of experts' weights, or null; header[1]: tokens of the step
// without padding, of `tokens`; scores: [tokens, EXPERTS]; chosen, weights: [tokens, PLACES]; gate: float32 [WIDTH],
// times the norm's weight, whose bias is the last of `biases`; or null.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(WARPS * 32, 2) NAME(
    const float* router, const float* biases, const float* selection, const float* scales, const float* hidden,
    const int* header, float* scores, int* chosen, float* weights, float eps, int normalized, float scale, int tokens,
    const float* gate) {
  float* memory = (float*)ring;  // [FLOATS]: a warp's columns of the stream, later its sums
  __shared__ float2 token_sums[WARPS][WARP_TOKENS];  // of squares, and of the gate
  __shared__ float sums[TOKENS][PADDED], block_square_sums[TOKENS], block_gate_sums[TOKENS];
  __shared__ float found[OWN_TOKENS][PADDED], gate_scores[OWN_TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  const int part = warp / TOKEN_WARPS, tokens_at = warp % TOKEN_WARPS * WARP_TOKENS, first_token = blockIdx.y * TOKENS;
  const int first = (block * COLUMN_WARPS + part) * COLUMNS, end = min(first + COLUMNS, WIDTH);
  float w[2][SLICE][LANE_EXPERTS];
  load_weights(w[0], router, first, end, lane);
  load_weights(w[1], router, first + SLICE, end, lane);
  let_next_start();
  wait_for_previous();
  const int live = min(load_int(header + 1), tokens);
  if (first_token >= live) return choose_none(chosen, first_token, tokens);
  float* x = memory + warp * WARP_TOKENS * COLUMNS;  // [COLUMNS][WARP_TOKENS]
  const int own = first_token + tokens_at + lane % WARP_TOKENS;
  float square = 0.f, gate_sum = 0.f;
#pragma unroll 4
  for (int v = lane / WARP_TOKENS; v < COLUMNS / 4; v += 32 / WARP_TOKENS) {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (own < live && first + v * 4 < end) bits = load16(hidden + (long)own * WIDTH + first + v * 4);
    const u32 values[4] = {bits.x, bits.y, bits.z, bits.w};
    if (SHARED == 2 && first + v * 4 < end) gate_sum += gate_part(gate + first + v * 4, values);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float value = __uint_as_float(values[i]);
      x[(v * 4 + i) * WARP_TOKENS + lane % WARP_TOKENS] = value;
      square += value * value;
    }
  }
#pragma unroll
  for (int o = 16; o >= WARP_TOKENS; o >>= 1) {
    square += __shfl_xor_sync(~0u, square, o);
    if (SHARED == 2) gate_sum += __shfl_xor_sync(~0u, gate_sum, o);
  }
  if (lane < WARP_TOKENS) token_sums[warp][lane] = make_float2(square, gate_sum);
  __syncwarp();

  float sum[WARP_TOKENS][LANE_EXPERTS];
#pragma unroll
  for (int m = 0; m < WARP_TOKENS; m++)
#pragma unroll
    for (int e = 0; e < LANE_EXPERTS; e++) sum[m][e] = 0.f;
  auto add = [&](const float(&weight)[SLICE][LANE_EXPERTS], int slice) {
#pragma unroll
    for (int k = 0; k < SLICE; k++) {
      float values[WARP_TOKENS];
#pragma unroll
      for (int m = 0; m < WARP_TOKENS; m += 4) {
        const float4 four = *(const float4*)(x + (slice * SLICE + k) * WARP_TOKENS + m);
        values[m] = four.x; values[m + 1] = four.y; values[m + 2] = four.z; values[m + 3] = four.w;
      }
#pragma unroll
      for (int m = 0; m < WARP_TOKENS; m++)
#pragma unroll
        for (int e = 0; e < LANE_EXPERTS; e++) sum[m][e] += weight[k][e] * values[m];
    }
  };
#pragma unroll 1
  for (int slice = 0; slice < SLICES; slice += 2) {
    add(w[0], slice);
    load_weights(w[0], router, first + (slice + 2) * SLICE, end, lane);
    if (slice + 1 < SLICES) add(w[1], slice + 1);
    load_weights(w[1], router, first + (slice + 3) * SLICE, end, lane);
  }
  __syncthreads();  // all have read their columns
  float* partial = memory + (part * TOKENS + tokens_at) * PADDED;  // [COLUMN_WARPS][TOKENS][PADDED]
#pragma unroll
  for (int m = 0; m < WARP_TOKENS; m++)
#pragma unroll
    for (int e = 0; e < LANE_EXPERTS; e++) partial[m * PADDED + lane * LANE_EXPERTS + e] = sum[m][e];
  __syncthreads();
#pragma unroll 2
  for (int i = threadIdx.x; i < TOKENS * PADDED; i += WARPS * 32) {
    float all = 0.f;
#pragma unroll
    for (int p = 0; p < COLUMN_WARPS; p++) all += memory[p * TOKENS * PADDED + i];
    sums[i / PADDED][i % PADDED] = all;
  }
  if (threadIdx.x < TOKENS) {
    float all = 0.f, gates = 0.f;
    for (int p = 0; p < COLUMN_WARPS; p++) {
      const float2 both = token_sums[p * TOKEN_WARPS + threadIdx.x / WARP_TOKENS][threadIdx.x % WARP_TOKENS];
      all += both.x;
      gates += both.y;
    }
    block_square_sums[threadIdx.x] = all;
    block_gate_sums[threadIdx.x] = gates;
  }
  arrive_at_cluster();
  wait_for_cluster();
  for (int i = threadIdx.x; i < OWN_TOKENS * PADDED; i += WARPS * 32) {
    const int m = block * OWN_TOKENS + i / PADDED, e = i % PADDED, token = first_token + m;
    if (m >= TOKENS || e >= EXPERTS) continue;
    const float score = score_of(&sums[m][e], &block_square_sums[m], eps, biases ? biases + e : nullptr);
    found[i / PADDED][e] = score;
    if (token < live) scores[(long)token * EXPERTS + e] = score;
  }
  if (SHARED == 2 && threadIdx.x < OWN_TOKENS && block * OWN_TOKENS + threadIdx.x < TOKENS) {
    const int m = block * OWN_TOKENS + threadIdx.x;
    const float* bias = biases ? biases + EXPERTS : nullptr;
    gate_scores[threadIdx.x] = score_of(&block_gate_sums[m], &block_square_sums[m], eps, bias);
  }
  arrive_at_cluster();  // also the block's own barrier
  wait_for_cluster();
  const int m = block * OWN_TOKENS + warp, token = first_token + m;
  if (warp >= OWN_TOKENS || m >= TOKENS || token >= tokens) return;
  if (token >= live) {
    if (lane < PLACES) chosen[(long)token * PLACES + lane] = -1;
    return;
  }
  const auto score = [&](int e) { return SHARED == 2 && e == EXPERTS ? gate_scores[warp] : found[warp][e]; };
  const long at = (long)token * PLACES;
  choose(score, selection, scales, chosen + at, weights + at, lane, warp, normalized, scale);
}
