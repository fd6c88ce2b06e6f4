// The choice of experts by scores, for kernels that have a token's scores.
// Defined around it: EXPERTS PER_TOKEN SIGMOID SELECTS (0 or 1) GROUPS (of experts, up to 32) GROUPS_PER_TOKEN CHOOSERS
// (warps of a block that choose, each for a token) SHARED (1: a token's last place is that of expert number EXPERTS,
// whole; 2: the same, by the weight of a gate; 0: there is none). Before it: primitives.cu.

constexpr int OWN = (EXPERTS + 31) / 32;  // experts of a lane, where one warp chooses
constexpr bool BY_SCORE = !SIGMOID && !SELECTS && GROUPS == 1;  // the order of a softmax is that of its scores
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
// The number of a rank.
INLINE float of_rank(u32 rank) { return __uint_as_float(rank ^ ((int)rank < 0 ? 0x80000000u : ~0u)); }

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

// Of the whole warp: ranks of shares, of which the groups that are not left have none.
INLINE void rank_shares(
    const float (&share)[OWN], u32 (&rank)[OWN], const float* selection, int lane, int slot) {
  __shared__ float all_ranks[CHOOSERS][GROUPS > 1 ? EXPERTS : 1];
  float* ranks = all_ranks[slot];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int e = lane * OWN + i;
    float own = share[i];
    if (SELECTS && e < EXPERTS) own += __ldg(selection + e);
    if (GROUPS > 1 && e < EXPERTS) ranks[e] = own == own ? own : 0.f;
    rank[i] = e < EXPERTS ? in_order(own) : 0u;
  }
  if (GROUPS == 1) return;
  __syncwarp();
  const u32 left = left_groups(ranks, lane);
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (!(left >> (lane * OWN + i) / (EXPERTS / GROUPS) & 1)) rank[i] = 0;
}

// Of the whole warp: softmax over all experts, or sigmoids, then the highest ranks, of equal ones the first. A lane has
// a run of OWN experts, so of equal ranks the first lane has the first.
// score(e): of expert e < EXPERTS, and of the gate, EXPERTS; slot: a number of the warp among those of its block that
// choose.
template <class Score>
INLINE void choose(
    const Score& score, const float* selection, const float* scales, int* chosen, float* weights, int lane, int slot,
    bool normalized, float scale) {
  float share[OWN];
  u32 rank[OWN], most = 0;  // 0: taken
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int e = lane * OWN + i;
    share[i] = e < EXPERTS ? score(e) : 0.f;
    rank[i] = e < EXPERTS ? in_order(share[i]) : 0u;
    most = max(most, rank[i]);
  }
  const float top = SIGMOID ? 0.f : of_rank(__reduce_max_sync(~0u, most));
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    share[i] = SIGMOID ? sigmoid(share[i]) : lane * OWN + i < EXPERTS ? expf(share[i] - top) : 0.f;
    total += share[i];
  }
  if (!SIGMOID && !BY_SCORE) {
    total = sum_of_warp(total);
#pragma unroll
    for (int i = 0; i < OWN; i++) share[i] /= total;
  }
  if (!BY_SCORE) rank_shares(share, rank, selection, lane, slot);
  __shared__ float2 picked[CHOOSERS][PER_TOKEN];  // a place's share and its expert's number
#pragma unroll
  for (int at = 0; at < PER_TOKEN; at++) {
    most = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) most = max(most, rank[i]);
    const u32 best = __reduce_max_sync(~0u, most);
    const u32 holders = __ballot_sync(~0u, most == best);
    const bool takes = most == best && (holders & ((1u << lane) - 1)) == 0;
    bool open = takes;
    float part = 0.f;
    int expert = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const bool is_it = open && rank[i] == best;
      part = is_it ? share[i] : part;
      expert = is_it ? lane * OWN + i : expert;
      rank[i] = is_it ? 0u : rank[i];
      open = open && !is_it;
    }
    if (takes) picked[slot][at] = make_float2(part, __int_as_float(expert));
  }
  __syncwarp();
  const float2 place = lane < PER_TOKEN ? picked[slot][lane] : make_float2(0.f, 0.f);
  const float sum = sum_of_warp(BY_SCORE && !normalized ? total : place.x);
  if (lane < PER_TOKEN) {
    const int expert = __float_as_int(place.y);
    chosen[lane] = expert;
    const bool divides = BY_SCORE || normalized;
    const float own = (divides ? place.x / (sum + 1e-20f) : place.x) * scale;  // sigmoids may all be zero
    weights[lane] = scales ? own * __ldg(scales + expert) : own;
  }
  if (SHARED && lane == PER_TOKEN) {
    chosen[lane] = EXPERTS;
    weights[lane] = SHARED == 2 ? sigmoid(score(EXPERTS)) : 1.f;
  }
}
