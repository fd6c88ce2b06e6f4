// Scores of experts and their choice, for few tokens. A warp multiplies a token of the residual stream with the weights
// of one expert and finds the norm's root on the way; the last block of a token chooses.
// Defined around it: WIDTH (of the stream, a multiple of 4) EXPERTS PER_TOKEN WARPS (of a block); NAME; SIGMOID SELECTS
// (0 or 1) GROUPS (of experts, up to 32) GROUPS_PER_TOKEN.
// Before it: primitives.cu.

constexpr int VECTORS = (WIDTH + 127) / 128;  // of a lane
constexpr int EARLY = VECTORS < 24 ? VECTORS : 24;  // asked for before the wait
constexpr int OWN = (EXPERTS + 31) / 32;  // experts of a lane, where one warp chooses

INLINE float sum_of_warp(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// Of finite numbers and infinities: the higher, the higher, and above 0. NaN ranks as 0.
INLINE u32 in_order(float x) {
  const u32 bits = x == x ? __float_as_uint(x) : 0u;
  return bits ^ ((int)bits < 0 ? ~0u : 0x80000000u);
}

// Of the whole warp: bits of the groups that are left, those whose two highest ranks have the highest sums, of equal
// ones the first.
INLINE u32 left_groups(const float* ranks, int lane) {
  constexpr int SIZE = EXPERTS / GROUPS;
  u32 rank = 0, left = 0;
  if (lane < GROUPS) {
    float first = -__int_as_float(0x7f800000), second = first;
    for (int i = 0; i < SIZE; i++) {
      const float each = ranks[lane * SIZE + i];
      if (each > first) { second = first; first = each; }
      else if (each > second) second = each;
    }
    rank = in_order(SIZE == 1 ? first : first + second);
  }
  for (int i = 0; i < GROUPS_PER_TOKEN; i++) {
    const u32 best = __reduce_max_sync(~0u, rank);
    const int found = __ffs(__ballot_sync(~0u, rank == best)) - 1;
    left |= 1u << found;
    if (lane == found) rank = 0;
  }
  return left;
}

// Of the whole warp: softmax over all experts, or sigmoids, then the highest ranks, of equal ones the first.
INLINE void choose(
    const float* scores, const float* selection, const float* scales, int* chosen, float* weights, int lane,
    bool normalized, float scale) {
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
    if (SIGMOID) {
      const float power = expf(-fabsf(share[i]));
      share[i] = (share[i] < 0.f ? power : 1.f) / (1.f + power);
    } else {
      share[i] = i * 32 + lane < EXPERTS ? expf(share[i] - top) : 0.f;
      total += share[i];
    }
  }
  if (!SIGMOID) total = sum_of_warp(total);
  __shared__ float ranks[GROUPS > 1 ? EXPERTS : 1];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (!SIGMOID) share[i] /= total;
    float own = share[i];
    if (SELECTS && i * 32 + lane < EXPERTS) own += __ldg(selection + i * 32 + lane);
    if (GROUPS > 1 && i * 32 + lane < EXPERTS) ranks[i * 32 + lane] = own == own ? own : 0.f;
    rank[i] = i * 32 + lane < EXPERTS ? in_order(own) : 0u;  // 0: taken
  }
  if (GROUPS > 1) {
    __syncwarp();
    const u32 left = left_groups(ranks, lane);
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (!(left >> (i * 32 + lane) / (EXPERTS / GROUPS) & 1)) rank[i] = 0;
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
    own = (normalized ? own / (sum + 1e-20f) : own) * scale;  // sigmoids may all be zero
    weights[lane] = scales ? own * __ldg(scales + expert) : own;
  }
}

// Grid: blocks of experts, tokens. router: float32 [EXPERTS, WIDTH], times the norm's weight; biases: of scores, or
// null; selection: of ranks, or null; scales: of experts' weights, or null; header[1]: tokens of the step without
// padding; arrivals: int32 [tokens] of zeros, left so; chosen, weights: [tokens, PER_TOKEN].
extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(
    const float* router, const float* biases, const float* selection, const float* scales, const float* hidden,
    const int* header, float* scores, int* arrivals, int* chosen, float* weights, float eps, int normalized,
    float scale) {
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
  choose(scores, selection, scales, chosen, weights, lane, normalized, scale);
}
