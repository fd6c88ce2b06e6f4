// What feeds the warpgroups that attend: one warp hands out tiles, one copies keys and values, and a warpgroup makes
// halves of codes. Before it: rows.cu.

// What warps hand one another, in shared memory: addresses of barriers and of rings. Of a cache of codes `copied` is
// the ring of codes, `full` and `empty` are of the ring of halves.
struct Shared {
  Tile* tiles;  // two: what is copied may be one ahead of what is attended
  Span* spans;
  u32 full, empty, queries_full, queries_empty, tiles_full, copied_full, copied_empty, ring, queries, copied;
};

INLINE int parts_of(int blocks, int length, float inverse) { return (int)((blocks + length - 0.5f) * inverse); }

// How long parts of contexts are at most, in blocks, and how many parts there are in all. Too few tiles for the card
// are cut so that its last round is full; `live` tiles, a warp, of which each lane tries another number of parts.
struct Cut { int length, total; };
INLINE Cut cut_contexts(const Arguments& in, int live, int lane) {
  const int grid = gridDim.x;
  const Cut whole{1 << 30, live};
  if (live * in.kv_heads >= FEW_ROUNDS * grid || live == 0) return whole;
  int longest = 0;
  for (int i = lane; i < live; i += 32) {
    const Seen seen = seen_by(in, i);
    longest = max(longest, seen.high - seen.low);
  }
  longest = __reduce_max_sync(~0u, longest);
  if (longest < 2 * LEAST_PART) return whole;
  const int length = max((longest + lane) / (lane + 1), LEAST_PART);
  const float inverse = 1.f / length;
  int total = 0;
  for (int first = 0; first < live; first += 32) {
    int blocks = 0;
    if (first + lane < live) {
      const Seen seen = seen_by(in, first + lane);
      blocks = seen.high - seen.low;
    }
    for (int i = 0; i < min(live - first, 32); i++) total += parts_of(__shfl_sync(~0u, blocks, i), length, inverse);
  }
  const int rounds = (total * in.kv_heads + grid - 1) / grid;
  u32 cost = (u32)(rounds * (length + PART_COST)) << 5 | lane;
  if (total * in.kv_heads > (lane ? in.most_parts : 1 << 30)) cost = ~0u;
  const int best = __reduce_min_sync(~0u, cost) & 31;
  return {__shfl_sync(~0u, length, best), __shfl_sync(~0u, total, best)};
}

// Hands a tile, or a part of one, to the warps that copy and attend, and copies its queries.
struct Handing {
  const Arguments& in;
  const Shared& at;
  const int lane;
  int turn = 0;
  INLINE void hand(const Tile& tile) {
    if (lane == 0) {
      at.tiles[turn] = tile;
      barrier_arrive(at.tiles_full + turn * 8);
    }
    barrier_wait(at.queries_empty, turn ^ 1);
    wait_for_previous();
    if (lane == 0) {
      barrier_expect(at.queries_full, COLUMNS * GROUP * TOKENS * 128);
      for (int c = 0; c < COLUMNS; c++)
        copy_heads(at.queries + c * QUERIES * 128, in.queries, c * 64, tile.kv_head * GROUP, tile.token,
                   at.queries_full);
    }
    turn ^= 1;
  }
  INLINE void end() {
    if (lane == 0) {
      at.tiles[turn].own = -1;
      barrier_arrive(at.tiles_full + turn * 8);
    }
    barrier_wait(at.queries_empty, turn ^ 1);
    if (lane == 0) barrier_arrive(at.queries_full);
  }
  // Parts at fixed places, every `step`-th from the last on.
  INLINE void hand_parts(Tile tile, int from, int step) {
    const int low = tile.low, high = tile.high, first = low / FIXED;
    tile.parts = (high + FIXED - 1) / FIXED - first;
    for (tile.part = tile.parts - 1 - from; tile.part >= 0; tile.part -= step) {
      tile.low = max(low, (first + tile.part) * FIXED), tile.high = min(high, (first + tile.part + 1) * FIXED);
      hand(tile);
    }
  }
};

