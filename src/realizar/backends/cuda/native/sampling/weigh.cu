// Passes of many blocks over the vocabulary: weights of tiles, and histograms of weights by distance from the top.

// Sums of a span's tiles, of weights as each thread has them, by 512 threads; `broken` has a bit for each tile.
INLINE void store_sums(const Tables& t, const Choice& c, const u32* high, const u32* low, u32 broken) {
  __shared__ u64 warps[16][TILES];
  __shared__ u32 marks[16];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const u64 sum = ((u64)__reduce_add_sync(~0u, high[tile]) << 20) + __reduce_add_sync(~0u, low[tile]);
    if (lane == 0) warps[warp][tile] = sum;
  }
  broken = __reduce_or_sync(~0u, broken);
  if (lane == 0) marks[warp] = broken;
  __syncthreads();
  if (warp) return;
  const int tile = lane % TILES, first = blockIdx.x * SPAN + tile * TILE;
  u64 sum = 0;
  for (int w = lane / TILES; w < 16; w += 32 / TILES) sum += warps[w][tile];
  for (int o = TILES; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
  broken = __reduce_or_sync(~0u, lane < 16 ? marks[lane] : 0);
  if (lane < TILES && first < t.vocab)
    t.sums[(long)c.index * t.tiles + first / TILE] = broken >> tile & 1 ? UNUSABLE : sum;
}

// Sum of a tile's logits' distances from the largest, of their squares, and their number; always in the same order.
INLINE void store_moments(const Tables& t, long tile, float distances, float square_sum, int allowed) {
  __shared__ double moments[3][16];
  double m[3] = {distances, square_sum, (double)allowed};
  __syncthreads();
  for (int i = 0; i < 3; i++) {
    for (int o = 16; o; o >>= 1) m[i] += __shfl_xor_sync(~0u, m[i], o);
    if (threadIdx.x % 32 == 0) moments[i][threadIdx.x / 32] = m[i];
  }
  __syncthreads();
  if (threadIdx.x < 3) {
    double total = 0.0;
    for (int w = 0; w < 16; w++) total += moments[threadIdx.x][w];
    t.moments[tile * 3 + threadIdx.x] = total;
  }
}

// Find the bin in which a row's histogram reaches what its first truncation leaves; by the last of its blocks.
INLINE void find_bin(const Tables& t, const Choice& c, const Row& row, u64* room) {
  const bool counts = row.top_k > 0 && row.top_k < t.vocab;
  if (row.typical_p < 1.0 || row.top_n_sigma > 0.0 || (!counts && row.top_p >= 1.0)) return;
  constexpr int EACH = BINS / 512;
  __shared__ u64 total;
  const long at = (long)c.index * BINS + threadIdx.x * EACH;
  u64 mass[EACH], mass_before = 0;
  u32 number[EACH], number_before = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    mass[i] = __ldcg(t.weights + at + i), number[i] = __ldcg(t.counts + at + i);
    mass_before += mass[i], number_before += number[i];
  }
  const u64 own = mass_before;
  mass_before = block_scan(mass_before, room), number_before = (u32)block_scan(number_before, room);
  if (threadIdx.x == 511) total = mass_before + own;
  __syncthreads();
  const u64 target = counts ? row.top_k : share_of(row.top_p, total);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u64 before = counts ? number_before : mass_before, through = before + (counts ? number[i] : mass[i]);
    mass_before += mass[i], number_before += number[i];
    if (before < target && target <= through) {
      t.near[c.index].bin = threadIdx.x * EACH + i;
      t.near[c.index].extent = number_before <= ROOM ? WHOLE : BIN;
    }
  }
}

