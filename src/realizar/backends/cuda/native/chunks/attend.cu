// Attention of chunks on compute capability 9.0a. A tile has TOKENS tokens with the GROUP heads of a KV head each: rows
// for CONSUMERS warpgroups, 64 for each. One warp copies the tile's queries, and keys and values, KEYS at a time, into a
// ring. Keys are taken from the last to the first, from fixed places on, and those that a row does not see change no bit
// of it: so its bits depend on its own context alone. Blocks stay and take tile after tile, the longest context first.
// A cache of codes (CODED) is copied into a ring of its own, from which one more warpgroup makes halves.
// Defined around it: NAME HEAD GROUP TOKENS BLOCK_SIZE KEYS CONSUMERS SLOTS REGISTERS (of a consumer's thread, or 0)
// PRODUCER_REGISTERS DECODER_REGISTERS WINDOWED CAP SINKS CODED CODE_SLOTS SUM_WIDTH (dimensions of an instruction) TYPE_TEXT CONVERT_TEXT KEYS_TEXT
// SUM_TEXT, and for both instructions, SCORE and SUM, _LIST _INPUTS _OPERANDS: the accumulators, the other operands, and the
// accumulators' bindings.

// Runs of 64 dimensions, 128 bytes, as the copy engine interleaves them; it writes zeros behind a head.
constexpr int COLUMNS = (HEAD + 63) / 64;
constexpr int QUERIES = CONSUMERS * 64;
constexpr int ROWS = BLOCK_SIZE < KEYS ? BLOCK_SIZE : KEYS;  // keys of a copy
constexpr int COPIES = KEYS / ROWS * (CODED ? 1 : COLUMNS);
constexpr int SLOT_BYTES = KEYS * COLUMNS * 128, QUERY_BYTES = QUERIES * COLUMNS * 128;
constexpr int SCALES = (HEAD + 31) / 32, SCALES_AT = KEYS * HEAD;  // of a key's codes; behind all codes of a place
constexpr int CODE_SLOT_BYTES = CODED ? SCALES_AT + KEYS * SCALES * 2 : 0;
constexpr int WARPGROUPS = CONSUMERS + 1 + CODED, CACHE_ARRIVALS = CODED ? 4 : 1;
constexpr int NOWHERE = -1024;  // a row before the first: the copy engine writes zeros
static_assert(COPIES <= 32 && GROUP * TOKENS <= QUERIES && HEAD % 8 == 0);
static_assert(SUM_WIDTH == HEAD || (SUM_WIDTH % 64 == 0 && HEAD % SUM_WIDTH == 0));
static_assert(!CODED || ROWS * ((HEAD + 31) / 32) % 8 == 0);  // the copy engine takes runs of 16 bytes

struct __align__(64) TensorMap { char bytes[128]; };
struct Tile { int own, token, earliest, kv_head, low, high, length; };  // own: tokens; -1 is the end
struct Span { int from, to; };  // keys of a place that a tile may see; to -1 is the end