#if ALONE
// The same for a single token, a KV head, and some parts. `tile_rows` has a token's row, place in the step, context and
// position.
INLINE void hand_out_tiles(const Arguments& in, const Shared& at, int lane) {
  Handing handing{in, at, lane};
  const uint4 own = load16(in.tile_rows + blockIdx.x * 4);
  const int row = own.x, token = own.y, length = own.z, decode = blockIdx.x, kv_head = blockIdx.y;
  const int low = (WINDOWED ? max(length - in.window, 0) : 0) / KEYS, high = (length + KEYS - 1) / KEYS;
  if (row >= 0)
    handing.hand_parts({1, token, length - 1, kv_head, low, high, length, row, decode, 0, 0}, blockIdx.z, gridDim.z);
  handing.end();
}
#else
// The warp that hands out tiles. A block's first one follows from its number, so that it is found before the kernel
// before has ended, from the step's own arrays; `next_tile` counts further ones. It is 0, and left so.
INLINE void hand_out_tiles(const Arguments& in, const Shared& at, int lane) {
  int live = 0;
  for (int i = lane; i - lane < in.tiles; i += 32)
    live += __popc(__ballot_sync(~0u, i < in.tiles && load_int(in.tile_rows + i) >= 0));
  const Cut cut = FIXED ? Cut{1 << 30, live} : cut_contexts(in, live, lane);
  const float inverse = 1.f / cut.length;
  const int total = cut.total * in.kv_heads;
  auto take = [&] { return lane == 0 ? atomicAdd(in.next_tile, 1) : 0; };
  Handing handing{in, at, lane};
  for (int work = blockIdx.x, next = 0; work < total; work = gridDim.x + __shfl_sync(~0u, next, 0)) {
    const bool first_tile = work == blockIdx.x;
    if (!first_tile) next = take();
    const int place = work / in.kv_heads, kv_head = work % in.kv_heads;
    int index = place, part = 0, parts = 1;
    if (cut.total > live) {
      int before = 0;
      for (int first = 0;; first += 32) {
        int own = 0;
        if (first + lane < live) {
          const Seen seen = seen_by(in, first + lane);
          own = parts_of(seen.high - seen.low, cut.length, inverse);
        }
        int upto = own;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
          const int other = __shfl_up_sync(~0u, upto, i);
          if (lane >= i) upto += other;
        }
        const u32 behind = __ballot_sync(~0u, before + upto > place);
        if (behind) {
          const int found = __ffs(behind) - 1;
          index = first + found;
          parts = __shfl_sync(~0u, own, found);
          part = place - before - __shfl_sync(~0u, upto - own, found);
          break;
        }
        before += __shfl_sync(~0u, upto, 31);
      }
    }
    const Seen seen = seen_by(in, index);
    const int token = load_int(in.starts + seen.row) + seen.offset;
    const int length = (seen.high - seen.low + parts - 1) / parts, low = seen.low + part * length;
    const Tile tile{min(TOKENS, seen.count - seen.offset), token, seen.length - seen.count + seen.offset, kv_head, low,
                    min(low + length, seen.high), seen.length, seen.row, work, part, parts};
    if constexpr (FIXED > 0) handing.hand_parts(tile, 0, 1);
    else handing.hand(tile);
    if (first_tile) next = take();
    if (lane == 0 && next == total - 1) *in.next_tile = 0;  // each tile takes another number: this is the last
  }
  handing.end();
}
#endif

// The warp that copies keys and values.
INLINE void copy_tiles(const Arguments& in, const Shared& at, int lane) {
  const int part = CODED ? lane : lane / COLUMNS;
  Place<CODED ? CODE_SLOTS : SLOTS> place;
  int turn = 0, parity = 0;
  for (;; parity ^= turn, turn ^= 1) {
    barrier_wait(at.tiles_full + turn * 8, parity);
    const Tile tile = at.tiles[turn];
    if (tile.own < 0) break;
    const int first = WINDOWED ? max(tile.earliest - in.window + 1, 0) : 0;
    const int* table = in.tables + (long)(in.first_table + tile.row) * load_int(in.table_stride);
    auto cache_row = [&](int index) {  // of this lane's copy
      const int key = index * KEYS + part * ROWS;
      if (lane >= COPIES || index < tile.low || key >= tile.length || key + ROWS <= first) return NOWHERE;
      return (load_int(table + key / BLOCK_SIZE) * in.kv_heads + tile.kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
    };
    auto fill = [&](const Cache& cache, int y, int index) {
      barrier_wait(at.copied_empty + place.slot * 8, place.parity ^ 1);
      const u32 barrier = at.copied_full + place.slot * 8;
#if CODED
      constexpr int SCALES_BYTES = ROWS * SCALES * 2;
      const u32 to = at.copied + place.slot * CODE_SLOT_BYTES;
      const int copies = __popc(__ballot_sync(~0u, y >= 0));
      if (lane == 0) {
        at.spans[place.slot] = {first - index * KEYS, tile.length - index * KEYS};
        barrier_expect(barrier, copies * (ROWS * HEAD + SCALES_BYTES));
      }
      __syncwarp();
      if (y >= 0) {
        copy_bulk(to + part * ROWS * HEAD, cache.codes + (long)y * HEAD, ROWS * HEAD, barrier);
        const char* scales = cache.scales + (long)y * SCALES * 2;
        if (SCALES) copy_bulk(to + SCALES_AT + part * SCALES_BYTES, scales, SCALES_BYTES, barrier);
      }
#else
      if (lane == 0) barrier_expect(barrier, SLOT_BYTES);
      __syncwarp();
      const int column = lane % COLUMNS;
      if (lane < COPIES)
        copy_box(at.copied + place.slot * SLOT_BYTES + (column * KEYS + part * ROWS) * 128, cache.map, column * 64, y,
                 barrier);
#endif
      place.advance();
    };
    int y = cache_row(tile.high - 1), ahead = cache_row(tile.high - 2);
    wait_for_previous();
    fill(in.keys, y, tile.high - 1);
#pragma unroll 1
    for (int index = tile.high - 2; index >= tile.low; index--) {
      const int above = y;
      y = ahead;
      ahead = cache_row(index - 1);
      fill(in.keys, y, index);
      fill(in.values, above, index + 1);
    }
    fill(in.values, y, tile.low);
  }
#if CODED
  barrier_wait(at.copied_empty + place.slot * 8, place.parity ^ 1);
  if (lane == 0) {
    at.spans[place.slot].to = -1;
    barrier_arrive(at.copied_full + place.slot * 8);
  }
#endif
}

#if CODED
// Eight codes as halves: of E4M3, whose scale is left to scores and sums; or times a scale, twice in a word, rounded
// once, since the codes' integers are halves too.
INLINE uint4 decoded(uint2 codes, u32 scale) {
  uint4 r;
#if E4M3
  auto two = [](u32& low, u32& high, u32 bytes) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high) : "r"(bytes));
  };
  two(r.x, r.y, codes.x);
  two(r.z, r.w, codes.y);
  return r;
