// Passes of many blocks over the vocabulary: weights of tiles, and histograms of weights by distance from the top.

// Grid: spans, choices. Block: 512 threads. Writes `sums` of tiles; adds to `weights` and `counts` of bins, which
// cut_ids clears.
extern "C" __global__ void __launch_bounds__(512) weigh_ids(const Tables* tables, const Choice* choices, int place) {
  begin();
  const Choice c = choices[blockIdx.y];
  if (!(c.flags & DRAW) || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  const View v = view_of(t, c, t.rows[c.row].temperature);
  if (!finite(v.top)) return;
  __shared__ u64 room[33];
  __shared__ u32 low[BINS], high[BINS], number[BINS];
  const bool bins = c.flags & HISTOGRAM, counts = t.rows[c.row].top_k > 0;
  if (bins)
    for (int b = threadIdx.x; b < BINS; b += 512) low[b] = high[b] = number[b] = 0;
  __syncthreads();
  for (int tile = 0; tile < SPAN / TILE; tile++) {
    const int first = blockIdx.x * SPAN + tile * TILE;
    if (first >= t.vocab) break;
    float part[TILE / 512];
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = first + i * 512 + threadIdx.x;
      part[i] = id < t.vocab ? v.x[id] : -INF;
    }
    u64 sum = 0;
    float distances = 0.f, square_sum = 0.f;
    int allowed = 0;
    bool broken = false;
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const float away = v.top - part[i], distance = distance_of(v.top, part[i], v.inverse);
      const u64 weight = weight_of(distance);
      broken |= !(away >= 0.f);
      sum += weight;
      if (bins && weight) {
        const int b = bin_of(distance);
        const u32 added = (u32)weight, before = atomicAdd(low + b, added);
        const u32 carry = (u32)(weight >> 32) + (before + added < before);
        if (carry) atomicAdd(high + b, carry);
        if (counts) atomicAdd(number + b, 1u);
      }
      if (c.flags & DEVIATION && away < INF) distances += away, square_sum += away * away, allowed++;
    }
    const bool any_broken = __syncthreads_or(broken);
    sum = block_sum(sum, room);
    const long at = (long)c.index * t.tiles + first / TILE;
    if (threadIdx.x == 0) t.sums[at] = any_broken ? UNUSABLE : sum;
    if (c.flags & DEVIATION) {  // always added in the same order
      __shared__ double moments[3][16];
      double m[3] = {distances, square_sum, (double)allowed};
      for (int i = 0; i < 3; i++) {
        for (int o = 16; o; o >>= 1) m[i] += __shfl_xor_sync(~0u, m[i], o);
        if (threadIdx.x % 32 == 0) moments[i][threadIdx.x / 32] = m[i];
      }
      __syncthreads();
      if (threadIdx.x < 3) {
        double total = 0.0;
        for (int w = 0; w < 16; w++) total += moments[threadIdx.x][w];
        t.moments[at * 3 + threadIdx.x] = total;
      }
      __syncthreads();
    }
  }
  if (!bins) return;
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += 512)
    if (low[b] | high[b]) {
      atomicAdd(t.weights + (long)c.index * BINS + b, (u64)high[b] << 32 | low[b]);
      if (counts) atomicAdd(t.counts + (long)c.index * BINS + b, number[b]);
    }
}

// `sums` of tiles again, of the ids that cut_ids left. Grid: spans, choices. Block: 512 threads.
extern "C" __global__ void __launch_bounds__(512) weigh_left(const Tables* tables, const Choice* choices, int place) {
  begin();
  const Choice c = choices[blockIdx.y];
  if (!(c.flags & CUT) || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  const View v = view_of(t, c, t.rows[c.row].temperature);
  if (!finite(v.top)) return;
  __shared__ u64 room[33];
  const Cut cut = t.cuts[c.index];
  const float least = cut.high == ~0ull ? -INF : logit_of(cut.high >> 32);
  const float* tops = (c.flags & ADJUST ? t.adjusted_tops : t.tops) + (long)c.index * t.tiles;
  for (int tile = 0; tile < SPAN / TILE; tile++) {
    const int first = blockIdx.x * SPAN + tile * TILE;
    if (first >= t.vocab) break;
    u64* at = t.sums + (long)c.index * t.tiles + first / TILE;
    u64 sum = 0;
    if (tops[first / TILE] >= least) {
      float part[TILE / 512];
#pragma unroll
      for (int i = 0; i < TILE / 512; i++) {
        const int id = first + i * 512 + threadIdx.x;
        part[i] = id < t.vocab ? v.x[id] : -INF;
      }
#pragma unroll
      for (int i = 0; i < TILE / 512; i++) {
        if (part[i] < least) continue;
        const float distance = distance_of(v.top, part[i], v.inverse);
        if (stays(cut, part[i], distance, first + i * 512 + threadIdx.x)) sum += weight_of(distance);
      }
      sum = block_sum(sum, room);
    }
    if (threadIdx.x == 0 && *at != UNUSABLE) *at = sum;
  }
}

// Log-probabilities: weights at temperature 1, larger logits than the target's, counts of bins. Grid: spans, queries.
extern "C" __global__ void __launch_bounds__(512) survey_ids(const Tables* tables, const Query* queries) {
  begin();
  const Query q = queries[blockIdx.y];
  const Tables& t = *tables;
  const long tops = (long)q.slot * t.tiles;
  const u64 best = best_of(t.tops + tops, t.top_ids + tops, t.tiles);
  const float top = logit_of(best >> 32);
  const float* x = t.logits + (long)q.slot * t.vocab;
  const int target = min(max(q.target < 0 ? t.choices[q.slot] : q.target, 0), t.vocab - 1);
  const u64 wanted = place_of(x[target], target);
  __shared__ u64 room[33];
  __shared__ u32 number[BINS];
  for (int b = threadIdx.x; b < BINS; b += 512) number[b] = 0;
  __syncthreads();
  u64 sum = 0, before = 0;
  bool broken = false;
  const int first = blockIdx.x * SPAN;
  for (int start = first; start < first + SPAN; start += TILE) {
    float part[TILE / 512];
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = start + i * 512 + threadIdx.x;
      part[i] = id < t.vocab ? x[id] : -INF;
    }
#pragma unroll
    for (int i = 0; i < TILE / 512; i++) {
      const int id = start + i * 512 + threadIdx.x;
      if (id >= t.vocab) continue;
      const float away = top - part[i];
      broken |= !(away >= 0.f);
      sum += weight_of(away);
      before += place_of(part[i], id) < wanted;
      if (q.top_n) atomicAdd(number + bin_of(fminf(away, FARTHEST)), 1u);
    }
  }
  const bool any_broken = __syncthreads_or(broken);
  sum = block_sum(sum, room);
  before = block_sum(before, room);
  const long at = (long)blockIdx.y * t.spans + blockIdx.x;
  if (threadIdx.x == 0) t.query_sums[at] = any_broken ? UNUSABLE : sum, t.query_ranks[at] = (u32)before;
  if (q.top_n)
    for (int b = threadIdx.x; b < BINS; b += 512)
      if (number[b]) atomicAdd(t.query_counts + (long)blockIdx.y * BINS + b, number[b]);
}
