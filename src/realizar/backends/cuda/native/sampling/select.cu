// Selection without a sort of the vocabulary, by one block: a histogram names the bin in which a sum is reached, and
// the few ids of that bin are sorted. A bin with too many is narrowed by the digits of (key, id) first.

#define THREADS 1024
#define BATCH 8

struct Room {
  u64 list[ROOM];        // also the sums of digits
  u64 mass[BINS];        // weight of a bin and those before it
  u32 number[BINS];      // ids of a bin and those before it
  u64 parts[33];
  u64 found, found_mass;
  int bin, size, digit;
  u64 before_mass;
  u32 before_number;
};

template <class F> INLINE void each(const View& v, F f) {
  for (int first = 0; first < v.vocab; first += THREADS * BATCH) {
    float part[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int id = first + i * THREADS + threadIdx.x;
      part[i] = id < v.vocab ? v.x[id] : -INF;
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int id = first + i * THREADS + threadIdx.x;
      if (id < v.vocab) f(part[i], id);
    }
  }
}

// Sums of bins to sums of a bin and those before it.
INLINE void accumulate(Room& s) {
  __syncthreads();
  const int b = 2 * threadIdx.x;
  const u64 m0 = s.mass[b], m1 = s.mass[b + 1];
  const u32 n0 = s.number[b], n1 = s.number[b + 1];
  const u64 mass = block_scan(m0 + m1, s.parts);
  const u32 number = (u32)block_scan(n0 + n1, s.parts);
  s.mass[b] = mass + m0, s.mass[b + 1] = mass + m0 + m1;
  s.number[b] = number + n0, s.number[b + 1] = number + n0 + n1;
  __syncthreads();
}

// Steps of a bitonic sort between places of one warp, for spans from `least` to `most`.
INLINE void sort_warps(Room& s, int size, int least, int most) {
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += THREADS) {
    u64 x = s.list[i];
    for (int span = least; span <= most; span *= 2)
      for (int step = min(span / 2, 16); step; step /= 2) {
        const u64 y = __shfl_xor_sync(~0u, x, step);
        x = !(i & step) == !(i & span) ? min(x, y) : max(x, y);
      }
    s.list[i] = x;
  }
  __syncthreads();
}

INLINE void sort_list(Room& s, int count) {
  int size = 32;
  while (size < count) size *= 2;
  __syncthreads();
  for (int i = count + threadIdx.x; i < size; i += THREADS) s.list[i] = ~0ull;
  sort_warps(s, size, 2, 32);
  for (int span = 64; span <= size; span *= 2) {
    for (int step = span / 2; step > 16; step /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += THREADS) {
        const int a = (i / step) * 2 * step + i % step, b = a + step;
        const u64 x = s.list[a], y = s.list[b];
        if ((x > y) == !(a & span)) s.list[a] = y, s.list[b] = x;
      }
      __syncthreads();
    }
    sort_warps(s, size, span, span);
  }
}

// What an order of ids is by: the logit, or how far a surprise is from the mean one. `all`: ids without weight, too.
struct ByLogit {
  bool all;
  INLINE float distance(float, float away) const { return away; }
  INLINE u32 key(float x, float) const { return key_of(x); }
};
struct BySurprise {
  float mean;
  static constexpr bool all = false;
  INLINE float distance(float, float away) const { return apart(away, mean); }
  INLINE u32 key(float, float away) const { return __float_as_uint(apart(away, mean)); }
};

// Sort the ids of the list, and find the one with which a sum is reached: of weights, or (COUNT) of ids. `mass` and
// `number` are those before the list. `found` is the id's place, and `found_mass` the weight up to it.
template <bool COUNT> INLINE void find_listed(const View& v, u64 target, u64 mass, u32 number, int count, Room& s) {
  sort_list(s, count);
  constexpr int EACH = ROOM / THREADS;
  u64 weights[EACH], own = 0;
  for (int i = 0; i < EACH; i++) {
    const int at = threadIdx.x * EACH + i;
    weights[i] = at < count ? weight_of(distance_of(v.top, v.x[(u32)s.list[at]], v.inverse)) : 0;
    own += weights[i];
  }
  u64 before = mass + block_scan(own, s.parts);
  __syncthreads();
  for (int i = 0; i < EACH; i++) {
    const int at = threadIdx.x * EACH + i;
    const u64 through = before + weights[i];
    const bool here = COUNT ? number + at + 1 == target : before < target && target <= through;
    if (at < count && here) s.found = s.list[at], s.found_mass = through;
    before = through;
  }
  __syncthreads();
}

// Find the id with which the ids that `cut` leaves, in their order, first reach a sum: of weights, or (COUNT) of ids.
// `mass` and `number` are those of that order's bins. False where the sum is never reached. Else `found` is the id's
// place and `found_mass` the weight up to it, and `list` holds the ids of its bin in order. `listed`: these ids, if
// they are known.
template <bool COUNT, class Order>
INLINE bool reach(
    const View& v, const Cut& cut, const Order& order, u64 target, Room& s, const u64* listed = nullptr, int size = 0) {
  __syncthreads();
  if (threadIdx.x == 0) s.bin = -1;
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS) {
    const u64 before = !b ? 0 : COUNT ? s.number[b - 1] : s.mass[b - 1], through = COUNT ? s.number[b] : s.mass[b];
    if (before < target && target <= through) s.bin = b;
  }
  __syncthreads();
  const int bin = s.bin;
  if (bin < 0) return false;
  u64 mass = bin ? s.mass[bin - 1] : 0, digits = 0, known = 0;
  u32 number = bin ? s.number[bin - 1] : 0;
  auto matching = [&](auto f) {
    each(v, [&](float x, int id) {
      const float away = distance_of(v.top, x, v.inverse);
      if (!order.all && !(away < FARTHEST)) return;
      if (bin_of(fminf(order.distance(x, away), FARTHEST)) != bin || !stays(cut, x, away, id)) return;
      const u64 place = place_of(order.key(x, away), id);
      if (!((place ^ digits) & known)) f(place, away);
    });
  };
  int count = size;
  for (int i = threadIdx.x; listed && i < size; i += THREADS) s.list[i] = listed[i];
  for (int shift = 64; !listed;) {
    if (threadIdx.x == 0) s.size = 0;
    __syncthreads();
    matching([&](u64 place, float) {
      const int at = atomicAdd(&s.size, 1);
      if (at < ROOM) s.list[at] = place;
    });
    __syncthreads();
    count = s.size;
    if (count <= ROOM) break;
    shift -= 8;
    __syncthreads();
    if (threadIdx.x < 512) s.list[threadIdx.x] = 0;  // 256 sums of weights, 256 of ids
    __syncthreads();
    matching([&](u64 place, float away) {
      const int digit = (int)(place >> shift) & 255;
      atomicAdd(s.list + digit, weight_of(away));
      atomicAdd(s.list + 256 + digit, 1ull);
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 m = mass;
      u32 n = number;
      int digit = 0;
      while (digit < 255 && (COUNT ? n + s.list[256 + digit] : m + s.list[digit]) < target)
        m += s.list[digit], n += (u32)s.list[256 + digit], digit++;
      s.before_mass = m, s.before_number = n, s.digit = digit;
    }
    __syncthreads();
    mass = s.before_mass, number = s.before_number;
    digits |= (u64)s.digit << shift, known |= 255ull << shift;
    __syncthreads();
  }
  if (!count) return false;
  find_listed<COUNT>(v, target, mass, number, count, s);
  return true;
}
