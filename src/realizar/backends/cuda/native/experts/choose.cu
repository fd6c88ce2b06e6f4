// Scores of experts and their choice, for few tokens. A warp multiplies a token of the residual stream with the weights
// of one expert and finds the norm's root on the way; then one warp of a token chooses: in the last block to finish, or
// where a token's blocks are a cluster, in its first, whose shared memory gets all scores.
// Defined around it: WIDTH (of the stream, a multiple of 4) WARPS (of a block) CLUSTER (a token's blocks, or 0) NAME.
// Before it: primitives.cu, choice.cu, and with CLUSTER clusters.cu.

constexpr int VECTORS = (WIDTH + 127) / 128;  // of a lane
constexpr int ROWS = EXPERTS + (SHARED == 2);  // of the router: the last one is the gate
constexpr int EARLY = VECTORS < 24 ? VECTORS : 24;  // asked for before the wait
#if CLUSTER
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTER
#endif

// Grid: blocks of rows, tokens. router: float32 [ROWS, WIDTH], times the norm's weight; biases: of its rows' scores, or
// null; selection: of ranks, or null; scales: of experts' weights, or null; header[1]: tokens of the step without
// padding; scores: [tokens, EXPERTS], then the gate's [tokens]; arrivals: int32 [tokens] of zeros, left so; chosen,
// weights: [tokens, PLACES].
extern "C" __global__ void OF_CLUSTER __launch_bounds__(WARPS * 32) NAME(
    const float* router, const float* biases, const float* selection, const float* scales, const float* hidden,
    const int* header, float* scores, int* arrivals, int* chosen, float* weights, float eps, int normalized,
    float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
  const int expert = min((int)blockIdx.x * WARPS + warp, ROWS - 1);
  const float4* row = (const float4*)(router + (long)expert * WIDTH);
  float4 early[EARLY];
#pragma unroll
  for (int v = 0; v < EARLY; v++)
    early[v] = v * 128 + lane * 4 < WIDTH ? __ldg(row + v * 32 + lane) : make_float4(0.f, 0.f, 0.f, 0.f);
  const float bias = biases ? __ldg(biases + expert) : 0.f;
#if CLUSTER
  __shared__ float all_scores[CLUSTER * WARPS];
  arrive_at_cluster();  // a block's shared memory is there once it has come
#endif
  let_next_start();
  wait_for_previous();
  chosen += (long)token * PLACES;
  weights += (long)token * PLACES;
  const auto score_at = [&](int e) {
    return scores + (SHARED == 2 && e == EXPERTS ? (long)gridDim.y * EXPERTS + token : (long)token * EXPERTS + e);
  };
  if (token >= load_int(header + 1)) {
    if (blockIdx.x == 0 && threadIdx.x < PLACES) chosen[threadIdx.x] = -1;
    return;
  }
  float dot = 0.f, square = 0.f;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (v * 128 + lane * 4 >= WIDTH) break;
    const uint4 bits = load16(hidden + (long)token * WIDTH + v * 128 + lane * 4);
    const float4 w = v < EARLY ? early[v] : __ldg(row + v * 32 + lane);
    const float x0 = __uint_as_float(bits.x), x1 = __uint_as_float(bits.y);
    const float x2 = __uint_as_float(bits.z), x3 = __uint_as_float(bits.w);
    dot += (w.x * x0 + w.y * x1) + (w.z * x2 + w.w * x3);
    square += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3);
  }
  dot = sum_of_warp(dot);
  square = sum_of_warp(square);
  const float score = dot / sqrtf(square / WIDTH + eps) + bias;
  if (lane == 0) *score_at(expert) = score;
#if CLUSTER
  wait_for_cluster();
  if (lane == 0) store_in_cluster(all_scores + blockIdx.x * WARPS + warp, 0, score);
  arrive_at_cluster();
  wait_for_cluster();
  if (blockIdx.x > 0 || warp > 0) return;
  const auto found = [&](int e) { return all_scores[e]; };
#else
  __shared__ int last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrivals + token, 1) == (int)gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last || warp > 0) return;
  if (lane == 0) arrivals[token] = 0;
  const auto found = [&](int e) { return __ldcg(score_at(e)); };
#endif
  choose(found, selection, scales, chosen, weights, lane, 0, normalized, scale);
}
