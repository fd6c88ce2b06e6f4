// The warpgroups that attend, how parts of contexts are joined, and the kernel. Before it: copies.cu.

// Zeros in the place of values that no token of the row has written yet: what was there may be no number.
INLINE void clear_values(u32 at, int from, int to, int group) {
  for (int i = threadIdx.x % 128; i < (to - from) * COLUMNS * 8; i += 128) {
    const int row = from + i / (COLUMNS * 8), column = i / 8 % COLUMNS;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at + (column * KEYS + row) * 128 + i % 8 * 16), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_some(1 + CONSUMERS + group, 128);
}

// Largest scores and sums of weights of two parts; `first` and `second` are what each part's sums count for.
INLINE void join_states(float& top, float& total, float other_top, float other_total, float factor, float& first, float& second) {
  const float higher = fmaxf(top, other_top), reference = higher == __int_as_float(0xff800000) ? 0.f : higher;
  first = power2((top - reference) * factor), second = power2((other_top - reference) * factor);
  top = higher;
  total = fmaf(total, first, __fmul_rn(other_total, second));
}
// What other blocks of threads have written: from the second-level cache.
INLINE float4 load_part(const float4* at) { float4 r; asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(at) : "memory"); return r; }
INLINE float2 load_part(const float2* at) { float2 r; asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(at) : "memory"); return r; }
// Of loads in a row only a few get registers at once, as none is made earlier than such a line.
INLINE void few_at_once(int i) { if (i % 4 == 3) __syncwarp(); }
INLINE float joined(float one, float first, float other, float second) { return fmaf(other, second, __fmul_rn(one, first)); }

// Whether this warp is the last of `parts` to come. `arrived` is 0, and left so.
INLINE bool is_last(int* arrived, int parts) {
  __threadfence();
  __syncwarp();
  int before = 0;
  if (threadIdx.x % 32 == 0) {
    before = atomicAdd(arrived, 1);
    if (before == parts - 1) *arrived = 0;
  }
  before = __shfl_sync(~0u, before, 0);
  __threadfence();
  return before == parts - 1;
}

// What a warp hands on of a part, each thread for itself: its sums in fours, and its state.
constexpr int FOURS = OWN / 8;
INLINE float4* handed(const Arguments& in, int place) {
  return in.parts + ((long)place * (CONSUMERS * 4) + threadIdx.x / 32 - 4) * ((FOURS + 1) * 32) + threadIdx.x % 32;
}
INLINE void hand_on(float4* to, const Rows& rows) {
#pragma unroll
  for (int i = 0; i < FOURS; i++)
    __stcg(to + i * 32, make_float4(rows.sums[i * 4], rows.sums[i * 4 + 1], rows.sums[i * 4 + 2], rows.sums[i * 4 + 3]));
  __stcg(to + FOURS * 32, make_float4(rows.top[0], rows.top[1], rows.total[0], rows.total[1]));
}