INLINE void copy_box(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
INLINE void copy_heads(u32 to, const TensorMap* map, int x, int head, int token, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(x), "r"(head), "r"(token), "r"(barrier) : "memory");
}
INLINE float power2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
INLINE u32 pair(float low, float high) { u32 r; asm(CONVERT_TEXT " %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }

// c = a * b, or c += a * b; both operands in shared memory, rows of dimensions
template <int ADD> INLINE void multiply_keys(float (&c)[KEYS / 2], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" KEYS_TEXT "k16.f32." TYPE_TEXT " {" SCORE_LIST "}, " SCORE_INPUTS ", 1, 1, 0, 0;" : SCORE_OPERANDS : "l"(a), "l"(b), "n"(ADD));
}
// c += a * b; a from registers, b in shared memory, rows of keys
INLINE void multiply_values(float* c, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" SUM_TEXT "k16.f32." TYPE_TEXT " {" SUM_LIST "}, " SUM_INPUTS ", 1, 1, 1, 1;" : SUM_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Nothing that reads or writes these moves across.
template <int N> INLINE void pin(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}
INLINE void begin_matmuls() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void end_matmuls() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> INLINE void await_matmuls() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
INLINE void sync_some(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
INLINE void arrive_some(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// A descriptor of shared memory of rows of 128 bytes, interleaved by the copy engine in eights; `columns_apart`: bytes.
INLINE u64 descriptor(u32 at, u32 columns_apart) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(columns_apart >> 4) << 16 | (at & 0x3ffff) >> 4;
}

template <int PLACES> struct Place {  // in a ring
  int slot = 0, parity = 0;
  INLINE void advance() { if (++slot == PLACES) { slot = 0; parity ^= 1; } }
};

// Keys or values of a layer: what maps them; or their codes [blocks, KV heads, block size, head], and scales.
#if CODED
struct Cache { const char *codes, *scales; };
#else
struct Cache { const TensorMap* map; };
#endif

struct Arguments {
  const TensorMap* queries;
  Cache keys, values;
  const int *tile_rows, *tile_firsts, *starts, *counts, *contexts, *tables, *table_stride;
  const float* sinks;
  float* out;
  char* halves;  // or null
  float* half_scales;
  int* next_tile;
  float scale, soft_cap;
  int window, tiles, kv_heads, first_table, out_stride, block_tokens, chunks;
};

// What warpgroups hand one another, in shared memory: addresses of barriers and of rings. Of a cache of codes `copied`
// is the ring of codes, `full` and `empty` are of the ring of halves.
struct Shared {
  Tile* tile;
  Span* spans;
  u32 full, empty, queries_full, queries_empty, copied_full, copied_empty, ring, queries, copied;
};

// The producer warp. `next_tile` is 0, and left so.
INLINE void copy_tiles(const Arguments& in, const Shared& at, int lane) {
  const int part = CODED ? lane : lane / COLUMNS;
  int live = 0;
  for (int i = lane; i - lane < in.tiles; i += 32)
    live += __popc(__ballot_sync(~0u, i < in.tiles && load_int(in.tile_rows + i) >= 0));
  Place<CODED ? CODE_SLOTS : SLOTS> place;
  int queries_parity = 1;
  auto take = [&] { return lane == 0 ? atomicAdd(in.next_tile, 1) : 0; };
  int next = take();
  for (;;) {
    const int work = __shfl_sync(~0u, next, 0), total = live * in.kv_heads;
    if (work >= total) {
      if (lane == 0 && work == total + (int)gridDim.x - 1) *in.next_tile = 0;  // the last of all
      break;
    }
    next = take();
    const int index = work / in.kv_heads, kv_head = work % in.kv_heads;
    const int row = load_int(in.tile_rows + index), offset = load_int(in.tile_firsts + index);
    const int count = load_int(in.counts + row), length = load_int(in.contexts + row);
    const int earliest = length - count + offset, last = min(earliest + TOKENS, length);
    const int first = WINDOWED ? max(earliest - in.window + 1, 0) : 0;
    const int low = first / KEYS, high = (last + KEYS - 1) / KEYS;
    const int* table = in.tables + (long)(in.first_table + row) * load_int(in.table_stride);
    auto cache_row = [&](int tile) {  // of this lane's copy
      const int key = tile * KEYS + part * ROWS;
      if (lane >= COPIES || tile < low || key >= length || key + ROWS <= first) return NOWHERE;
      return (load_int(table + key / BLOCK_SIZE) * in.kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
    };
    auto fill = [&](const Cache& cache, int y, int tile) {
      barrier_wait(at.copied_empty + place.slot * 8, place.parity ^ 1);
      const u32 barrier = at.copied_full + place.slot * 8;
#if CODED
      const u32 to = at.copied + place.slot * CODE_SLOT_BYTES;
      const int copies = __popc(__ballot_sync(~0u, y >= 0));
      if (lane == 0) {
        at.spans[place.slot] = {first - tile * KEYS, length - tile * KEYS};
        barrier_expect(barrier, copies * ROWS * (HEAD + SCALES * 2));
      }
      __syncwarp();
      if (y >= 0) {
        copy_bulk(to + part * ROWS * HEAD, cache.codes + (long)y * HEAD, ROWS * HEAD, barrier);
        copy_bulk(to + SCALES_AT + part * ROWS * SCALES * 2, cache.scales + (long)y * SCALES * 2, ROWS * SCALES * 2, barrier);
      }
#else
      if (lane == 0) barrier_expect(barrier, SLOT_BYTES);
      __syncwarp();
      if (lane < COPIES) copy_box(at.copied + place.slot * SLOT_BYTES + (lane % COLUMNS * KEYS + part * ROWS) * 128, cache.map, lane % COLUMNS * 64, y, barrier);
#endif
      place.advance();
    };
    int y = cache_row(high - 1), ahead = cache_row(high - 2);
    fill(in.keys, y, high - 1);
    barrier_wait(at.queries_empty, queries_parity);
    queries_parity ^= 1;
    if (lane == 0) {
      const int token = load_int(in.starts + row) + offset;
      *at.tile = {min(TOKENS, count - offset), token, earliest, kv_head, low, high, length};
      barrier_expect(at.queries_full, COLUMNS * GROUP * TOKENS * 128);
      for (int c = 0; c < COLUMNS; c++)
        copy_heads(at.queries + c * QUERIES * 128, in.queries, c * 64, kv_head * GROUP, token, at.queries_full);
    }
#pragma unroll 1
    for (int tile = high - 2; tile >= low; tile--) {
      const int above = y;
      y = ahead;
      ahead = cache_row(tile - 1);
      fill(in.keys, y, tile);
      fill(in.values, above, tile + 1);
    }
    fill(in.values, y, low);
  }
  barrier_wait(at.queries_empty, queries_parity);
  if (CODED) barrier_wait(at.copied_empty + place.slot * 8, place.parity ^ 1);
  if (lane == 0) {
    at.tile->own = -1;
    barrier_arrive(at.queries_full);
    if (CODED) {
      at.spans[place.slot].to = -1;
      barrier_arrive(at.copied_full + place.slot * 8);
    }
  }
}

#if CODED
// Eight codes times a scale, twice in a word, as halves: rounded once, since the codes' integers are halves too.
INLINE uint4 decoded(uint2 codes, u32 scale) {
  uint4 r;
  const u32 low = codes.x ^ 0x80808080u, high = codes.y ^ 0x80808080u;
  // A byte below 0x64 is 1,024 more than it; and it is 128 more than the code.
  r.x = mul2(add2(permute(low, 0x64646464, 0x4140), 0xe480e480u), scale);
  r.y = mul2(add2(permute(low, 0x64646464, 0x4342), 0xe480e480u), scale);
  r.z = mul2(add2(permute(high, 0x64646464, 0x4140), 0xe480e480u), scale);
  r.w = mul2(add2(permute(high, 0x64646464, 0x4342), 0xe480e480u), scale);
  return r;
}

// The warpgroup between the rings. A thread has the same eight dimensions of every few keys; keys that the tile does not
// see, and dimensions behind a head, become zeros.
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
          scale[i] = seen ? *(const u16*)(scales + key * SCALES * 2) : 0;
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

// What a thread of a consumer has: of two rows, 8 apart, the running softmax, and two neighbouring columns in eight.
struct Rows {
  float top[2], total[2];
  float sums[HEAD / 2];
  float scores[KEYS / 2];
  u32 weights[KEYS / 16][4];
};

INLINE void cap_scores(float (&scores)[KEYS / 2], float factor, float cap) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) scores[i] = cap - __fdividef(2.f * cap, power2(scores[i] * factor) + 1.f);
}

// `limit`: the last key that the first row sees, from this thread's first column on.
INLINE void mask(float (&scores)[KEYS / 2], const int (&limit)[2], int window) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    const int key = i / 4 * 8 + i % 2, to = limit[i / 2 % 2];
    if (key > to || (WINDOWED && key <= to - window)) scores[i] = __int_as_float(0xff800000);
  }
}

// New largest scores, and weights in place of scores. `factor` makes scores exponents of 2.
INLINE void weigh(Rows& rows, float (&kept)[2], float factor) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = rows.top[r];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      if (i / 2 % 2 == r) top = fmaxf(top, rows.scores[i]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float reference = top == __int_as_float(0xff800000) ? 0.f : top, subtracted = reference * factor;
    kept[r] = power2((rows.top[r] - reference) * factor);
    rows.top[r] = top;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      if (i / 2 % 2 == r) {
        rows.scores[i] = power2(fmaf(rows.scores[i], factor, -subtracted));
        total += rows.scores[i];
      }
    rows.total[r] = rows.total[r] * kept[r] + total;
  }
}

