// Truncations of a row, by one block: each sees what the ones before it left. All but typical end at a place in the
// order of logits; XTC begins at one.

// The last place whose logit is no less than top - distance * temperature.
INLINE u64 floor_of(const View& v, double distance, double temperature) {
  return place_of(key_of(__double2float_ru((double)v.top - distance * temperature)), -1);
}

// Bins of the ids that `cut` leaves, from one block.
template <class Order> INLINE void fill_bins(const View& v, const Cut& cut, const Order& order, Room& s) {
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS) s.mass[b] = s.number[b] = 0;
  __syncthreads();
  each(v, [&](float x, int id) {
    const float away = distance_of(v.top, x, v.inverse);
    const u64 weight = weight_of(away);
    if (!weight || !stays(cut, x, away, id)) return;
    const int b = bin_of(order.distance(x, away));
    add_shared(s.mass + b, weight);
    atomicAdd(s.number + b, 1u);
  });
  accumulate(s);
}

// Weight of all ids up to `cut.high`, by the bins in the order of logits.
INLINE u64 mass_left(const View& v, const Cut& cut, Room& s) {
  if (cut.high == ~0ull) return s.mass[BINS - 1];
  const int bin = bin_of(fminf(distance_of(v.top, logit_of(cut.high >> 32), v.inverse), FARTHEST));
  u64 sum = 0;
  each(v, [&](float x, int id) {
    const float away = distance_of(v.top, x, v.inverse);
    if (away < FARTHEST && bin_of(away) == bin && stays(cut, x, away, id)) sum += weight_of(away);
  });
  return (bin ? s.mass[bin - 1] : 0) + block_sum(sum, s.parts);
}

// Locally typical: ids by how far their surprise is from the mean one, which is the entropy less a constant.
INLINE void keep_typical(const View& v, Cut& cut, double share, Room& s) {
  u64 mass = 0, moment = 0;
  each(v, [&](float x, int id) {
    const float away = distance_of(v.top, x, v.inverse);
    if (!(away < FARTHEST) || !stays(cut, x, away, id)) return;
    mass += weight_of(away), moment += moment_of(away);
  });
  mass = block_sum(mass, s.parts), moment = block_sum(moment, s.parts);
  cut.mean = mean_of(moment, mass);
  const BySurprise order{cut.mean};
  fill_bins(v, cut, order, s);
  if (reach<false>(v, cut, order, share_of(share, mass), s)) cut.typical = s.found;
}

// The same where the ids of the ring are listed, and `mass` has the bins of all ids in the order of logits.
INLINE void keep_typical_listed(const View& v, Cut& cut, double share, const Near& near, const u64* listed, Room& s) {
  for (int i = threadIdx.x; i < near.size; i += THREADS) s.list[i] = listed[i];
  if (threadIdx.x == 0) s.found = ~0ull;
  auto mass_before = [&](int bin) { return bin ? s.mass[bin - 1] : 0; };
  const u64 kept = mass_before(near.kept_end) - mass_before(near.kept);
  find_listed<false>(v, share_of(share, s.mass[BINS - 1]), kept, 0, near.size, s);
  cut.mean = near.mean, cut.typical = s.found;
}

// The first place, in the order of logits, that `cut` leaves; the last one for LAST. ~0 or 0 where there is none.
template <bool LAST> INLINE u64 end_of(const View& v, const Cut& cut, Room& s) {
  u64 found = ~0ull;
  each(v, [&](float x, int id) {
    const float away = distance_of(v.top, x, v.inverse);
    if (away < FARTHEST && stays(cut, x, away, id)) found = min(found, LAST ? ~place_of(x, id) : place_of(x, id));
  });
  found = block_min(found, s.parts);
  return LAST ? ~found : found;
}

// Of the ids of probability `threshold` or more only the last stays.
INLINE void exclude_top_choices(const View& v, Cut& cut, double threshold, double temperature, Room& s) {
  const u64 mass = mass_left(v, cut, s);
  const double distance = -log(threshold * ((double)mass / 1099511627776.0));
  Cut likely = cut;
  likely.high = min(cut.high, floor_of(v, distance, temperature));
  const u64 last = end_of<true>(v, likely, s);
  if (last) cut.low = last;
}

