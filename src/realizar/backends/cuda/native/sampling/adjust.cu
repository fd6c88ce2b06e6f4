// Changes of single logits: a grammar's mask, end ids before min_tokens, bias, penalties; then DRY. The adjusted logits
// and the largest of each tile go to buffers of their own: log-probabilities are those of the model's.

INLINE void store_top(const Tables& t, long tile, u64 best, bool broken, u64* room) {
  best = block_min(broken ? 0 : best, room);  // place 0 is that of a NaN: no logit has it
  if (threadIdx.x == 0) {
    t.adjusted_tops[tile] = best ? logit_of(best >> 32) : INF;
    t.adjusted_ids[tile] = (int)(u32)best;
  }
}

INLINE float penalised(const Row& row, float before, u32 word, int id, const int* drafts, int num_drafts) {
  int count = word & 0x7fffffffu;
  for (int i = 0; i < num_drafts; i++) count += drafts[i] == id;
  if (!count && !word) return before;
  double value = before;
  value = value > 0.0 ? value / row.repetition_penalty : value * row.repetition_penalty;
  return bounded(value - (row.frequency_penalty * count + (count ? row.presence_penalty : 0.0)), before);
}

// End ids and biases of a tile, each read by one thread; `part` is every 256th logit of the tile from a thread's own
// on.
INLINE void adjust_listed(const Row& row, bool forbids_ends, int first, int size, float* part, float* values) {
  for (int i = 0; i < TILE / 256; i++) values[i * 256 + threadIdx.x] = part[i];
  __syncthreads();
  if (forbids_ends)
    for (int i = threadIdx.x; i < row.num_ends; i += 256) {
      const int at = row.end_ids[i] - first;
      if (at >= 0 && at < size) values[at] = -INF;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_biases; i += 256) {
    const int at = row.bias_ids[i] - first;
    if (at >= 0 && at < size) values[at] = bounded((double)values[at] + row.biases[i], values[at]);
  }
  __syncthreads();
  for (int i = 0; i < TILE / 256; i++) part[i] = values[i * 256 + threadIdx.x];
}

// Grid: tiles, sampled tokens. Block: 256 threads.
extern "C" __global__ void __launch_bounds__(256) adjust_logits(const Tables* tables, const Sampled* tokens) {
  begin();
  const Sampled c = tokens[blockIdx.y];
  if (!(c.flags & ADJUST)) return;
  const Tables& t = *tables;
  const Row& row = t.rows[c.row];
  __shared__ float values[TILE];
  __shared__ u64 room[33];
  const int first = blockIdx.x * TILE, size = min(TILE, t.vocab - first);
  const float* x = t.logits + (long)c.index * t.vocab + first;
  float part[TILE / 256];
#pragma unroll
  for (int i = 0; i < TILE / 256; i++) part[i] = i * 256 + threadIdx.x < size ? x[i * 256 + threadIdx.x] : -INF;
  if (c.mask >= 0) {
    __shared__ u32 mask[TILE / 32];  // of the host's memory each word is read once, and side by side
    const u32* masks = c.mask < SHARED ? t.masks : t.shared_masks;
    const long line = c.mask < SHARED ? c.mask : c.mask - SHARED;
    if (threadIdx.x * 32 < size) mask[threadIdx.x] = masks[line * t.words + first / 32 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE / 256; i++) {
      const int at = i * 256 + threadIdx.x;
      if (at < size && !(mask[at / 32] >> at % 32 & 1)) part[i] = -INF;
    }
  }
  const bool forbids_ends = c.mask < 0 && c.num_output + c.place < row.min_tokens;
  if (forbids_ends || row.num_biases) adjust_listed(row, forbids_ends, first, size, part, values);
  u32 words[TILE / 256];
#pragma unroll
  for (int i = 0; i < TILE / 256; i++)
    words[i] = row.counts && i * 256 + threadIdx.x < size ? row.counts[first + i * 256 + threadIdx.x] : 0;
  u64 best = ~0ull;
  bool broken = false;
  const int* drafts = c.place ? t.token_ids + c.draft_token : nullptr;
  float* out = t.adjusted + (long)c.index * t.vocab + first;
#pragma unroll
  for (int i = 0; i < TILE / 256; i++) {
    const int at = i * 256 + threadIdx.x;
    if (at >= size) continue;
    const float value = row.counts ? penalised(row, part[i], words[i], first + at, drafts, c.place) : part[i];
    out[at] = value;
    best = min(best, place_of(value, first + at));
    broken |= value != value;
  }
  store_top(t, (long)c.index * t.tiles + blockIdx.x, best, broken, room);
}

