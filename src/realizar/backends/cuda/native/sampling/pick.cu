// The sampling itself: the first id whose cumulated share of the weight, in the order of ids, exceeds the row's number.
// And what a row keeps of it: its last token, counts, mirostat's number, DRY's match lengths.

// Sampled tokens that stand, from `first` on: up to the first that is not the draft at its place.
INLINE int standing(const int* sampled, const int* ids, const Drafted& d) {
  int n = 0;
  while (n < d.drafts && ids[d.draft_token + n] >= 0 && sampled[d.first + n] == ids[d.draft_token + n]) n++;
  return n + 1;
}

INLINE int settle(const Tables& t, const Drafted& d) {
  const Row& row = t.rows[d.row];
  const int count = standing(t.sampled, t.token_ids, d);
  t.last[d.row] = max(t.sampled[d.first + count - 1], 0);
  if (row.counts)
    for (int n = 0; n < count; n++)
      if (t.sampled[d.first + n] >= 0) atomicAdd(row.counts + t.sampled[d.first + n], 1u);
  if (row.mirostat && t.sampled[d.first + count - 1] >= 0) t.mu[d.row] = t.next_mu[d.first + count - 1];
  return count;
}

INLINE int draw(const Tables& t, const Sampled& c, const Row& row, const View& v, u64* sums, u64* room) {
  __shared__ int found_tile, found_id;
  __shared__ u64 before_tile, all, found_weight;
  for (int i = threadIdx.x; i < t.tiles; i += blockDim.x) sums[i] = t.sums[(long)c.index * t.tiles + i];
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 total = 0, cumulated = 0;
    bool broken = false;
    for (int i = 0; i < t.tiles; i++) broken |= sums[i] == UNUSABLE, total += sums[i];
    const u64 number = uniform24(row.seed, row.choice, c.position, 0);
    const u64 target = __umul64hi(number, total) << 40 | number * total >> 24;
    int tile = 0;
    while (tile < t.tiles - 1 && cumulated + sums[tile] <= target) cumulated += sums[tile++];
    found_tile = broken || !total ? -1 : tile;
    before_tile = target - cumulated, all = total;
  }
  __syncthreads();
  if (found_tile < 0) return -1;
  Cut cut{0, ~0ull, ~0ull, 0.f, 0};
  if (c.flags & CUT) cut = t.cuts[c.index];
  const int first = found_tile * TILE + threadIdx.x * (TILE / 256);
  u64 weights[TILE / 256], own = 0;
#pragma unroll
  for (int i = 0; i < TILE / 256; i++) {
    const float x = first + i < t.vocab ? v.x[first + i] : -INF, distance = distance_of(v.top, x, v.inverse);
    weights[i] = stays(cut, x, distance, first + i) ? weight_of(distance) : 0;
    own += weights[i];
  }
  u64 cumulated = block_scan(own, room);
  const u64 target = before_tile;
#pragma unroll
  for (int i = 0; i < TILE / 256; i++) {
    if (cumulated <= target && target < cumulated + weights[i]) found_id = first + i, found_weight = weights[i];
    cumulated += weights[i];
  }
  __syncthreads();
  if (row.mirostat && threadIdx.x == 0) {
    const double mu = c.place ? t.next_mu[c.index - 1] : t.mu[c.row];
    t.next_mu[c.index] = mu - row.mirostat_eta * (log2((double)all / (double)found_weight) - row.mirostat_tau);
  }
  return found_id;
}

// Grid: sampled tokens. Block: 256 threads. `drafted`: settle_rows follows.
extern "C" __global__ void __launch_bounds__(256) pick_ids(
    const Tables* tables, const Sampled* tokens, int place, int drafted) {
  begin();
  extern __shared__ u64 sums[];
  __shared__ u64 room[33];
  const Sampled c = tokens[blockIdx.x];
  if (!c.flags || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  const Row& row = t.rows[c.row];
  const View v = view_of(t, c, row.temperature > 0.0 ? row.temperature : 1.0);
  int id = (int)(u32)v.best;
  if (!finite(v.top)) {
    const bool forbidding = c.mask >= 0 || c.num_output + c.place < row.min_tokens;
    id = v.top == -INF && forbidding ? NONE_ALLOWED : -1;
  } else if (c.flags & DRAW) {
    id = draw(t, c, row, v, sums, room);
  }
  if (threadIdx.x) return;
  t.sampled[c.index] = id;
  if (!drafted) settle(t, Drafted{c.row, c.index, 0, 0});
}

// A step with drafts: table [rows, 1 + most] gets the tokens that stand, none of a deferred row, whose number is below
// 0.
// Grid: blocks of 128 rows that sample.
extern "C" __global__ void __launch_bounds__(128) settle_rows(
    const Tables* tables, const Drafted* rows, int count, int* table, int most) {
  begin();
  const int at = blockIdx.x * 128 + threadIdx.x;
  if (at >= count) return;
  const Tables& t = *tables;
  const int stand = rows[at].row < 0 ? 0 : settle(t, rows[at]);
  for (int n = 0; n <= most; n++) table[at * (most + 1) + n] = n < stand ? t.sampled[rows[at].first + n] : NOT_REACHED;
}

// Take the sampled tokens that stand into DRY's tables. Grid: sampled tokens; the block of a row's first place does all
// of the row. Block: 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) extend_repetitions(
    const Tables* tables, const Sampled* tokens, int count) {
  begin();
  const Sampled c = tokens[blockIdx.x];
  if (!(c.flags & DRY) || c.place) return;
  const Tables& t = *tables;
  const Row& row = t.rows[c.row];
  int drafts = 0;
  while (blockIdx.x + drafts + 1 < count && tokens[blockIdx.x + drafts + 1].row == c.row) drafts++;
  const int added = standing(t.sampled, t.token_ids, Drafted{c.row, c.index, drafts, c.draft_token});
  const History history{row, row.dry_start + c.num_output, t.sampled + c.index};
  const int size = history.size + added;
  if (size > row.dry_places) return;
  const int start = history.window_start(size);
  for (int end = size - 1; end > start; end -= 1024) {  // from the last on: a length is read `added` places before
    const int at = end - 1 - (int)threadIdx.x;
    const int length = at >= start ? history.match(at, added) : 0;
    __syncthreads();
    if (at >= start) row.dry_lengths[at + 1] = length;
    __syncthreads();
  }
  if (threadIdx.x == 0) row.dry_lengths[size] = 0;
  if (threadIdx.x < added) row.dry_tokens[history.size + threadIdx.x] = t.sampled[c.index + threadIdx.x];
}