INLINE double standard_deviation(const Tables& t, const Sampled& c) {
  double sum = 0.0, square_sum = 0.0, count = 0.0;
  for (int i = 0; i < t.tiles; i++) {
    const double* m = t.moments + ((long)c.index * t.tiles + i) * 3;
    sum += m[0], square_sum += m[1], count += m[2];
  }
  const double mean = sum / count;
  return sqrt(fmax(square_sum / count - mean * mean, 0.0));
}

INLINE Cut mirostat_cut(const Tables& t, const Sampled& c, const View& v, const Row& row) {
  u64 mass = 0;
  for (int i = threadIdx.x % 32; i < t.tiles; i += 32) mass += t.sums[(long)c.index * t.tiles + i];
  mass = warp_sum(mass);
  const double mu = c.place ? t.next_mu[c.index - 1] : t.mu[c.row];
  const double distance = mu * 0.69314718055994531 - log((double)mass / 1099511627776.0);
  return {0, max(distance < 0.0 ? 0 : floor_of(v, distance, row.temperature), v.best), ~0ull, 0.f, 0};
}

// Add the weights of the first `count` ids of the list, less those before `first`, to `sums` of their tiles, which are
// 0 before if `anew`.
INLINE void add_listed(const Tables& t, const Sampled& c, const View& v, int first, int count, bool anew, Room& s) {
  __syncthreads();
  for (int i = threadIdx.x; i < t.tiles; i += THREADS) s.mass[i] = 0;
  __syncthreads();
  for (int i = first + threadIdx.x; i < count; i += THREADS) {
    const u32 id = (u32)s.list[i];
    add_shared(s.mass + id / TILE, weight_of(distance_of(v.top, v.x[id], v.inverse)));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < t.tiles; i += THREADS) {
    u64* at = t.sums + (long)c.index * t.tiles + i;
    if (*at != UNUSABLE) *at = s.mass[i] + (anew ? 0 : *at);
  }
}

// How many of the first `count` ids of the list lie no farther than a place.
INLINE int number_through(u64 place, int count, Room& s) {
  u64 number = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) number += s.list[i] <= place;
  return (int)block_sum(number, s.parts);
}

// The truncations of a row all of whose ids that may stay are listed: on the list alone.
INLINE Cut truncate_listed(
    const Tables& t, const Sampled& c, const View& v, const Row& row, const u64* listed, int size, Room& s) {
  constexpr int EACH = ROOM / THREADS;
  for (int i = threadIdx.x; i < size; i += THREADS) s.list[i] = listed[i];
  sort_list(s, size);
  u64 weights[EACH], own = 0;
  for (int i = 0; i < EACH; i++) {
    const int at = threadIdx.x * EACH + i;
    weights[i] = at < size ? weight_of(distance_of(v.top, v.x[(u32)s.list[at]], v.inverse)) : 0;
    own += weights[i];
  }
  const u64 before = block_scan(own, s.parts);
  auto mass_of = [&](int count) {
    u64 mass = 0;
    for (int i = 0; i < EACH; i++) mass += threadIdx.x * EACH + i < count ? weights[i] : 0;
    return block_sum(mass, s.parts);
  };
  int kept = size;
  const bool counts = row.top_k > 0 && row.top_k < t.vocab;
  if (counts) kept = min(kept, row.top_k);
  if (row.top_p < 1.0) {
    const u64 target = share_of(row.top_p, counts ? mass_of(kept) : s.mass[BINS - 1]);
    u64 through = before;
    if (threadIdx.x == 0) s.size = kept;
    __syncthreads();
    for (int i = 0; i < EACH; i++) {
      const int at = threadIdx.x * EACH + i;
      if (at < kept && through < target && target <= through + weights[i]) s.size = at + 1;
      through += weights[i];
    }
    __syncthreads();
    kept = s.size;
  }
  Cut cut{0, s.list[kept - 1], ~0ull, 0.f, 1};
  if (row.min_p > 0.0) {
    const double nearest = (double)(distance_of(v.top, logit_of(v.best >> 32), v.inverse));
    cut.high = max(min(cut.high, floor_of(v, nearest - log(row.min_p), row.temperature)), v.best);
    kept = number_through(cut.high, kept, s);
  }
  int first = 0;
  if (row.xtc_probability > 0.0 && uniform24(row.seed, row.choice, c.position, 1) / 16777216.0 < row.xtc_probability) {
    const double distance = -log(row.xtc_threshold * ((double)mass_of(kept) / 1099511627776.0));
    const int likely = number_through(floor_of(v, distance, row.temperature), kept, s);
    if (likely) first = likely - 1, cut.low = s.list[first];
  }
  add_listed(t, c, v, first, kept, true, s);
  return cut;
}