#if ALONE
// Through `parts` [tokens, most parts, heads, HEAD] and `states` [.., 2] go the parts of single tokens.
INLINE bool join_parts(const Arguments& in, const Tile& tile, Rows& rows, float factor, int row, int side, int t) {
  if (tile.parts == 1) return true;
  const int warp = threadIdx.x / 32 % 4;
  if (warp * 16 >= GROUP) return false;
  auto place = [&](int part, int r) {
    return ((long)(tile.work * in.most_parts + part) * in.kv_heads + tile.kv_head) * GROUP + row + r * 8;
  };
  auto sums = [&](int part, int r) { return (float2*)((float*)in.parts + place(part, r) * HEAD + side * OWN + t * 2); };
#pragma unroll
  for (int r = 0; r < 2; r++)
    if (row + r * 8 < GROUP) {
      float2* to = sums(tile.part, r);
#pragma unroll
      for (int i = 0; i < OWN / 8; i++) __stcg(to + i * 4, make_float2(rows.sums[i * 4 + r * 2], rows.sums[i * 4 + r * 2 + 1]));
      if (t == 0) __stcg((float2*)in.states + place(tile.part, r), make_float2(rows.top[r], rows.total[r]));
    }
  if (!is_last(in.arrivals + ((tile.work * in.kv_heads + tile.kv_head) * SPLIT + side) * 4 + warp, tile.parts)) return false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const bool own = row + r * 8 < GROUP;
    auto load = [&](const float2* from) { return own ? load_part(from) : make_float2(0.f, 0.f); };
    const float2 last = load((const float2*)in.states + place(tile.parts - 1, r));
    rows.top[r] = last.x, rows.total[r] = last.y;
#pragma unroll
    for (int i = 0; i < OWN / 8; i++) {
      const float2 x = load(sums(tile.parts - 1, r) + i * 4);
      rows.sums[i * 4 + r * 2] = x.x, rows.sums[i * 4 + r * 2 + 1] = x.y;
    }
#pragma unroll 1
    for (int p = tile.parts - 2; p >= 0; p--) {
      const float2 state = load((const float2*)in.states + place(p, r));
      float first, second;
      join_states(rows.top[r], rows.total[r], state.x, state.y, factor, first, second);
#pragma unroll
      for (int i = 0; i < OWN / 8; i++) {
        float* to = rows.sums + i * 4 + r * 2;
        to[0] = __fmul_rn(to[0], first), to[1] = __fmul_rn(to[1], first);
      }
      pin(rows.sums);
#pragma unroll
      for (int i = 0; i < OWN / 8; i++) {  // as `joined`
        const float2 x = load(sums(p, r) + i * 4);
        float* to = rows.sums + i * 4 + r * 2;
        to[0] = fmaf(x.x, second, to[0]), to[1] = fmaf(x.y, second, to[1]);
        few_at_once(i);
      }
    }
  }
  return true;
}
#elif FIXED > 0
// Joins a tile's part with those before it; true for the last, part 0.
INLINE bool join_parts(const Arguments& in, const Tile& tile, Rows& rows, float factor, int, int, int) {
  float4* before = handed(in, blockIdx.x);
  if (tile.part < tile.parts - 1) {
    const float4 state = load_part(before + FOURS * 32);
    float tops[2] = {state.x, state.y}, totals[2] = {state.z, state.w}, first[2], second[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      join_states(tops[r], totals[r], rows.top[r], rows.total[r], factor, first[r], second[r]);
      rows.top[r] = tops[r], rows.total[r] = totals[r];
    }
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const float4 x = load_part(before + i * 32);
      float* own = rows.sums + i * 4;
      own[0] = joined(x.x, first[0], own[0], second[0]), own[1] = joined(x.y, first[0], own[1], second[0]);
      own[2] = joined(x.z, first[1], own[2], second[1]), own[3] = joined(x.w, first[1], own[3], second[1]);
      few_at_once(i);
    }
  }
  if (tile.part > 0) hand_on(before, rows);
  return tile.part == 0;
}
#else
// A part is handed to the last part's warp, which joins all; true if this is that one.
INLINE bool join_parts(const Arguments& in, const Tile& tile, Rows& rows, float factor, int, int, int) {
  if (tile.parts == 1) return true;
  const int warp = threadIdx.x / 32 - 4, lowest = tile.work - tile.part * in.kv_heads;
  hand_on(handed(in, tile.work), rows);
  if (!is_last(in.arrivals + lowest * (CONSUMERS * 4) + warp, tile.parts)) return false;
  rows.top[0] = rows.top[1] = __int_as_float(0xff800000);
  rows.total[0] = rows.total[1] = 0.f;
#pragma unroll
  for (int i = 0; i < OWN / 2; i++) rows.sums[i] = 0.f;
#pragma unroll 1
  for (int p = tile.parts - 1; p >= 0; p--) {
    const float4* from = handed(in, lowest + p * in.kv_heads);
    const float4 state = load_part(from + FOURS * 32);
    float first[2], second[2];
    join_states(rows.top[0], rows.total[0], state.x, state.z, factor, first[0], second[0]);
    join_states(rows.top[1], rows.total[1], state.y, state.w, factor, first[1], second[1]);
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const float4 x = load_part(from + i * 32);
      float* own = rows.sums + i * 4;
      own[0] = joined(x.x, second[0], own[0], first[0]), own[1] = joined(x.y, second[0], own[1], first[0]);
      own[2] = joined(x.z, second[1], own[2], first[1]), own[3] = joined(x.w, second[1], own[3], first[1]);
      few_at_once(i);
    }
  }
  return true;
}
#endif

