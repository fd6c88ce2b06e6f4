// Pairs of tokens and experts sorted by expert, by one block: a counting sort whose order is by pair within an expert,
// whatever the number of warps. Each warp counts a run of pairs in a row of its own, so no count is shared.
// Defined by the loader: WARPS (of the block) EXPERTS EXPERT_BITS (of an expert's number) STAGED (places that shared
// memory has room for, a multiple of 4). Before it: primitives.cu.

// Pairs of a lane that are asked for together.
constexpr int AT_ONCE = 4;
constexpr int RUN = (EXPERTS + 31) / 32;  // experts of a lane, where one warp has all

// The expert of a pair, or -1.
INLINE int expert_of(const int* chosen, int pair, int pairs) {
  int expert = -1;
  if (pair < pairs) asm volatile("ld.global.s32 %0, [%1];" : "=r"(expert) : "l"(chosen + pair) : "memory");
  return expert < EXPERTS ? expert : -1;
}

// chosen: [pairs], an expert each; what is below 0 or not below EXPERTS goes nowhere. An expert's pairs fill whole
// tiles of `tile` places, a multiple of 4. slots: the pair of each place, -1 behind an expert's last. work: the number
// of tiles, then of each tile its expert times two, plus one where the expert has several. starts: [EXPERTS + 1], the
// first of an expert's pairs among all that go somewhere. experts_read: how many experts all sorts have found, and how
// many sorts; or null.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
route_pairs(const int* chosen, int* slots, int* work, int* starts, u64* experts_read, int pairs, int tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int* staged = (int*)ring;                       // [STAGED]: slots, if they have room
  int* counts = staged + STAGED;                  // [WARPS][EXPERTS], then a warp's next place within the expert
  int* totals = counts + WARPS * EXPERTS;         // [EXPERTS]
  int* first_tiles = totals + EXPERTS;            // [EXPERTS + 1]
  int* mine = counts + warp * EXPERTS;
  const int length = (pairs + WARPS * 32 - 1) / (WARPS * 32) * 32, begin = warp * length;
  const int end = begin + length < pairs ? begin + length : pairs;
  const u32 inverse = ~0u / tile + 1;  // times 2^32, for numbers far below that
  for (int e = lane; e < EXPERTS; e += 32) mine[e] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < STAGED / 4; i += WARPS * 32) ((int4*)staged)[i] = make_int4(-1, -1, -1, -1);
  __syncwarp();
  let_next_start();
  wait_for_previous();

  // Of a run of 32 * AT_ONCE pairs: each one's expert, and its place among those that `mine` counts.
  int found[AT_ONCE], places[AT_ONCE];
  auto visit = [&](int at) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) found[i] = expert_of(chosen, at + i * 32 + lane, end);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      u32 same = __ballot_sync(~0u, found[i] >= 0);
      if (same == 0) continue;
#pragma unroll
      for (int b = 0; b < EXPERT_BITS; b++) {
        const u32 ones = __ballot_sync(~0u, found[i] >> b & 1);
        same &= found[i] >> b & 1 ? ones : ~ones;
      }
      const u32 before = same & ((1u << lane) - 1);
      if (found[i] >= 0) places[i] = mine[found[i]] + __popc(before);
      __syncwarp();
      if (found[i] >= 0 && before == 0) mine[found[i]] = places[i] + __popc(same);
      __syncwarp();
    }
  };
  const bool once = length <= 32 * AT_ONCE;
#pragma unroll 1
  for (int at = begin; at < end; at += 32 * AT_ONCE) visit(at);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const int count = counts[w * EXPERTS + e];
      counts[w * EXPERTS + e] = sum;
      sum += count;
    }
    totals[e] = sum;
  }
  __syncthreads();
  const auto tiles_of = [&](int total) { return (int)__umulhi(total + tile - 1, inverse); };
  if (warp == 0) {
    int tiles = 0, live = 0, used = 0;
#pragma unroll(RUN <= 8 ? RUN : 1)
    for (int i = 0; i < RUN; i++) {
      const int total = lane * RUN + i < EXPERTS ? totals[lane * RUN + i] : 0;
      tiles += tiles_of(total);
      live += total;
      used += total > 0;
    }
    int all_tiles = tiles, all_live = live;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int t = __shfl_up_sync(~0u, all_tiles, o), l = __shfl_up_sync(~0u, all_live, o);
      if (lane >= o) { all_tiles += t; all_live += l; }
    }
    tiles = all_tiles - tiles;
    live = all_live - live;
#pragma unroll(RUN <= 8 ? RUN : 1)
    for (int i = 0; i < RUN; i++) {
      const int e = lane * RUN + i;
      if (e >= EXPERTS) break;
      first_tiles[e] = tiles;
      starts[e] = live;
      tiles += tiles_of(totals[e]);
      live += totals[e];
    }
    used = __reduce_add_sync(~0u, used);
    if (lane == 0 && used > 0 && experts_read) {
      atomicAdd(experts_read, (u64)used);
      atomicAdd(experts_read + 1, 1ull);
    }
    if (lane == 31) { first_tiles[EXPERTS] = all_tiles; starts[EXPERTS] = all_live; work[0] = all_tiles; }
  }
  __syncthreads();
  // Single places are written to shared memory, in which all are -1, and from there in order.
  const int all_places = first_tiles[EXPERTS] * tile;
  const bool fits = all_places <= STAGED;
  int* to = fits ? staged : slots;
#pragma unroll 1
  for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32) {
    const int first = first_tiles[e], last = first_tiles[e + 1];
#pragma unroll 1
    for (int i = first; i < last; i++) work[1 + i] = e * 2 + (last - first > 1);
  }
  if (!fits)
#pragma unroll 1
    for (int e = warp; e < EXPERTS; e += WARPS)
#pragma unroll 1
      for (int i = first_tiles[e] * tile + totals[e] + lane; i < first_tiles[e + 1] * tile; i += 32) slots[i] = -1;
#pragma unroll 1
  for (int at = begin; at < end; at += 32 * AT_ONCE) {
    if (!once) visit(at);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (found[i] >= 0) {
        const int place = places[i] + (once ? mine[found[i]] : 0);
        to[first_tiles[found[i]] * tile + place] = at + i * 32 + lane;
      }
  }
  if (!fits) return;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < all_places / 4; i += WARPS * 32) ((int4*)slots)[i] = ((const int4*)staged)[i];
}
