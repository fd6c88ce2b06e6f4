// Pairs of tokens and experts sorted by expert, by one block: a counting sort whose order is by pair within an expert,
// whatever the number of warps. Each warp counts a run of pairs in a row of its own, so no count is shared.
// Defined by the loader: what sort.cu asks for, and STAGED (places that shared memory has room for, a multiple of 4).

// chosen: [pairs], an expert each; what is below 0 or not below EXPERTS goes nowhere. pairs: at most as many as the
// block's warps have. An expert's pairs fill whole tiles of `tile` places, a multiple of 4. slots: the pair of each
// place, -1 behind an expert's last. work: the number of tiles, then of each tile its expert times two, plus one where
// the expert has several. starts: [EXPERTS + 1], the first of an expert's pairs among all that go somewhere.
// experts_read: how many experts all sorts have found, and how many sorts; or null.
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
  for (int e = lane; e < EXPERTS; e += 32) mine[e] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < STAGED / 4; i += WARPS * 32) ((int4*)staged)[i] = make_int4(-1, -1, -1, -1);
  __syncwarp();
  let_next_start();
  wait_for_previous();

  const RankedPairs own = rank_pairs(chosen, begin, end, mine);
  __syncthreads();
  sum_warps(counts, totals);
  __syncthreads();
  if (warp == 0) list_experts(totals, first_tiles, starts, work, experts_read, tile);
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
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (own.experts[i] >= 0)
      to[first_tiles[own.experts[i]] * tile + own.places[i] + mine[own.experts[i]]] = begin + i * 32 + lane;
  if (!fits) return;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < all_places / 4; i += WARPS * 32) ((int4*)slots)[i] = ((const int4*)staged)[i];
}
