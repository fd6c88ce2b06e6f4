// Pairs of tokens and experts sorted by expert, by one block: a counting sort whose order is by pair within an expert,
// whatever the number of warps. Each warp counts a run of pairs in a row of its own, so no count is shared.
// Defined by the loader: WARPS (of the block) EXPERT_BITS (of an expert's number). Before it: primitives.cu.

// Pairs of a lane that are asked for together.
constexpr int AT_ONCE = 4;

// The expert of a pair, or -1.
INLINE int expert_of(const int* chosen, int pair, int pairs, int experts) {
  int expert = -1;
  if (pair < pairs) asm volatile("ld.global.s32 %0, [%1];" : "=r"(expert) : "l"(chosen + pair) : "memory");
  return expert < experts ? expert : -1;
}

// chosen: [pairs], an expert each; what is below 0 or not below `experts` goes nowhere. An expert's pairs fill whole
// tiles of `tile` places. slots: the pair of each place, -1 behind an expert's last. work: the number of tiles, then of
// each tile its expert times two, plus one where the expert has several. starts: [experts + 1], the first of an
// expert's pairs among all that go somewhere. experts_read: how many experts all sorts have found, and how many sorts;
// or null.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
route_pairs(
    const int* chosen, int* slots, int* work, int* starts, u64* experts_read, int pairs, int experts, int tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int* counts = (int*)ring;                       // [WARPS][experts], then a warp's next place within the expert
  int* totals = counts + WARPS * experts;         // [experts]
  int* first_tiles = totals + experts;            // [experts + 1]
  int* mine = counts + warp * experts;
  const int length = (pairs + WARPS * 32 - 1) / (WARPS * 32) * 32, begin = warp * length;
  const int end = begin + length < pairs ? begin + length : pairs;
  for (int e = lane; e < experts; e += 32) mine[e] = 0;
  __syncwarp();
  let_next_start();
  wait_for_previous();

  // Of a run of 32 * AT_ONCE pairs: each one's expert, and its place among those that `mine` counts.
  int found[AT_ONCE], places[AT_ONCE];
  auto visit = [&](int at) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) found[i] = expert_of(chosen, at + i * 32 + lane, end, experts);
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
  for (int at = begin; at < end; at += 32 * AT_ONCE) visit(at);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += WARPS * 32) {
    int values[WARPS], sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) values[w] = counts[w * experts + e];
#pragma unroll
    for (int w = 0; w < WARPS; w++) { counts[w * experts + e] = sum; sum += values[w]; }
    totals[e] = sum;
  }
  __syncthreads();
  if (warp == 0) {  // a lane has a run of experts
    const int run = (experts + 31) / 32, first = lane * run, last = first + run < experts ? first + run : experts;
    int tiles = 0, live = 0, used = 0;
    for (int e = first; e < last; e++) {
      tiles += (totals[e] + tile - 1) / tile;
      live += totals[e];
      used += totals[e] > 0;
    }
    int all_tiles = tiles, all_live = live;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int t = __shfl_up_sync(~0u, all_tiles, o), l = __shfl_up_sync(~0u, all_live, o);
      if (lane >= o) { all_tiles += t; all_live += l; }
    }
    tiles = all_tiles - tiles;
    live = all_live - live;
    for (int e = first; e < last; e++) {
      first_tiles[e] = tiles;
      starts[e] = live;
      tiles += (totals[e] + tile - 1) / tile;
      live += totals[e];
    }
    used = __reduce_add_sync(~0u, used);
    if (lane == 0 && used > 0 && experts_read) {
      atomicAdd(experts_read, (u64)used);
      atomicAdd(experts_read + 1, 1ull);
    }
    if (lane == 31) { first_tiles[experts] = all_tiles; starts[experts] = all_live; work[0] = all_tiles; }
  }
  __syncthreads();
  for (int e = warp; e < experts; e += WARPS) {
    const int first = first_tiles[e], last = first_tiles[e + 1];
    for (int i = first + lane; i < last; i += 32) work[1 + i] = e * 2 + (last - first > 1);
    for (int i = first * tile + totals[e] + lane; i < last * tile; i += 32) slots[i] = -1;
  }
  for (int at = begin; at < end; at += 32 * AT_ONCE) {
    if (!once) visit(at);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (found[i] >= 0) {
        const int place = places[i] + (once ? mine[found[i]] : 0);
        slots[first_tiles[found[i]] * tile + place] = at + i * 32 + lane;
      }
  }
}