// Grid: spans, choices. Block: 512 threads. Writes `sums` of tiles; adds to `weights` and `counts` of bins, which
// cut_ids clears; finds the bin that gather_ids reads.
extern "C" __global__ void __launch_bounds__(512) weigh_ids(const Tables* tables, const Choice* choices, int place) {
  begin();
  const Choice c = choices[blockIdx.y];
  if (!(c.flags & DRAW) || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  const View v = view_of(t, c, t.rows[c.row].temperature);
  if (!finite(v.top)) return;
  __shared__ u32 mass_low[BINS], mass_high[BINS], number[BINS];
  const bool bins = c.flags & HISTOGRAM;
  if (bins)
    for (int b = threadIdx.x; b < BINS; b += 512) mass_low[b] = mass_high[b] = number[b] = 0;
  __syncthreads();
  u32 high[TILES] = {}, low[TILES] = {}, broken = 0;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int first = blockIdx.x * SPAN + tile * TILE;
    if (first >= t.vocab) break;
    float part[TILE / 512];
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = first + i * 512 + threadIdx.x;
      part[i] = id < t.vocab ? v.x[id] : -INF;
    }
    float distances = 0.f, square_sum = 0.f;
    int allowed = 0;
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const float away = v.top - part[i], distance = distance_of(v.top, part[i], v.inverse);
      const Weight weight = weight_parts(distance);
      broken |= (u32)!(away >= 0.f) << tile;
      high[tile] += weight.high, low[tile] += weight.low;
      if (bins && distance < FARTHEST) {
        const int b = bin_of(distance);
        const u32 added = weight.high << 20 | weight.low, before = atomicAdd(mass_low + b, added);
        const u32 carry = (weight.high >> 12) + (before + added < before);
        if (carry) atomicAdd(mass_high + b, carry);
        atomicAdd(number + b, 1u);
      }
      if (c.flags & DEVIATION && away < INF) distances += away, square_sum += away * away, allowed++;
    }
    if (c.flags & DEVIATION) store_moments(t, (long)c.index * t.tiles + first / TILE, distances, square_sum, allowed);
  }
  store_sums(t, c, high, low, broken);  // with a barrier after the last bin
  if (!bins) return;
  for (int b = threadIdx.x; b < BINS; b += 512)
    if (number[b]) {
      atomicAdd(t.weights + (long)c.index * BINS + b, (u64)mass_high[b] << 32 | mass_low[b]);
      atomicAdd(t.counts + (long)c.index * BINS + b, number[b]);
    }
  __shared__ bool last;
  __shared__ u64 room[33];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&t.near[c.index].arrivals, 1) == gridDim.x - 1;
  __syncthreads();
  if (last) find_bin(t, c, t.rows[c.row], room);
}

// `sums` of tiles again, of the ids that cut_ids left. Grid: spans, choices. Block: 512 threads.
extern "C" __global__ void __launch_bounds__(512) weigh_left(const Tables* tables, const Choice* choices, int place) {
  begin();
  const Choice c = choices[blockIdx.y];
  if (!(c.flags & CUT) || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  const View v = view_of(t, c, t.rows[c.row].temperature);
  if (!finite(v.top)) return;
  const Cut cut = t.cuts[c.index];
  if (cut.summed) return;
  const bool prefix = !cut.low && cut.typical == ~0ull;
  const float least = cut.high == ~0ull ? -INF : logit_of(cut.high >> 32);
  const float* tops = (c.flags & ADJUST ? t.adjusted_tops : t.tops) + (long)c.index * t.tiles;
  u32 high[TILES] = {}, low[TILES] = {}, broken = 0;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int first = blockIdx.x * SPAN + tile * TILE;
    if (first >= t.vocab) break;
    broken |= (u32)(t.sums[(long)c.index * t.tiles + first / TILE] == UNUSABLE) << tile;
    if (tops[first / TILE] < least) continue;
    float part[TILE / 512];
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = first + i * 512 + threadIdx.x;
      part[i] = id < t.vocab ? v.x[id] : -INF;
    }
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = first + i * 512 + threadIdx.x;
      const float distance = distance_of(v.top, part[i], v.inverse);
      const bool kept = prefix ? part[i] > least || (part[i] == least && (u32)id <= (u32)cut.high)
                               : part[i] >= least && stays(cut, part[i], distance, id);
      const Weight weight = weight_parts(kept ? distance : INF);
      high[tile] += weight.high, low[tile] += weight.low;
    }
  }
  store_sums(t, c, high, low, broken);
}