// A warpgroup. Warpgroups issue their products in turn: the softmax of one runs beside the products of another.
INLINE void attend_tiles(const Arguments& in, const Shared& at) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
  const int side = group % SPLIT, row = group / SPLIT * 64 + warp * 16 + lane / 4;
  const float log2e = 1.4426950408889634f;
  const float factor = CAP ? log2e : in.scale * log2e;
  const u64 queries = descriptor(at.queries + group / SPLIT * 64 * 128, 0);
  const u64 keys = descriptor(at.ring, 0), values = descriptor(at.ring + side * OWN * 2 * KEYS, KEYS * 128);
  Place<SLOTS> place;
  int queries_parity = 0;
  Rows rows;
  if (CONSUMERS > 1 && group == 0) arrive_some(1, 256);
  for (;; queries_parity ^= 1) {
    barrier_wait(at.queries_full, queries_parity);
    const Tile tile = at.tiles[queries_parity];
    if (tile.own < 0) break;
    const int last = tile.earliest + tile.own - 1;
    int dirty = tile.length - (tile.high - 1) * KEYS;  // values of the last keys from here on, up to the block's end
    const int clean = min((dirty + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE, KEYS);
    auto issue_scores = [&] {
      begin_matmuls();
#pragma unroll
      for (int k = 0; k < (HEAD + 15) / 16; k++) {
        const u64 a = queries + (k / 4 * QUERIES * 8 + k % 4 * 2);
        const u64 b = keys + (u64)(place.slot * (SLOT_BYTES / 16) + k / 4 * KEYS * 8 + k % 4 * 2);
        if (k == 0) multiply_keys<0>(rows.scores, a, b);
        else multiply_keys<1>(rows.scores, a, b);
      }
      end_matmuls();
    };
    auto issue_sums = [&] {
      barrier_wait(at.full + place.slot * 8, place.parity);
      if (!CODED && dirty < clean) {
        clear_values(at.ring + place.slot * SLOT_BYTES, dirty, clean, group);
        dirty = clean;
      }
      begin_matmuls();
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int d = 0; d < OWN; d += SUM_WIDTH)
          multiply_values(rows.sums + d / 2, rows.weights[k], values + (u64)(place.slot * (SLOT_BYTES / 16) + d / 64 * KEYS * 8 + k * 128));
      end_matmuls();
    };
    auto leave = [&](int slot) { if (lane == 0) barrier_arrive(at.empty + slot * 8); };
    auto weigh_tile = [&](int index, auto masked, float (&kept)[2]) {
      if (CAP) cap_scores(rows.scores, in.scale * 2.f * log2e / in.soft_cap, in.soft_cap);
      const int start = index * KEYS;
      if constexpr (decltype(masked)::value) {
        const int limit = tile.earliest - start - t * 2;
        mask(rows.scores, {limit + row / GROUP, limit + (row + 8) / GROUP}, in.window);
      }
      weigh(rows, kept, factor);
    };
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) rows.sums[i] = 0.f;
    rows.top[0] = rows.top[1] = __int_as_float(0xff800000);
    rows.total[0] = rows.total[1] = 0.f;
    float kept[2];
    barrier_wait(at.full + place.slot * 8, place.parity);
    issue_scores();
    await_matmuls<0>();
    pin(rows.scores);
    leave(place.slot);
    place.advance();
    if (tile.high - 1 == tile.low && lane == 0) barrier_arrive(at.queries_empty);
    weigh_tile(tile.high - 1, Index<1>{}, kept);
    round_weights(rows);
    auto step = [&](int index, auto masked) {
      barrier_wait(at.full + place.slot * 8, place.parity);
      if (CONSUMERS > 1) sync_some(1 + group, 256);
      issue_scores();
      const int slot = place.slot;
      place.advance();
      issue_sums();
      if (CONSUMERS > 1) arrive_some(1 + (group + 1) % CONSUMERS, 256);
      await_matmuls<1>();
      pin(rows.scores);
      if (index == tile.low && lane == 0) barrier_arrive(at.queries_empty);
      weigh_tile(index, masked, kept);
      // Sums are never below zero, but the compiler does not know it: else it would wait for the products first, and
      // make the weights after them.
      if (!(rows.total[0] + rows.total[1] < 0.f)) leave(slot);
      await_matmuls<0>();
      pin(rows.sums);
      pin(rows.scores);
      leave(place.slot);
      place.advance();
      rescale(rows, kept);
      round_weights(rows);
    };
    int index = tile.high - 2;
    for (; index >= tile.low && index * KEYS + KEYS - 1 > tile.earliest; index--) step(index, Index<1>{});
    const int whole = WINDOWED ? max(tile.low, (max(last - in.window + 1, 0) + KEYS - 1) / KEYS) : tile.low;
    for (; index >= whole; index--) step(index, Index<0>{});
    if (WINDOWED)
      for (; index >= tile.low; index--) step(index, Index<1>{});
    issue_sums();
    await_matmuls<0>();
    pin(rows.sums);
    leave(place.slot);
    place.advance();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      rows.total[r] += __shfl_xor_sync(~0u, rows.total[r], 1);
      rows.total[r] += __shfl_xor_sync(~0u, rows.total[r], 2);
    }
    if (join_parts(in, tile, rows, factor, row, side, t)) write_rows(in, tile, rows, factor, row, side, t);
  }
}

