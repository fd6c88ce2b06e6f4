// The sort of route.cu by many blocks, in two launches: one counts, whose last block sums over blocks and lists the
// tiles, and one places, which counts again. Blocks and warps have runs of pairs in their order, so slots are those of
// one block.
// Defined by the loader: what sort.cu asks for, NAME, and PLACES (0 for the launch that counts, 1 for the other).

// sums: [blocks + 1][EXPERTS], of each block, then over the blocks before it, and in the last row experts' first tiles,
// one more than EXPERTS. arrivals: 0 before and after. The rest: as of route.cu.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
NAME(const int* chosen, int* slots, int* work, int* starts, u64* experts_read, int* sums, int* arrivals, int pairs,
     int tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int* counts = (int*)ring;                // [WARPS][EXPERTS]
  int* totals = counts + WARPS * EXPERTS;  // [EXPERTS]
  int* first_tiles = totals + EXPERTS;     // [EXPERTS + 1]
  int* mine = counts + warp * EXPERTS;
  int* kept_tiles = sums + gridDim.x * EXPERTS;
  const int begin = (blockIdx.x * WARPS + warp) * 32 * EACH;
  for (int e = lane; e < EXPERTS; e += 32) mine[e] = 0;
  __syncwarp();
  let_next_start();
  wait_for_previous();

  const RankedPairs own = rank_pairs(chosen, begin, pairs, mine);
  __syncthreads();
  sum_warps(counts, totals);
  if constexpr (PLACES) {
    for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32)
      first_tiles[e] = __ldcg(kept_tiles + e) * tile + __ldcg(sums + blockIdx.x * EXPERTS + e);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (own.experts[i] >= 0)
        slots[first_tiles[own.experts[i]] + own.places[i] + mine[own.experts[i]]] = begin + i * 32 + lane;
#pragma unroll 1
    for (int e = blockIdx.x * WARPS + warp; e < EXPERTS; e += gridDim.x * WARPS) {
      const int first = __ldcg(kept_tiles + e), last = __ldcg(kept_tiles + e + 1);
      const int live = __ldcg(starts + e + 1) - __ldcg(starts + e);
      for (int i = first + lane; i < last; i += 32) work[1 + i] = e * 2 + (last - first > 1);
      for (int i = first * tile + live + lane; i < last * tile; i += 32) slots[i] = -1;
    }
  } else {
    __shared__ int arrived;
    for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32) sums[blockIdx.x * EXPERTS + e] = totals[e];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrived = atomicAdd(arrivals, 1);
    __syncthreads();
    if (arrived + 1 < (int)gridDim.x) return;
    __threadfence();
    constexpr int TOGETHER = 8;  // sums of an expert that are asked for together
    for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32) {
      int sum = 0;
#pragma unroll 1
      for (int first = 0; first < (int)gridDim.x; first += TOGETHER) {
        int each[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
          each[i] = first + i < (int)gridDim.x ? __ldcg(sums + (first + i) * EXPERTS + e) : 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
          if (first + i < (int)gridDim.x) sums[(first + i) * EXPERTS + e] = sum;
          sum += each[i];
        }
      }
      totals[e] = sum;
    }
    __syncthreads();
    if (warp == 0) list_experts(totals, kept_tiles, starts, work, experts_read, tile);
    if (threadIdx.x == 0) *arrivals = 0;
  }
}
