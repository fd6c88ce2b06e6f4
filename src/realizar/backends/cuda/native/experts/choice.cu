// The choice of experts by scores, for kernels that have a token's scores.
// Defined around it: EXPERTS PER_TOKEN SIGMOID SELECTS (0 or 1) GROUPS (of experts, up to 32) GROUPS_PER_TOKEN CHOOSERS
// (warps of a block that choose, each for a token) SHARED (1: a token's last place is that of expert number EXPERTS,
// whole; 2: the same, by the weight of a gate; 0: there is none). Before it: primitives.cu.

constexpr int OWN = (EXPERTS + 31) / 32;  // experts of a lane, where one warp chooses
constexpr int PLACES = PER_TOKEN + (SHARED > 0);  // of a token's experts

INLINE float sum_of_warp(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

INLINE float sigmoid(float x) {
  const float power = expf(-fabsf(x));
  return (x < 0.f ? power : 1.f) / (1.f + power);
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
// score(e): of expert e < EXPERTS, and of the gate, EXPERTS; slot: a number of the warp among those of its block that
// choose.
template <class Score>
INLINE void choose(
    const Score& score, const float* selection, const float* scales, int* chosen, float* weights, int lane, int slot,
    bool normalized, float scale) {
  float share[OWN], top = -__int_as_float(0x7f800000), total = 0.f;
  u32 rank[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    share[i] = i * 32 + lane < EXPERTS ? score(i * 32 + lane) : -__int_as_float(0x7f800000);
    top = fmaxf(top, share[i]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (SIGMOID) {
      share[i] = sigmoid(share[i]);
    } else {
      share[i] = i * 32 + lane < EXPERTS ? expf(share[i] - top) : 0.f;
      total += share[i];
    }
  }
  if (!SIGMOID) total = sum_of_warp(total);
  __shared__ float all_ranks[CHOOSERS][GROUPS > 1 ? EXPERTS : 1];
  float* ranks = all_ranks[slot];
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
  float own = 0.f, sum = 0.f;  // of the place with the lane's number, and of all
  int expert = 0;
#pragma unroll
  for (int at = 0; at < PER_TOKEN; at++) {
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
    if (lane == at) { own = part; expert = found; }
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (i * 32 + lane == found) rank[i] = 0;
  }
  if (lane < PER_TOKEN) {
    chosen[lane] = expert;
    own = (normalized ? own / (sum + 1e-20f) : own) * scale;  // sigmoids may all be zero
    weights[lane] = scales ? own * __ldg(scales + expert) : own;
  }
  if (SHARED && lane == PER_TOKEN) {
    chosen[lane] = EXPERTS;
    weights[lane] = SHARED == 2 ? sigmoid(score(EXPERTS)) : 1.f;
  }
}