INLINE void round_weights(Rows& rows) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) rows.weights[i / 4][i % 4] = pair(rows.scores[i * 2], rows.scores[i * 2 + 1]);
}

INLINE void rescale(Rows& rows, const float (&kept)[2]) {
  if (__all_sync(~0u, kept[0] == 1.f && kept[1] == 1.f)) return;  // as they mostly are
#pragma unroll
  for (int i = 0; i < HEAD / 2; i++) rows.sums[i] *= kept[i / 2 % 2];
}

// Zeros in the place of values that no token of the row has written yet: what was there may be no number.
INLINE void clear_values(u32 at, int from, int to, int group) {
  for (int i = threadIdx.x % 128; i < (to - from) * COLUMNS * 8; i += 128) {
    const int row = from + i / (COLUMNS * 8), column = i / 8 % COLUMNS;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at + (column * KEYS + row) * 128 + i % 8 * 16), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_some(1 + CONSUMERS + group, 128);
}

// Two values as halves, the first of them low: means of the cache's values, which are cut to what a half can hold in
// place of becoming infinite. A NaN stays one.
INLINE u32 half_pair(float low, float high) {
  u32 r;
  asm("{.reg .f32 l, h;\n"
      "min.NaN.f32 l, %1, 0f477fe000;\nmax.NaN.f32 l, l, 0fc77fe000;\n"
      "min.NaN.f32 h, %2, 0f477fe000;\nmax.NaN.f32 h, h, 0fc77fe000;\n"
      "cvt.rn.f16x2.f32 %0, h, l;}" : "=r"(r) : "f"(low), "f"(high));
  return r;
}