// The place of the `count`-th best of all tiles' largest logits: no id behind it is among the `count` best of all.
// 0 for a count of 0, and where there are fewer tiles. By all threads of a block.
INLINE u64 bound_of(const float* tops, const int* ids, int tiles, int count) {
  __shared__ u64 places[MOST_TILES];
  __shared__ u64 bound;
  if (count < 1 || count > tiles || tiles > MOST_TILES) return 0;
  const int i = threadIdx.x;
  if (i < tiles) places[i] = place_of(tops[i], ids[i]);
  __syncthreads();
  if (i < tiles) {
    int before = 0;
    for (int other = 0; other < tiles; other++) before += places[other] < places[i];
    if (before == count - 1) bound = places[i];
  }
  __syncthreads();
  return bound;
}

// Log-probabilities: weights at temperature 1, larger logits than the target's, and the ids that may be among the most
// probable ones, which report_logprobs takes. Grid: spans, queries.
extern "C" __global__ void __launch_bounds__(512) survey_ids(const Tables* tables, const Query* queries) {
  begin();
  const Query q = queries[blockIdx.y];
  if (q.slot < 0) return;
  const Tables& t = *tables;
  const float* tops = t.tops + (long)q.slot * t.tiles;
  const int* top_ids = t.top_ids + (long)q.slot * t.tiles;
  const float top = logit_of(best_of(tops, top_ids, t.tiles) >> 32);
  const float* x = t.logits + (long)q.slot * t.vocab;
  const int target = min(max(q.target < 0 ? t.choices[q.slot] : q.target, 0), t.vocab - 1);
  const float wanted = x[target];
  const u64 bound = bound_of(tops, top_ids, t.tiles, q.top_n);
  const float least = bound ? logit_of(bound >> 32) : INF;
  u32 high = 0, low = 0, before = 0;
  bool broken = false;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int start = blockIdx.x * SPAN + tile * TILE;
    if (start >= t.vocab) break;
    float part[TILE / 512];
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = start + i * 512 + threadIdx.x;
      part[i] = id < t.vocab ? x[id] : -INF;
    }
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = start + i * 512 + threadIdx.x;
      const float away = top - part[i];
      const Weight weight = weight_parts(away);
      broken |= !(away >= 0.f);
      high += weight.high, low += weight.low;
      before += part[i] > wanted || (part[i] == wanted && id < target);
      if (part[i] >= least && id < t.vocab && place_of(part[i], id) <= bound) {
        const u32 at = atomicAdd(t.query_counts + blockIdx.y, 1u);
        if (at < ROOM) t.listed[(long)blockIdx.y * ROOM + at] = place_of(part[i], id);
      }
    }
  }
  __shared__ u32 warps[3][16];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  high = __reduce_add_sync(~0u, high), low = __reduce_add_sync(~0u, low), before = __reduce_add_sync(~0u, before);
  if (lane == 0) warps[0][warp] = high, warps[1][warp] = low, warps[2][warp] = before;
  const bool any_broken = __syncthreads_or(broken);
  if (warp) return;
  const u64 sum = warp_sum(lane < 16 ? ((u64)warps[0][lane] << 20) + warps[1][lane] : 0);
  before = __reduce_add_sync(~0u, lane < 16 ? warps[2][lane] : 0);
  const long at = (long)blockIdx.y * t.spans + blockIdx.x;
  if (lane == 0) t.query_sums[at] = any_broken ? UNUSABLE : sum, t.query_ranks[at] = before;
}
