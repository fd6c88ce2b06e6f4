// Passes of many blocks over the vocabulary: weights of tiles, and histograms of weights by distance from the top.

// Sums of a span's tiles, of weights as each thread has them, by 512 threads; `broken` has a bit for each tile.
INLINE void store_sums(const Tables& t, const Sampled& c, const u32* high, const u32* low, u32 broken) {
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

// What find_bin has of a row's histogram: a thread's bins, weights and ids in them and before them.
constexpr int EACH_BIN = BINS / 512;
struct Bins { u64 mass[EACH_BIN], mass_before, total; u32 number[EACH_BIN], number_before; };

INLINE Bins read_bins(const Tables& t, const Sampled& c, u64* room) {
  __shared__ u64 total;
  Bins h{};
  const long at = (long)c.index * BINS + threadIdx.x * EACH_BIN;
#pragma unroll
  for (int i = 0; i < EACH_BIN; i++) {
    h.mass[i] = __ldcg(t.weights + at + i), h.number[i] = __ldcg(t.counts + at + i);
    h.mass_before += h.mass[i], h.number_before += h.number[i];
  }
  const u64 own = h.mass_before;
  h.mass_before = block_scan(own, room), h.number_before = (u32)block_scan(h.number_before, room);
  if (threadIdx.x == 511) total = h.mass_before + own;
  __syncthreads();
  h.total = total;
  return h;
}

// Find the bin in which a row's histogram reaches what its first truncation leaves; by the last of its blocks.
INLINE void find_bin(const Sampled& c, const Row& row, bool by_count, const Bins& h, Near& near) {
  const u64 target = by_count ? row.top_k : share_of(row.top_p, h.total);
  u64 mass = h.mass_before;
  u32 number = h.number_before;
#pragma unroll
  for (int i = 0; i < EACH_BIN; i++) {
    const u64 before = by_count ? number : mass, through = before + (by_count ? h.number[i] : h.mass[i]);
    mass += h.mass[i], number += h.number[i];
    if (before < target && target <= through) {
      const int bin = threadIdx.x * EACH_BIN + i;
      const bool whole = number <= ROOM;
      near.first = whole ? 0 : bin, near.end = bin + 1;
      near.kept = 0, near.kept_end = whole ? 0 : bin;
      near.extent = whole ? WHOLE : BIN;
    }
  }
}

// The first of the places of `sums`, u64 [BINS], at which their sum reaches a target, in `found`; by 512 threads.
INLINE void find_reached(const u64* sums, u64 target, int* found, u64* room) {
  u64 own = 0;
#pragma unroll
  for (int i = 0; i < EACH_BIN; i++) own += sums[threadIdx.x * EACH_BIN + i];
  u64 sum = block_scan(own, room);
#pragma unroll
  for (int i = 0; i < EACH_BIN; i++) {
    const u64 before = sum;
    sum += sums[threadIdx.x * EACH_BIN + i];
    if (before < target && target <= sum) *found = threadIdx.x * EACH_BIN + i;
  }
}

// Find the bins in which the ids nearest to the mean distance, all others of which are as far or farther, reach a
// row's share: with radii of whole bins, the largest that can't reach it with all bins that it touches, and the least
// that reaches it with the bins inside. Ids of bins inside the former stay, and the last that stays is in a bin that
// the latter touches. `sums` is u64 [2 * BINS] in shared memory. Nothing is found for ids beyond the last bin.
INLINE void find_ring(const Row& row, const Bins& h, float mean, Near& near, u64* sums, u64* room) {
  const float middle = __fmul_rn(mean, BINS_PER_NAT), doubt = 0.01f;  // more than a distance is wrong by, in bins
  if (!(middle < BINS - 2.f)) return;
  __shared__ int reached[2], bounds[4];
  for (int b = threadIdx.x; b < 2 * BINS; b += 512) sums[b] = 0;
  if (threadIdx.x < 2) reached[threadIdx.x] = -1;
  if (threadIdx.x < 4) bounds[threadIdx.x] = threadIdx.x % 2 ? 0 : BINS;
  __syncthreads();
  int touching[EACH_BIN], inside[EACH_BIN];  // the least radius that touches each bin, and that has all of it
#pragma unroll
  for (int i = 0; i < EACH_BIN; i++) {
    const int bin = threadIdx.x * EACH_BIN + i;
    const float left = bin - middle, right = left + 1.f;
    const float nearest = left > 0.f ? left : right < 0.f ? -right : 0.f, farthest = fmaxf(-left, right);
    touching[i] = (int)ceilf(fmaxf(nearest - doubt, 0.f));
    inside[i] = bin == BINS - 1 ? BINS : min(BINS, (int)ceilf(farthest + doubt));
    if (!h.mass[i]) continue;
    if (inside[i] < BINS) add_shared(sums + inside[i], h.mass[i]);
    if (touching[i] < BINS) add_shared(sums + BINS + touching[i], h.mass[i]);
  }
  __syncthreads();
  const u64 target = share_of(row.typical_p, h.total);
  find_reached(sums, target, reached, room);
  find_reached(sums + BINS, target, reached + 1, room);
  __syncthreads();
  if (reached[0] < 0 || reached[1] < 0) return;
#pragma unroll
  for (int i = 0; i < EACH_BIN; i++) {
    const int bin = threadIdx.x * EACH_BIN + i;
    if (touching[i] <= reached[0]) atomicMin(bounds, bin), atomicMax(bounds + 1, bin + 1);
    if (inside[i] < reached[1]) atomicMin(bounds + 2, bin), atomicMax(bounds + 3, bin + 1);
  }
  __syncthreads();
  if (threadIdx.x) return;
  near.first = bounds[0], near.end = bounds[1];
  near.kept = bounds[3] ? bounds[2] : 0, near.kept_end = bounds[3];
  near.mean = mean, near.extent = RING;
}

// Weight times distance, which has the mean distance after a division by the weight of all.
INLINE u64 moment_of(float distance) {
  return distance < FARTHEST ? (u64)(expf(-distance) * distance * 1099511627776.f) : 0;
}
INLINE float mean_of(u64 moment, u64 mass) { return (float)((double)moment / (double)mass); }

// A span's sum of `moment_of`, in the room of the moments of its first tile, which rows with DEVIATION alone use.
INLINE u64* moment_at(const Tables& t, const Sampled& c, int span) {
  return (u64*)t.moments + ((long)c.index * t.tiles + (long)span * TILES) * 3;
}
// True for a row whose first truncation is typical: the last of its blocks finds a ring.
INLINE bool is_typical(const Tables& t, const Sampled& c, const Row& row) {
  return row.typical_p < 1.0 && !(c.flags & DEVIATION) && !(row.top_k > 0 && row.top_k < t.vocab);
}

// Name the bins that gather_ids reads, for a row whose histogram is complete; by the last of its blocks.
INLINE void find_near(const Tables& t, const Sampled& c, const Row& row, u64* sums, u64* room) {
  const bool by_count = row.top_k > 0 && row.top_k < t.vocab, typical = is_typical(t, c, row);
  if (c.flags & DEVIATION || (row.typical_p < 1.0 && !typical)) return;
  if (!typical && !by_count && row.top_p >= 1.0) return;
  const Bins h = read_bins(t, c, room);
  Near& near = t.near[c.index];
  if (!typical) {
    find_bin(c, row, by_count, h, near);
    return;
  }
  u64 moment = threadIdx.x < t.spans ? __ldcg(moment_at(t, c, threadIdx.x)) : 0;
  moment = block_sum(moment, room);
  find_ring(row, h, mean_of(moment, h.total), near, sums, room);
}

#if !CUTS
// Grid: spans, sampled tokens. Block: 512 threads. Writes `sums` of tiles; adds to `weights` and `counts` of bins,
// which cut_ids clears; finds the bins that gather_ids reads.
extern "C" __global__ void __launch_bounds__(512) weigh_ids(const Tables* tables, const Sampled* tokens, int place) {
  begin();
  const Sampled c = tokens[blockIdx.y];
  if (!(c.flags & DRAW) || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  const Row& row = t.rows[c.row];
  const View v = view_of(t, c, row.temperature);
  if (!finite(v.top)) return;
  __shared__ u64 memory[2 * BINS];  // the sums of find_ring when those of bins are no longer needed
  __shared__ u64 room[33];
  u32 *const mass_low = (u32*)memory, *const mass_high = mass_low + BINS, *const number = mass_high + BINS;
  const bool bins = c.flags & HISTOGRAM, typical = bins && is_typical(t, c, row);
  if (bins)
    for (int b = threadIdx.x; b < BINS; b += 512) mass_low[b] = mass_high[b] = number[b] = 0;
  __syncthreads();
  u32 high[TILES] = {}, low[TILES] = {}, broken = 0;
  u64 moment = 0;
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
      if (typical) moment += moment_of(distance);
      if (c.flags & DEVIATION && away < INF) distances += away, square_sum += away * away, allowed++;
    }
    if (c.flags & DEVIATION) store_moments(t, (long)c.index * t.tiles + first / TILE, distances, square_sum, allowed);
  }
  store_sums(t, c, high, low, broken);  // with a barrier after the last bin
  if (!bins) return;
  if (typical) {
    moment = block_sum(moment, room);
    if (threadIdx.x == 0) *moment_at(t, c, blockIdx.x) = moment;
  }
  for (int b = threadIdx.x; b < BINS; b += 512)
    if (number[b]) {
      atomicAdd(t.weights + (long)c.index * BINS + b, (u64)mass_high[b] << 32 | mass_low[b]);
      atomicAdd(t.counts + (long)c.index * BINS + b, number[b]);
    }
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&t.near[c.index].arrivals, 1) == gridDim.x - 1;
  __syncthreads();
  if (last) find_near(t, c, row, memory, room);
}

// `sums` of tiles again, of the ids that cut_ids left. Grid: spans, sampled tokens. Block: 512 threads.
extern "C" __global__ void __launch_bounds__(512) weigh_left(const Tables* tables, const Sampled* tokens, int place) {
  begin();
  const Sampled c = tokens[blockIdx.y];
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
#endif

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

#if !CUTS
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
  const int target = min(max(q.target < 0 ? t.sampled[q.slot] : q.target, 0), t.vocab - 1);
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
#endif