// A row of a head as the next matmul's halves (layouts.activations). Lanes t and t ^ 1 have the columns of runs of 16
// bytes between them, and each writes every other one. `own`: it is a token's.
INLINE void write_halves(const Arguments& in, const float (&sums)[HEAD / 2], int r, float kept, int token, int head,
                         int t, bool own) {
  const bool odd = t % 2;
  const int block = in.block_tokens, column = head * (HEAD / 64);
  const long first = ((long)(token / block) * in.chunks + column) * block + token % block / 8;
  char* to = in.halves + first * 128 + token % 8 * 16 + (t / 2 * 2 + odd) * (block * 16);
#pragma unroll
  for (int c = 0; c < HEAD / 64; c++)
#pragma unroll
    for (int p = 0; p < 2; p++) {  // of sixteen columns the first eight, and the others
      u32 words[4];
#pragma unroll
      for (int s = 0; s < 2; s++) {  // 32 columns
        const float* x = sums + ((c * 8 + s * 4 + p) * 4 + r * 2);
        const u32 even_run = half_pair(x[0] * kept, x[8] * kept), odd_run = half_pair(x[1] * kept, x[9] * kept);
        const u32 other = __shfl_xor_sync(~0u, odd ? even_run : odd_run, 1);
        const u32 low = odd ? other : even_run, high = odd ? odd_run : other;
        words[s * 2] = permute(low, high, 0x5410);
        words[s * 2 + 1] = permute(low, high, 0x7632);
      }
      if (own) *(uint4*)(to + (c * 8 + p * 4) * (long)(block * 16)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  if (own && head == 0 && t == 0) in.half_scales[token] = 1.f;
}

INLINE void write_rows(const Arguments& in, const Tile& tile, Rows& rows, float factor, int row, int t) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int at = row + r * 8, head = tile.kv_head * GROUP + at % GROUP, token = tile.token + at / GROUP;
    const bool own = at < tile.own * GROUP;
    float total = rows.total[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    float kept = 1.f;
    if (SINKS && own) {
      const float sink = load_float(in.sinks + head) * 1.4426950408889634f, top = rows.top[r] * factor;
      const float higher = fmaxf(top, sink);
      kept = power2(top - higher);
      total = total * kept + power2(sink - higher);
    }
    kept = kept / (total > 0.f ? total : 1.f);
    if constexpr (HEAD % 64 == 0)
      if (in.halves) {
        write_halves(in, rows.sums, r, kept, token, head, t, own);
        continue;
      }
    float* to = in.out + (long)token * in.out_stride + head * HEAD + t * 2;
    if (own)
#pragma unroll
      for (int i = 0; i < HEAD / 8; i++)
        *(float2*)(to + i * 8) = make_float2(rows.sums[i * 4 + r * 2] * kept, rows.sums[i * 4 + r * 2 + 1] * kept);
  }
}

// A warpgroup. Warpgroups issue their products in turn: the softmax of one runs beside the products of another.
INLINE void attend_tiles(const Arguments& in, const Shared& at) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
  const int row = group * 64 + warp * 16 + lane / 4;
  const float log2e = 1.4426950408889634f;
  const float factor = CAP ? log2e : in.scale * log2e;
  const u64 queries = descriptor(at.queries + group * 64 * 128, 0);
  const u64 keys = descriptor(at.ring, 0), values = descriptor(at.ring, KEYS * 128);
  Place<SLOTS> place;
  int queries_parity = 0;
  Rows rows;
  if (CONSUMERS > 1 && group == 0) arrive_some(1, 256);
  for (;; queries_parity ^= 1) {
    barrier_wait(at.queries_full, queries_parity);
    const Tile tile = *at.tile;
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
        for (int d = 0; d < HEAD; d += SUM_WIDTH)
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
    for (int i = 0; i < HEAD / 2; i++) rows.sums[i] = 0.f;
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
    write_rows(in, tile, rows, factor, row, t);
  }
}