// Warpgroups hand one another registers of those that a block is launched with: for more they would wait forever.
static_assert(CONSUMERS * REGISTERS + PRODUCER_REGISTERS + DECODER_REGISTERS <= WARPGROUPS * (512 / (WARPGROUPS * BLOCKS) / 8 * 8));
#if CODED
#define CACHE_PARAMETERS const char* keys, const char* key_scales, const char* values, const char* value_scales
#else
#define CACHE_PARAMETERS const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values
#endif
extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128, BLOCKS)
NAME(const __grid_constant__ TensorMap queries, CACHE_PARAMETERS, const int* tile_rows, const int* tile_firsts,
     const int* starts, const int* counts, const int* contexts, const int* tables, const int* table_stride,
     const float* sinks, float* out, char* inputs, float* input_scales, int* next_tile, float4* parts, float* states,
     int* arrivals, float scale, float soft_cap, int window, int tiles, int kv_heads, int first_table, int out_stride, int block_tokens,
     int chunks, int most_parts, int in_fp8) {
  __shared__ __align__(8) u64 barriers[2 * SLOTS + 4 + 2 * CODE_SLOTS];
  __shared__ Tile two_tiles[2];
  __shared__ Span spans[CODED ? CODE_SLOTS : 1];
  Shared at;
  at.tiles = two_tiles;
  at.spans = spans;
  at.full = shared_address(barriers), at.empty = at.full + SLOTS * 8;
  at.queries_full = at.empty + SLOTS * 8, at.queries_empty = at.queries_full + 8, at.tiles_full = at.queries_empty + 8;
  at.queries = shared_address(ring), at.ring = at.queries + QUERY_BYTES;
  at.copied_full = CODED ? at.tiles_full + 16 : at.full, at.copied_empty = CODED ? at.copied_full + CODE_SLOTS * 8 : at.empty;
  at.copied = CODED ? at.ring + SLOTS * SLOT_BYTES : at.ring;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(at.full + i * 8, CACHE_ARRIVALS);
      barrier_init(at.empty + i * 8, CONSUMERS * 4);
    }
    barrier_init(at.queries_full, 1);
    barrier_init(at.queries_empty, CONSUMERS * 4);
    barrier_init(at.tiles_full, 1);
    barrier_init(at.tiles_full + 8, 1);
    for (int i = 0; i < CODE_SLOTS; i++) {
      barrier_init(at.copied_full + i * 8, 1);
      barrier_init(at.copied_empty + i * 8, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
#if CODED
  const Cache of_keys{keys, key_scales}, of_values{values, value_scales};
  if (E4M3) scale *= __ldg((const float*)key_scales);
#else
  const Cache of_keys{&keys}, of_values{&values};
#endif
  const Arguments in{&queries, of_keys, of_values, tile_rows, tile_firsts, starts, counts, contexts, tables,
                     table_stride, sinks, out, inputs, input_scales, next_tile, parts, states, arrivals, scale, soft_cap, window, tiles,
                     kv_heads, first_table, out_stride, block_tokens, chunks, most_parts, in_fp8};
  if (threadIdx.x >= 128) wait_for_previous();
  if (threadIdx.x < 128) {  // they find a first tile before they wait
    if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x < 32) copy_tiles(in, at, threadIdx.x);
    else if (threadIdx.x < 64) hand_out_tiles(in, at, threadIdx.x - 32);
#if CODED
  } else if (threadIdx.x >= (CONSUMERS + 1) * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(DECODER_REGISTERS));
    decode_tiles(at);
#endif
  } else {
    if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    attend_tiles(in, at);
  }
}