INLINE Cut truncate(const Tables& t, const Sampled& c, const View& v, const Row& row, const Near& near, Room& s) {
  const u64* listed = t.listed + (long)c.index * ROOM;
  if (near.extent == WHOLE) return truncate_listed(t, c, v, row, listed, near.size, s);
  if (near.extent == 0 || near.size > ROOM) listed = nullptr;
  Cut cut{0, ~0ull, ~0ull, 0.f, 0};
  const ByLogit order{false};
  const bool counts = row.top_k > 0 && row.top_k < t.vocab;
  if (counts && reach<true>(v, cut, order, row.top_k, s, listed, near.size)) cut.high = s.found;
  if (row.top_n_sigma > 0.0)
    cut.high = max(min(cut.high, floor_of(v, row.top_n_sigma * standard_deviation(t, c), 1.0)), v.best);
  u64 best = v.best;
  if (row.typical_p < 1.0) {
    const bool more = row.top_p < 1.0 || row.xtc_probability > 0.0;
    if (listed && near.extent == RING) {
      keep_typical_listed(v, cut, row.typical_p, near, listed, s);
      if (!more && row.min_p <= 0.0) {
        add_listed(t, c, v, 0, number_through(cut.typical, near.size, s), false, s);
        cut.summed = 1;
      }
    } else {
      keep_typical(v, cut, row.typical_p, s);
    }
    listed = nullptr;
    if (row.min_p > 0.0) best = end_of<false>(v, cut, s);
    if (more) fill_bins(v, cut, order, s);
  }
  if (row.top_p < 1.0) {
    const u64 target = share_of(row.top_p, mass_left(v, cut, s));
    if (reach<false>(v, cut, order, target, s, counts ? nullptr : listed, near.size)) cut.high = min(cut.high, s.found);
  }
  if (row.min_p > 0.0) {
    const double nearest = (double)(distance_of(v.top, logit_of(best >> 32), v.inverse));
    cut.high = max(min(cut.high, floor_of(v, nearest - log(row.min_p), row.temperature)), best);
  }
  if (row.xtc_probability > 0.0) {
    const double number = uniform24(row.seed, row.choice, c.position, 1) / 16777216.0;
    if (number < row.xtc_probability) exclude_top_choices(v, cut, row.xtc_threshold, row.temperature, s);
  } else if (listed && row.min_p <= 0.0 && !(counts && row.top_p < 1.0)) {
    add_listed(t, c, v, 0, number_through(cut.high, near.size, s), false, s);
    cut.summed = 1;
  }
  return cut;
}

#if CUTS
// Grid: sampled tokens.
extern "C" __global__ void __launch_bounds__(THREADS) cut_ids(const Tables* tables, const Sampled* tokens, int place) {
  begin();
  extern __shared__ __align__(16) char memory[];
  Room& s = *(Room*)memory;
  const Sampled c = tokens[blockIdx.x];
  if (!(c.flags & CUT) || (place >= 0 && c.place != place)) return;
  const Tables& t = *tables;
  const Row& row = t.rows[c.row];
  const View v = view_of(t, c, row.temperature);
  if (!finite(v.top)) return;
  if (c.flags & HISTOGRAM) {
    for (int b = threadIdx.x; b < BINS; b += THREADS) {
      const long at = (long)c.index * BINS + b;
      s.mass[b] = t.weights[at], s.number[b] = t.counts[at];
      t.weights[at] = 0, t.counts[at] = 0;
    }
    accumulate(s);
  }
  const Near near = t.near[c.index];
  __syncthreads();
  if (threadIdx.x == 0) t.near[c.index] = {};
  const Cut cut = row.mirostat ? mirostat_cut(t, c, v, row) : truncate(t, c, v, row, near, s);
  if (threadIdx.x == 0) t.cuts[c.index] = cut;
}
#endif

