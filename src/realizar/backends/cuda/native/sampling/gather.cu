// The ids near the end of a truncation by mass or count, found by many blocks once the histogram names the bin in which
// the sum is reached. Where they and all ids before them are few, all of these are listed (WHOLE), and the rest is done
// on the list; else the ids of that bin alone (BIN), or those of the bins around the mean distance in which the sum of
// the nearest ids is reached (RING), and `sums` of tiles become those of the ids that stay in any case.

#define STAGED 2048  // ids of a block that are sent to the list together

// Grid: spans, sampled tokens. Block: 512 threads. cut_ids takes the list, and clears its size.
extern "C" __global__ void __launch_bounds__(512) gather_ids(const Tables* tables, const Sampled* tokens, int place) {
  begin();
  const Sampled c = tokens[blockIdx.y];
  if (!(c.flags & HISTOGRAM) || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  Near& near = t.near[c.index];
  const bool whole = near.extent == WHOLE, ring = near.extent == RING;
  if (!near.extent) return;
  const View v = view_of(t, c, t.rows[c.row].temperature);
  __shared__ u64 staged[STAGED];
  __shared__ int staged_size, base;
  if (threadIdx.x == 0) staged_size = 0;
  __syncthreads();
  const float start = near.first, end = near.end == BINS ? INF : (float)near.end, mean = near.mean;
  const float kept = near.kept, kept_end = near.kept_end;
  auto bin_at = [&](float distance) { return __fmul_rn(distance, BINS_PER_NAT); };
  u64* list = t.listed + (long)c.index * ROOM;
  const float* tops = (c.flags & ADJUST ? t.adjusted_tops : t.tops) + (long)c.index * t.tiles;
  u32 high[TILES] = {}, low[TILES] = {}, broken = 0;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int first = blockIdx.x * SPAN + tile * TILE;
    if (first >= t.vocab) break;
    broken |= (u32)(t.sums[(long)c.index * t.tiles + first / TILE] == UNUSABLE) << tile;
    if (bin_at(distance_of(v.top, tops[first / TILE], v.inverse)) >= end) continue;
    float part[TILE / 512];
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = first + i * 512 + threadIdx.x;
      part[i] = id < t.vocab ? v.x[id] : -INF;
    }
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const float distance = distance_of(v.top, part[i], v.inverse), bin = bin_at(distance);
      const bool inside = bin >= kept && bin < kept_end;
      if (bin >= start && bin < end && !inside && distance < FARTHEST) {
        const int id = first + i * 512 + threadIdx.x;
        const u64 found = ring ? place_of(__float_as_uint(apart(distance, mean)), id) : place_of(part[i], id);
        int at = atomicAdd(&staged_size, 1);
        if (at < STAGED) staged[at] = found;
        else if ((at = atomicAdd(&near.size, 1)) < ROOM) list[at] = found;
      }
      if (whole) continue;
      const Weight weight = weight_parts(inside ? distance : INF);
      high[tile] += weight.high, low[tile] += weight.low;
    }
  }
  __syncthreads();
  const int size = min(staged_size, STAGED);
  if (size && threadIdx.x == 0) base = atomicAdd(&near.size, size);
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += 512)
    if (base + i < ROOM) list[base + i] = staged[i];
  if (!whole) store_sums(t, c, high, low, broken);
}
