// The tiles of a step of few pairs, which each block lists for itself in shared memory, so that no kernel stands
// between the choice of experts and their weights.
// Defined around it: TOKENS (places of a tile) PAIRS (of a step, at the most). Before it: sort.cu.

constexpr int LISTED_TILES = EXPERTS + PAIRS / TOKENS;

// Tiles by expert, each expert's pairs in their order.
struct Lists {
  u32 tiles[LISTED_TILES];  // as an entry of `work` of route.cu, the first pair's place in `order` << 12, pairs << 22
  u16 order[PAIRS];
  int count;
  INLINE int entry(int tile) const { return tiles[tile] & 0xfff; }
  INLINE int pair(int tile, int place) const {
    const u32 listed = tiles[tile];
    return place < (int)(listed >> 22) ? order[(listed >> 12 & 0x3ff) + place] : -1;
  }
};

// By all threads of the block. chosen: [pairs], an expert each; what is below 0 or not below EXPERTS goes nowhere.
// experts_read: as of route.cu. scratch: shared memory that the copy engine writes only after this.
INLINE void make_lists(Lists& lists, const int* chosen, int pairs, u64* experts_read, int* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = (pairs + WARPS * 32 - 1) / (WARPS * 32) * 32, begin = warp * length;
  int *totals = scratch + WARPS * EXPERTS, *first_tiles = totals + EXPERTS, *starts = first_tiles + EXPERTS + 1;
  int* mine = scratch + warp * EXPERTS;
  RankedPairs own;
  if (warp < WARPS) {
    for (int e = lane; e < EXPERTS; e += 32) mine[e] = 0;
    __syncwarp();
    own = rank_pairs(chosen, begin, begin + length < pairs ? begin + length : pairs, mine);
  }
  __syncthreads();
  if (warp < WARPS) sum_warps(scratch, totals);
  __syncthreads();
  if (warp == 0) list_experts(totals, first_tiles, starts, &lists.count, experts_read, TOKENS);
  __syncthreads();
  if (warp < WARPS) {
    for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32) {
      const int first = first_tiles[e], last = first_tiles[e + 1];
      for (int i = first; i < last; i++) {
        const int before = (i - first) * TOKENS, left = totals[e] - before;
        const u32 place = starts[e] + before, live = left < TOKENS ? left : TOKENS;
        lists.tiles[i] = e * 2 + (last - first > 1) | place << 12 | live << 22;
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (own.experts[i] >= 0)
        lists.order[starts[own.experts[i]] + own.places[i] + mine[own.experts[i]]] = begin + i * 32 + lane;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}
