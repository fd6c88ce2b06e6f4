// What the sorts of pairs by expert share: a warp's count of its pairs, and the tiles of experts.
// Defined by the loader: WARPS (of a block that sort) EACH (pairs of a lane: each warp has a run of up to 32 times as
// many) EXPERTS EXPERT_BITS (of an expert's number). Before it: primitives.cu.

constexpr int RUN = (EXPERTS + 31) / 32;  // experts of a lane, where one warp has all

// A warp's pairs: each one's expert, or -1, and its place among those of the warp that go to the same one.
struct RankedPairs { int experts[EACH], places[EACH]; };

// Ranks the pairs from `begin` to `end` and counts them in `counts`, [EXPERTS] of this warp alone, which are zeros
// before. What is below 0 or not below EXPERTS goes nowhere.
INLINE RankedPairs rank_pairs(const int* chosen, int begin, int end, int* counts) {
  const int lane = threadIdx.x % 32;
  RankedPairs own;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int pair = begin + i * 32 + lane;
    int expert = -1;
    // What a kernel before the last may have written: never from a cache that its values may have missed.
    if (pair < end) asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(expert) : "l"(chosen + pair) : "memory");
    own.experts[i] = expert < EXPERTS ? expert : -1;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = own.experts[i];
    u32 same = __ballot_sync(~0u, expert >= 0);
    if (same == 0) continue;
#pragma unroll
    for (int b = 0; b < EXPERT_BITS; b++) {
      const u32 ones = __ballot_sync(~0u, expert >> b & 1);
      same &= expert >> b & 1 ? ones : ~ones;
    }
    const u32 before = same & ((1u << lane) - 1);
    if (expert >= 0) own.places[i] = counts[expert] + __popc(before);
    __syncwarp();
    if (expert >= 0 && before == 0) counts[expert] = own.places[i] + __popc(same);
    __syncwarp();
  }
  return own;
}

// Turns the block's counts, [WARPS][EXPERTS], into sums over the warps before; `totals`: those over all.
INLINE void sum_warps(int* counts, int* totals) {
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
}

// By one warp, of all `totals`: first_tiles and starts, [EXPERTS + 1] each, and the number of tiles. experts_read: as
// of the kernels.
INLINE void list_experts(const int* totals, int* first_tiles, int* starts, int* work, u64* experts_read, int tile) {
  const int lane = threadIdx.x % 32;
  const u32 inverse = ~0u / tile + 1;  // times 2^32, for numbers far below that
  const auto tiles_of = [&](int total) { return (int)__umulhi(total + tile - 1, inverse); };
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
