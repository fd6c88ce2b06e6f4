// Scores of experts and their choice, for few tokens. A warp multiplies a token of the residual stream with the weights
// of one expert and finds the norm's root on the way; the last block of a token chooses.
// Defined around it: WIDTH (of the stream, a multiple of 4) EXPERTS PER_TOKEN WARPS (of a block); NAME.
// Before it: primitives.cu.

constexpr int VECTORS = (WIDTH + 127) / 128;  // of a lane
constexpr int EARLY = VECTORS < 24 ? VECTORS : 24;  // asked for before the wait
constexpr int OWN = (EXPERTS + 31) / 32;  // experts of a lane, where one warp chooses

INLINE float sum_of_warp(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// Of the whole warp: softmax over all experts, then the highest, of equal ones the first. NaN ranks as 0.
INLINE void choose(const float* scores, int* chosen, float* weights, int lane, bool normalized, float scale) {
  float share[OWN], top = -__int_as_float(0x7f800000), total = 0.f;
  u32 rank[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    share[i] = i * 32 + lane < EXPERTS ? __ldcg(scores + i * 32 + lane) : -__int_as_float(0x7f800000);
    top = fmaxf(top, share[i]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    share[i] = i * 32 + lane < EXPERTS ? expf(share[i] - top) : 0.f;
    total += share[i];
  }
  total = sum_of_warp(total);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    share[i] /= total;
    const u32 bits = share[i] == share[i] ? __float_as_uint(share[i]) : 0u;
    rank[i] = i * 32 + lane < EXPERTS ? bits + 1u : 0u;  // 0: taken
  }
  float own = 0.f, sum = 0.f;  // of the slot with the lane's number, and of all
  int expert = 0;
#pragma unroll
  for (int slot = 0; slot < PER_TOKEN; slot++) {
    u32 most = 0;
    float part = 0.f;
    int first = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (rank[i] > most) { most = rank[i]; part = share[i]; first = i * 32 + lane; }
    const u32 best = __reduce_max_sync(~0u, most);
    const int found = (int)__reduce_min_sync(~0u, most == best ? (u32)first : ~0u);
    part = __shfl_sync(~0u, part, found % 32);
    sum += part;
    if (lane == slot) { own = part; expert = found; }
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (i * 32 + lane == found) rank[i] = 0;
  }
  if (lane < PER_TOKEN) {
    chosen[lane] = expert;
    weights[lane] = (normalized ? own / sum : own) * scale;
  }
}

// Grid: blocks of experts, tokens. router: float32 [EXPERTS, WIDTH], times the norm's weight; biases: of scores, or
// null; header[1]: tokens of the step without padding; arrivals: int32 [tokens] of zeros, left so; chosen, weights:
// [tokens, PER_TOKEN].
extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(
    const float* router, const float* biases, const float* hidden, const int* header, float* scores, int* arrivals,
    int* chosen, float* weights, float eps, int normalized, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
  const int expert = min((int)blockIdx.x * WARPS + warp, EXPERTS - 1);
  const float4* row = (const float4*)(router + (long)expert * WIDTH);
  float4 early[EARLY];
#pragma unroll
  for (int v = 0; v < EARLY; v++)
    early[v] = v * 128 + lane * 4 < WIDTH ? __ldg(row + v * 32 + lane) : make_float4(0.f, 0.f, 0.f, 0.f);
  const float bias = biases ? __ldg(biases + expert) : 0.f;
  let_next_start();
  wait_for_previous();
  chosen += (long)token * PER_TOKEN;
  weights += (long)token * PER_TOKEN;
  scores += (long)token * EXPERTS;
  if (token >= load_int(header + 1)) {
    if (blockIdx.x == 0 && threadIdx.x < PER_TOKEN) chosen[threadIdx.x] = -1;
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
  __shared__ int last;
  if (lane == 0) scores[expert] = dot / sqrtf(square / WIDTH + eps) + bias;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrivals + token, 1) == (int)gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last || warp > 0) return;
  if (lane == 0) arrivals[token] = 0;
  choose(scores, chosen, weights, lane, normalized, scale);
}