// Warpgroups hand one another registers of those that a block is launched with: for more they would wait forever.
static_assert(CONSUMERS * REGISTERS + PRODUCER_REGISTERS + DECODER_REGISTERS <= WARPGROUPS * (512 / WARPGROUPS / 8 * 8));
#if CODED
#define CACHE_PARAMETERS const char* keys, const char* key_scales, const char* values, const char* value_scales
#else
#define CACHE_PARAMETERS const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values
#endif
extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128, 1)
NAME(const __grid_constant__ TensorMap queries, CACHE_PARAMETERS, const int* tile_rows, const int* tile_firsts,
     const int* starts, const int* counts, const int* contexts, const int* tables, const int* table_stride,
     const float* sinks, float* out, char* halves, float* half_scales, int* next_tile, float scale, float soft_cap,
     int window, int tiles, int kv_heads, int first_table, int out_stride, int block_tokens, int chunks) {
  __shared__ __align__(8) u64 barriers[2 * SLOTS + 2 + 2 * CODE_SLOTS];  // of rings full, then empty; of the queries between
  __shared__ Tile tile;
  __shared__ Span spans[CODED ? CODE_SLOTS : 1];
  Shared at;
  at.tile = &tile;
  at.spans = spans;
  at.full = shared_address(barriers), at.empty = at.full + SLOTS * 8;
  at.queries_full = at.empty + SLOTS * 8, at.queries_empty = at.queries_full + 8;
  at.queries = shared_address(ring), at.ring = at.queries + QUERY_BYTES;
  at.copied_full = CODED ? at.queries_empty + 8 : at.full, at.copied_empty = CODED ? at.copied_full + CODE_SLOTS * 8 : at.empty;
  at.copied = CODED ? at.ring + SLOTS * SLOT_BYTES : at.ring;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(at.full + i * 8, CACHE_ARRIVALS);
      barrier_init(at.empty + i * 8, CONSUMERS * 4);
    }
    barrier_init(at.queries_full, 1);
    barrier_init(at.queries_empty, CONSUMERS * 4);
    for (int i = 0; i < CODE_SLOTS; i++) {
      barrier_init(at.copied_full + i * 8, 1);
      barrier_init(at.copied_empty + i * 8, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
#if CODED
  const Cache of_keys{keys, key_scales}, of_values{values, value_scales};
#else
  const Cache of_keys{&keys}, of_values{&values};
#endif
  const Arguments in{&queries, of_keys, of_values, tile_rows, tile_firsts, starts, counts, contexts, tables,
                     table_stride, sinks, out, halves, half_scales, next_tile, scale, soft_cap, window, tiles, kv_heads,
                     first_table, out_stride, block_tokens, chunks};
  if (threadIdx.x < 128) {
    if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x < 32) copy_tiles(in, at, threadIdx.x);
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