// List the `count` most probable ids and those of their bin, from one block: where survey_ids could not bound them.
INLINE void list_most_probable(const View& v, int count, Room& s) {
  for (int b = threadIdx.x; b < BINS; b += THREADS) s.mass[b] = s.number[b] = 0;
  __syncthreads();
  each(v, [&](float x, int) { atomicAdd(s.number + bin_of(fminf(distance_of(v.top, x, v.inverse), FARTHEST)), 1u); });
  accumulate(s);
  Cut cut{0, ~0ull, ~0ull, 0.f, 0};
  if (reach<true>(v, cut, ByLogit{true}, count, s)) cut.high = s.found;
  __syncthreads();
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  each(v, [&](float x, int id) {
    if (place_of(x, id) > cut.high) return;
    const int at = atomicAdd(&s.size, 1);
    if (at < ROOM) s.list[at] = place_of(x, id);
  });
  __syncthreads();
}

#if !CUTS
// Log-probability, rank and most probable ids: a line of `most` + 3 + `most` numbers: id, rank, value, ids, values.
// Grid: queries.
extern "C" __global__ void __launch_bounds__(THREADS) report_logprobs(
    const Tables* tables, const Query* queries, double* lines, int most) {
  begin();
  extern __shared__ __align__(16) char memory[];
  Room& s = *(Room*)memory;
  const Query q = queries[blockIdx.x];
  if (q.slot < 0) return;
  const Tables& t = *tables;
  const long tops = (long)q.slot * t.tiles;
  const u64 best = best_of(t.tops + tops, t.top_ids + tops, t.tiles);
  const View v{t.logits + (long)q.slot * t.vocab, t.vocab, logit_of(best >> 32), 1.f, best};
  u64 sum = 0, rank = 1;
  bool broken = !finite(v.top);
  for (int i = 0; i < t.spans; i++) {
    const long at = (long)blockIdx.x * t.spans + i;
    broken |= t.query_sums[at] == UNUSABLE;
    sum += t.query_sums[at], rank += t.query_ranks[at];
  }
  const int target = min(max(q.target < 0 ? t.sampled[q.slot] : q.target, 0), t.vocab - 1);
  const double nan = __longlong_as_double(0x7ff8000000000000ll);
  const double normaliser = broken ? nan : (double)v.top + log((double)sum / 1099511627776.0);
  double* line = lines + (long)blockIdx.x * (3 + 2 * most);
  if (threadIdx.x == 0) line[0] = target, line[1] = (double)rank, line[2] = (double)v.x[target] - normaliser;
  const int listed = (int)min(t.query_counts[blockIdx.x], ROOM + 1u);
  __syncthreads();
  if (threadIdx.x == 0) t.query_counts[blockIdx.x] = 0, s.size = listed;
  if (broken || !q.top_n) return;
  if (listed >= q.top_n && listed <= ROOM)
    for (int i = threadIdx.x; i < listed; i += THREADS) s.list[i] = t.listed[(long)blockIdx.x * ROOM + i];
  else
    list_most_probable(v, q.top_n, s);
  __syncthreads();
  const int count = min(s.size, q.top_n);
  sort_list(s, min(s.size, ROOM));
  for (int i = threadIdx.x; i < count; i += THREADS) {
    line[3 + i] = (double)(u32)s.list[i];
    line[3 + most + i] = (double)logit_of(s.list[i] >> 32) - normaliser;
  }
}
#endif