#endif
  const u32 low = codes.x ^ 0x80808080u, high = codes.y ^ 0x80808080u;
  // A byte below 0x64 is 1,024 more than it; and it is 128 more than the code.
  r.x = mul2(add2(permute(low, 0x64646464, 0x4140), 0xe480e480u), scale);
  r.y = mul2(add2(permute(low, 0x64646464, 0x4342), 0xe480e480u), scale);
  r.z = mul2(add2(permute(high, 0x64646464, 0x4140), 0xe480e480u), scale);
  r.w = mul2(add2(permute(high, 0x64646464, 0x4342), 0xe480e480u), scale);
  return r;
}

// The warpgroup between the rings. A thread has the same eight dimensions of every few keys; keys that the tile does
// not see, and dimensions behind a head, become zeros.
INLINE void decode_tiles(const Shared& at) {
  constexpr int RUNS = HEAD % 128 ? 8 : 16, STEP = 128 / RUNS, AT_ONCE = 4;
  static_assert(STEP % 8 == 0 && KEYS % (STEP * AT_ONCE) == 0);
  const int thread = threadIdx.x % 128, own = thread / RUNS, run = thread % RUNS;
  Place<CODE_SLOTS> from;
  Place<SLOTS> to;
  for (;;) {
    barrier_wait(at.copied_full + from.slot * 8, from.parity);
    const Span span = at.spans[from.slot];
    if (span.to < 0) break;
    barrier_wait(at.empty + to.slot * 8, to.parity ^ 1);
    const char* codes = ring + (at.copied - at.queries) + from.slot * CODE_SLOT_BYTES;
    char* halves = ring + (at.ring - at.queries) + to.slot * SLOT_BYTES;
#pragma unroll
    for (int r = 0; r < COLUMNS * 8; r += RUNS) {
      const int dim = (r + run) * 8;
      if (dim >= (HEAD + 15) / 16 * 16) break;
      char* written = halves + (dim / 64 * KEYS + own) * 128 + ((dim / 8 ^ own) & 7) * 16;
      const char* read = codes + own * HEAD + dim;
      const char* scales = codes + SCALES_AT + (own * SCALES + dim / 32) * 2;
#pragma unroll
      for (int first = 0; first < KEYS; first += STEP * AT_ONCE) {
        uint2 words[AT_ONCE];
        u32 scale[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const int key = first + i * STEP;
          const bool seen = own + key >= span.from && own + key < span.to && dim < HEAD;
          words[i] = seen ? *(const uint2*)(read + key * HEAD) : make_uint2(0, 0);
          scale[i] = SCALES && seen ? *(const u16*)(scales + key * SCALES * 2) : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          *(uint4*)(written + (first + i * STEP) * 128) = decoded(words[i], permute(scale[i], 0, 0x1010));
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(at.full + to.slot * 8);
      barrier_arrive(at.copied_empty + from.slot * 8);
    }
    from.advance();
    to.advance();
  }
}
#endif