INLINE bool is_breaker(const Row& row, int token) {
  int low = 0, high = row.num_breakers;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (row.breakers[middle] < token) low = middle + 1;
    else high = middle;
  }
  return low < row.num_breakers && row.breakers[low] == token;
}

// A row's tokens, and tokens after them that its table does not hold yet.
struct History {
  const Row& row;
  int size;
  const int* more;
  INLINE int token(int at) const { return at < size ? row.dry_tokens[at] : more[at - size]; }
  // How many tokens ending at `at` equal those at the end, once `added` of `more` are appended; none over a breaker.
  INLINE int match(int at, int added) const {
    for (int m = 0; m < added; m++) {
      const int last = more[added - 1 - m];
      if (at - m < 0 || token(at - m) != last || is_breaker(row, last)) return m;
    }
    return at < added ? added : added + row.dry_lengths[at - added + 1];
  }
  INLINE int window_start(int tokens) const {
    return row.dry_penalty_last_n < 0 ? 0 : max(0, tokens - row.dry_penalty_last_n);
  }
};

INLINE void lower_to(float* at, float value) {
  float before = *at;
  while (value < before) {
    const u32 found = atomicCAS((u32*)at, __float_as_uint(before), __float_as_uint(value));
    if (found == __float_as_uint(before)) return;
    before = __uint_as_float(found);
  }
}

// Penalise what would lengthen a repetition. Grid: sampled tokens; the block of a row's first place does all its
// places, one after another, for they share `dry_values`. Block: 512 threads.
extern "C" __global__ void __launch_bounds__(512) penalise_repetitions(
    const Tables* tables, const Sampled* tokens, int count) {
  begin();
  const Sampled first = tokens[blockIdx.x];
  if (!(first.flags & DRY) || first.place) return;
  const Tables& t = *tables;
  const Row& row = t.rows[first.row];
  const History history{row, row.dry_start + first.num_output, t.token_ids + first.draft_token};
  for (int n = blockIdx.x; n < count && tokens[n].row == first.row; n++) {
    const int added = tokens[n].place, size = history.size + added, start = history.window_start(size);
    if (size > row.dry_places) return;
    float* x = t.adjusted + (long)tokens[n].index * t.vocab;
    for (int at = start + threadIdx.x; at < size - 1; at += 512) {
      int length = history.match(at, added);
      if (start > 0) length = min(length, at - start + 1);
      float value = INF;
      const int next = history.token(at + 1);
      if (length >= row.dry_allowed_length && next >= 0 && next < t.vocab && !is_breaker(row, next)) {
        const double penalty = row.dry_multiplier * pow(row.dry_base, (double)(length - row.dry_allowed_length));
        value = bounded((double)x[next] - fmin(penalty, LARGEST), x[next]);
      }
      row.dry_values[at] = value;
    }
    __syncthreads();
    for (int at = start + threadIdx.x; at < size - 1; at += 512)
      if (row.dry_values[at] < INF) lower_to(x + history.token(at + 1), row.dry_values[at]);
    __syncthreads();
  }
}

// The largest logits of tiles again, after penalise_repetitions. Grid: tiles, sampled tokens. Block: 256 threads.
extern "C" __global__ void __launch_bounds__(256) find_tops(const Tables* tables, const Sampled* tokens) {
  begin();
  const Sampled c = tokens[blockIdx.y];
  if (!(c.flags & DRY)) return;
  const Tables& t = *tables;
  __shared__ u64 room[33];
  const int first = blockIdx.x * TILE, end = min(first + TILE, t.vocab);
  const float* x = t.adjusted + (long)c.index * t.vocab;
  u64 best = ~0ull;
  bool broken = false;
  for (int id = first + threadIdx.x; id < end; id += 256) {
    best = min(best, place_of(x[id], id));
    broken |= x[id] != x[id];
  }
  store_top(t, (long)c.index * t.tiles + blockIdx.x, best, broken, room);
}

// Count a new row's tokens: bit 31 for those of the prompt. Grid: blocks of 256 tokens.
extern "C" __global__ void __launch_bounds__(256) count_history(
    u32* counts, const int* tokens, int prompt, int size, int vocab) {
  begin();
  const int at = blockIdx.x * 256 + threadIdx.x;
  if (at >= size || tokens[at] < 0 || tokens[at] >= vocab) return;
  if (at < prompt) atomicOr(counts + tokens[at], 0x80000000u);
  else atomicAdd(counts + tokens[at], 1u);
}
