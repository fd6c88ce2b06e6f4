// What both kernels for attention of chunks have: tiles, the softmax of their rows, and how results leave.

// A part of a tile: `own` of the step's tokens from `token` on, or -1 at the end; blocks of keys from `low` up to
// `high`. `work` counts parts: those of a tile with the same KV head are `kv_heads` apart. At fixed places it counts
// what parts are of.
struct Tile { int own, token, earliest, kv_head, low, high, length, row, work, part, parts; };

struct Arguments {
  Queries queries;
  Cache keys, values;
  const int *tile_rows, *tile_firsts, *starts, *counts, *contexts, *tables, *table_stride;
  const float* sinks;
  float* out;
  char* inputs;  // of the next matmul, or null
  float* input_scales;
  int* next_tile;
  float4* parts;
  float* states;
  int* arrivals;
  float scale, soft_cap;
  int window, tiles, kv_heads, first_table, out_stride, block_tokens, chunks, most_parts, in_fp8;
};

// What of the cache a tile sees, in blocks of KEYS.
struct Seen { int row, offset, count, length, low, high; };
INLINE Seen seen_by(const Arguments& in, int index) {
  Seen r;
  r.row = load_int(in.tile_rows + index), r.offset = load_int(in.tile_firsts + index);
  r.count = load_int(in.counts + r.row), r.length = load_int(in.contexts + r.row);
  const int earliest = r.length - r.count + r.offset;
  r.low = (WINDOWED ? max(earliest - in.window + 1, 0) : 0) / KEYS;
  r.high = (min(earliest + TOKENS, r.length) + KEYS - 1) / KEYS;
  return r;
}

INLINE u32 pair(float low, float high) {
  u32 r;
  asm(CONVERT_TEXT " %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// What a thread has: of two rows, 8 apart, the running softmax, and two neighbouring columns in eight.
struct Rows {
  float top[2], total[2];
  float sums[OWN / 2];
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
  if (SKIPS && __all_sync(~0u, kept[0] == 1.f && kept[1] == 1.f)) return;  // as they mostly are
#pragma unroll
  for (int i = 0; i < OWN / 2; i++) rows.sums[i] *= kept[i / 2 % 2];
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
INLINE void write_halves(const Arguments& in, const float (&sums)[OWN / 2], int r, float kept, int token, int head,
                         int side, int t, bool own) {
  const bool odd = t % 2;
  const int block = in.block_tokens, column = (head * HEAD + side * OWN) / 64;
  const long first = ((long)(token / block) * in.chunks + column) * block + token % block / 8;
  char* to = in.inputs + first * 128 + token % 8 * 16 + (t / 2 * 2 + odd) * (block * 16);
#pragma unroll
  for (int c = 0; c < OWN / 64; c++)
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
      char* at = to + (c * 8 + p * 4) * (long)(block * 16);
      if (own) *(uint4*)at = make_uint4(words[0], words[1], words[2], words[3]);
    }
  if (own && head == 0 && side == 0 && t == 0) in.input_scales[token] = 1.f;
}

// The same as its 8-bit floats: 128 columns, which four lanes have, share a scale.
INLINE void write_e4m3(const Arguments& in, const float (&sums)[OWN / 2], int r, float kept, int token, int head,
                       int side, int t, bool own) {
  const int block = in.block_tokens, row = token % block;
  const long first = (long)(token / block) * (in.chunks / 2) + (head * HEAD + side * OWN) / 128;
#pragma unroll
  for (int c = 0; c < OWN / 128; c++) {
    const float* x = sums + c * 64 + r * 2;  // two columns of every eight
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) top = fmaxf(top, fmaxf(fabsf(x[i * 4]), fabsf(x[i * 4 + 1])));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * kept, 1e-30f);
    const float factor = 448.f / top * kept;
    if (own && t == 0) in.input_scales[(first + c) * block + scale_place(row)] = top / 448.f;
    char* to = in.inputs + (first + c) * (block * 128) + row * 16 + t * (block * 16);
#pragma unroll
    for (int h = 0; h < 2; h++) {  // 64 columns
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* y = x + (h * 8 + i * 2) * 4;
        words[i] = e4m3_pair(y[0] * factor, y[1] * factor) | e4m3_pair(y[4] * factor, y[5] * factor) << 16;
      }
      const uint4 columns = sixteen_columns(words, t);
      if (own) *(uint4*)(to + h * (block * 64)) = columns;
    }
  }
}

INLINE void write_rows(const Arguments& in, const Tile& tile, Rows& rows, float factor, int row, int side, int t) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int at = row + r * 8, head = tile.kv_head * GROUP + at % GROUP, token = tile.token + at / GROUP;
    const bool own = at < tile.own * GROUP;
    float total = rows.total[r], kept = 1.f;
    if (SINKS && own) {
      const float sink = load_float(in.sinks + head) * 1.4426950408889634f, top = rows.top[r] * factor;
      const float higher = fmaxf(top, sink);
      kept = power2(top - higher);
      total = total * kept + power2(sink - higher);
    }
    kept = kept / (total > 0.f ? total : 1.f);
#if E4M3
    kept *= __ldg((const float*)in.values.scales);
#endif
    if constexpr (IN_FP8 && OWN % 128 == 0)
      if (in.in_fp8) {
        write_e4m3(in, rows.sums, r, kept, token, head, side, t, own);
        continue;
      }
    if constexpr (OWN % 64 == 0)
      if (in.inputs) {
        write_halves(in, rows.sums, r, kept, token, head, side, t, own);
        continue;
      }
    float* to = in.out + (long)token * in.out_stride + head * HEAD + side * OWN + t * 2;
    if (own)
#pragma unroll
      for (int i = 0; i < OWN / 8; i++)
        *(float2*)(to + i * 8) = make_float2(rows.sums[i * 4 + r * 2] * kept, rows.sums[i * 4 + r * 2 + 1] * kept);
  }
}
