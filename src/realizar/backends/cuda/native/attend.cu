// Attention of one token of a row against one part of its context; grid: decodes, KV heads, parts.
// A block sums, norms and turns the queries of one KV head; that of the last part also makes the new key and value,
// writes them to the cache and takes them from shared memory. Warps take tiles of 16 keys in turn, on the tensor cores:
// scores are queries x keys, and the result is values^T x weights^T, so that both read what lies side by side in memory.
// The block that comes last joins the parts, in their order.
// Defined around it: NAME WARPS RESIDENT (warps of a multiprocessor) LEAST (64s of keys that a part has at least) HEAD GROUP (queries of a KV head, at most 8) SPLITS (of the product) BIAS NORM (0 none,
// 1 RMS, 2 layer) NORM_BIAS ROTARY INTERLEAVED ELEMENT (0 bf16, 1 f16, 2 int8) BLOCK_SIZE FORM (0 float32, 1 int8, 2
// half) BLOCK_ROWS.

constexpr int THREADS = WARPS * 32, TILE = 16;
constexpr int KEY_PIECES = (HEAD + 31) / 32, VALUE_PIECES = (HEAD + 63) / 64;  // of eight dimensions, of a lane and a key
constexpr int MAX_PARTS = 64, CUT = 64;  // keys that parts are multiples of
constexpr int SCALE_GROUPS = (HEAD + 31) / 32;
#define NEVER __int_as_float(0xff800000)  // minus infinity

#if ELEMENT == 2
typedef uint2 Piece;
constexpr int BYTES = 1;
#else
typedef uint4 Piece;
constexpr int BYTES = 2;
#endif
#if ELEMENT == 0
#define HALVES "bf16"
#else
#define HALVES "f16"
#endif

INLINE void store_u16(void* at, u32 bits) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"((u16)bits) : "memory"); }
INLINE u32 to_half(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
INLINE u32 to_bfloat(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
INLINE float from_half(u32 x) { return low_half(x); }

INLINE u32 packed(float low, float high) {  // as the cache's type multiplies
  u32 r;
  asm("cvt.rn." HALVES "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

INLINE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." HALVES "." HALVES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight dimensions as four pairs. Codes of int8 become 1024 + 128 + code first, which is exact, then code, then scaled.
#if ELEMENT == 2
INLINE void unpack(u32 (&x)[4], const Piece& raw, u32 scale) {
  const u32 words[2] = {raw.x ^ 0x80808080u, raw.y ^ 0x80808080u};
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = mul2(add2(permute(words[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140), 0xe480e480u), scale);
}
#else
INLINE void unpack(u32 (&x)[4], const Piece& raw, u32) { x[0] = raw.x; x[1] = raw.y; x[2] = raw.z; x[3] = raw.w; }
#endif

INLINE float largest_of_warp(float x) { for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o)); return x; }
INLINE float sum_of_warp(float x) { for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o); return x; }
INLINE float cap_score(float s, float cap) { return cap > 0.f ? cap - 2.f * cap / (__expf(s * (2.f / cap)) + 1.f) : s; }
INLINE float weight_of(float top, float reference) { return top == NEVER ? 0.f : __expf(top - reference); }

// One warp: a head's float32 values in shared memory, normed and turned in place; `weight` is 0 where nothing is normed.
INLINE void turn(float* head, const float* weight, const float* norm_bias, float eps, const float* cosine, const float* sine, int lane) {
  constexpr int EACH = (HEAD + 31) / 32;
  if constexpr (NORM > 0)
    if (weight) {
      float x[EACH], mean = 0.f, squares = 0.f;
#pragma unroll
      for (int i = 0; i < EACH; i++) { x[i] = lane + i * 32 < HEAD ? head[lane + i * 32] : 0.f; mean += x[i]; }
      mean = NORM == 2 ? sum_of_warp(mean) / HEAD : 0.f;
#pragma unroll
      for (int i = 0; i < EACH; i++) { x[i] = lane + i * 32 < HEAD ? x[i] - mean : 0.f; squares += x[i] * x[i]; }
      const float scale = 1.f / sqrtf(sum_of_warp(squares) / HEAD + eps);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int d = lane + i * 32;
        if (d < HEAD) head[d] = x[i] * scale * weight[d] + (NORM_BIAS ? norm_bias[d] : 0.f);
      }
      __syncwarp();
    }
  if constexpr (ROTARY > 0) {
    float turned[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int d = lane + i * 32;
      if (d >= ROTARY) continue;
      const bool first = INTERLEAVED ? d % 2 == 0 : d < ROTARY / 2;
      const int partner = INTERLEAVED ? d ^ 1 : first ? d + ROTARY / 2 : d - ROTARY / 2, angle = INTERLEAVED ? d / 2 : first ? d : partner;
      turned[i] = head[d] * cosine[angle] + (first ? -head[partner] : head[partner]) * sine[angle];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (lane + i * 32 < ROTARY) head[lane + i * 32] = turned[i];
    __syncwarp();
  }
}

// One warp: a head into its place in the cache; `head` becomes what the cache then holds.
INLINE void keep(float* head, char* cache, char* scales, long place, bool stored, int lane) {
#pragma unroll
  for (int i = 0; i < SCALE_GROUPS; i++) {
    const int d = lane + i * 32;
    const float x = d < HEAD ? head[d] : 0.f;
#if ELEMENT == 2
    const u32 bits = to_half(largest_of_warp(fabsf(x)) / 127.f);
    const float scale = from_half(bits), code = fminf(fmaxf(rintf(x / (scale > 0.f ? scale : 1.f)), -127.f), 127.f);
    if (d < HEAD) {
      head[d] = code * scale;
      if (stored) cache[place * HEAD + d] = (char)(int)code;
    }
    if (stored && lane == 0) store_u16(scales + (place * SCALE_GROUPS + i) * 2, bits);
#else
    const u32 bits = ELEMENT == 0 ? to_bfloat(x) : to_half(x);
    if (d < HEAD) {
      head[d] = ELEMENT == 0 ? __uint_as_float(bits << 16) : from_half(bits);
      if (stored) store_u16(cache + (place * HEAD + d) * 2, bits);
    }
#endif
  }
  __syncwarp();
}

// Columns from `first` on of a row of the output projection's input.
INLINE void write_group(const float* x, char* out, float* out_scale, float* terms, long token, int first, int columns, int out_stride, bool marks) {
  const int chunks = (columns + 63) / 64;
#if FORM == 2
  if (marks && threadIdx.x == 0) out_scale[token] = 1.f;
#endif
  for (int i = threadIdx.x; i < GROUP * HEAD; i += THREADS) {
    const int c = first + i;
#if FORM == 0
    ((float*)out)[token * out_stride + c] = x[i];
#elif FORM == 1
    float top = fabsf(x[i]);
    for (int o = 8; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float scale = top / 127.f, code = rintf(x[i] * (scale > 0.f ? 1.f / scale : 0.f));
    float sum = code;
    for (int o = 8; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    out[token * chunks * 64 + c] = (char)(int)code;
    if (i % 16 == 0) { terms[token * chunks * 8 + c / 8] = scale; terms[token * chunks * 8 + c / 8 + 1] = sum * scale; }
#else
    // A mean of the cache's values: it is not divided, and cut to what a half holds in place of becoming infinite.
    const float value = x[i] > 65504.f ? 65504.f : x[i] < -65504.f ? -65504.f : x[i];
    const int d = c % 64, core = d % 16 / 4 * 2 + d % 2, place = d / 16 * 2 + d % 4 / 2, block = (int)token / BLOCK_ROWS, row = (int)token % BLOCK_ROWS;
    store_u16(out + (((((long)block * chunks + c / 64) * 8 + core) * (BLOCK_ROWS / 8) + row / 8) * 64 + row % 8 * 8 + place) * 2, to_half(value));
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD <= 128 ? RESIDENT / WARPS : 1)
NAME(const float* product, const float* bias, const int* positions, const float* cosine, const float* sine,
     const float* query_norm, const float* key_norm, const float* query_norm_bias, const float* key_norm_bias,
     char* keys, char* values, char* key_scales, char* value_scales, const int* slots, const float* sinks,
     float* partial, float* state, int* arrivals, const int* decodes, const int* starts, const int* contexts,
     const int* tables, const int* table_stride, char* out, float* out_scale, float* terms,
     float eps, float score_scale, float soft_cap, int split_stride, int row_stride, int key_at, int value_at,
     int kv_heads, int window, int table_rows, int out_stride) {
  __shared__ __align__(16) float heads[(GROUP + 2) * HEAD];
  __shared__ float sums[WARPS][GROUP * HEAD];
  __shared__ float tops[WARPS + 1][GROUP], totals[WARPS + 1][GROUP], shares[GROUP][MAX_PARTS];
  __shared__ int last;
  const int decode = blockIdx.x, kv_head = blockIdx.y, part = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = decodes[decode];
  const int length = row >= 0 ? contexts[row] : 0, seen = window > 0 && length > window ? length - window : 0, low = seen / CUT * CUT;
  const int cuts = (length - low + CUT - 1) / CUT, even = (cuts + (int)gridDim.z - 1) / (int)gridDim.z, each = even > LEAST ? even : LEAST;
  const int parts = (cuts + each - 1) / each;
  if (part >= parts) return;  // rows that are none have no part
  const bool newest = part == parts - 1;
  const int from = low + part * each * CUT, until = from + each * CUT, begin = from > seen ? from : seen;
  const int end = until < length - 1 ? until : length - 1, tiles = end > begin ? (end - begin + TILE - 1) / TILE : 0;
  const int* table = tables + (long)(table_rows + row) * table_stride[0];
  const int g = lane >> 2, t = lane & 3;

  // A lane's key of a tile as a place in the cache; -1 is none.
  auto locate = [&](int tile) {
    const int key = begin + tile * TILE + (lane & 15);
    return key < end ? (table[key / BLOCK_SIZE] * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE : -1;
  };
  auto read = [&](Piece& to, u32& scale, const char* cache, const char* scales, int place, int dim) {
    to = Piece{};
    scale = 0;
    if (place < 0 || dim >= HEAD) return;
#if ELEMENT == 2
    to = Streamed{cache + (long)place * HEAD + dim}.read8(0);
    scale = *(const u16*)(scales + ((long)place * SCALE_GROUPS + dim / 32) * 2) * 0x10001u;
#else
    to = Streamed{cache + ((long)place * HEAD + dim) * 2}.read16(0);
#endif
  };
  Piece k[2][KEY_PIECES], v[4][VALUE_PIECES];
  u32 k_scale[2][KEY_PIECES], v_scale[4][VALUE_PIECES];
  auto fetch_keys = [&](int places) {  // keys g and g + 8
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int place = __shfl_sync(~0u, places, n * 8 + g);
#pragma unroll
      for (int j = 0; j < KEY_PIECES; j++) read(k[n][j], k_scale[n][j], keys, key_scales, place, j * 32 + t * 8);
    }
  };
  auto fetch_values = [&](int places) {  // keys 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int place = __shfl_sync(~0u, places, i / 2 * 8 + t * 2 + i % 2);
#pragma unroll
      for (int c = 0; c < VALUE_PIECES; c++) read(v[i][c], v_scale[i][c], values, value_scales, place, c * 64 + g * 8);
    }
  };
  // What steps before this one wrote needs no wait: these keys, and what describes the step.
  int places = locate(warp);
  fetch_keys(places);
  fetch_values(places);
  places = locate(warp + WARPS);
  const int token = starts[row], used = newest ? GROUP + 2 : GROUP, slot = slots[token];
  const long angles = (long)positions[token] * (ROTARY / 2);
  if (threadIdx.x < (ROTARY / 2 + 31) / 32) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(cosine + angles + threadIdx.x * 32));
    asm volatile("prefetch.global.L1 [%0];" ::"l"(sine + angles + threadIdx.x * 32));
  }
  let_next_start();
  wait_for_previous();

  for (int d = threadIdx.x; d < HEAD; d += THREADS) {
    float x[GROUP + 2];
#pragma unroll
    for (int h = 0; h < GROUP + 2; h++) {
      const int column = (h < GROUP ? (kv_head * GROUP + h) * HEAD : (h == GROUP ? key_at : value_at) + kv_head * HEAD) + d;
      float parts_of[SPLITS];
#pragma unroll
      for (int s = 0; s < SPLITS; s++) parts_of[s] = h < used ? load_float(product + (long)s * split_stride + (long)token * row_stride + column) : 0.f;
      x[h] = parts_of[0];
#pragma unroll
      for (int s = 1; s < SPLITS; s++) x[h] += parts_of[s];
      if constexpr (BIAS) x[h] += h < used ? bias[column] : 0.f;
    }
#pragma unroll
    for (int h = 0; h < GROUP + 2; h++) heads[h * HEAD + d] = x[h];
  }
  __syncthreads();
  const long place = ((long)(slot / BLOCK_SIZE) * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;
  for (int h = warp; h < used; h += WARPS) {
    float* head = heads + h * HEAD;
    if (h < GROUP) turn(head, query_norm, query_norm_bias, eps, cosine + angles, sine + angles, lane);
    if (h == GROUP) turn(head, key_norm, key_norm_bias, eps, cosine + angles, sine + angles, lane);
    if (h == GROUP) keep(head, keys, key_scales, place, slot >= 0, lane);
    if (h == GROUP + 1) keep(head, values, value_scales, place, slot >= 0, lane);
  }
  __syncthreads();
  for (int g = warp; g < GROUP; g += WARPS) {  // the new key's scores
    float score = 0.f;
    if (newest)
      for (int d = lane; d < HEAD; d += 32) score += heads[g * HEAD + d] * heads[GROUP * HEAD + d];
    score = cap_score(sum_of_warp(score) * score_scale, soft_cap);
    if (lane == 0) { tops[WARPS][g] = newest ? score : NEVER; totals[WARPS][g] = newest ? 1.f : 0.f; }
  }

  u32 q[KEY_PIECES][4];  // of query g
#pragma unroll
  for (int j = 0; j < KEY_PIECES; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int dim = j * 32 + t * 8 + i * 2;
      const bool live = g < GROUP && dim < HEAD;
      q[j][i] = live ? packed(heads[g * HEAD + dim] * score_scale, heads[g * HEAD + dim + 1] * score_scale) : 0;
    }
  float o[VALUE_PIECES * 4][4];  // of queries 2t and 2t + 1: dimensions c * 64 + g * 8 + 2m, and the next
#pragma unroll
  for (int i = 0; i < VALUE_PIECES * 4; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  float top = NEVER, total = 0.f;  // of query g; the sum is over the lane's keys alone
  for (int tile = warp; tile < tiles; tile += WARPS) {
    float s[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
      for (int j = 0; j < KEY_PIECES; j++) {
        u32 x[4];
        unpack(x, k[n][j], k_scale[n][j]);
        multiply(s[n], q[j][0], 0, q[j][1], 0, x[0], x[1]);
        multiply(s[n], q[j][2], 0, q[j][3], 0, x[2], x[3]);
      }
    }
    fetch_keys(places);
    float higher = top;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        s[n][e] = begin + tile * TILE + n * 8 + t * 2 + e < end ? cap_score(s[n][e], soft_cap) : NEVER;
        higher = fmaxf(higher, s[n][e]);
      }
    higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
    const float kept = weight_of(top, higher);
    top = higher;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) s[n][e] = weight_of(s[n][e], higher);
    total = total * kept + (s[0][0] + s[0][1]) + (s[1][0] + s[1][1]);
    if (__any_sync(~0u, kept != 1.f)) {
      const float first = __shfl_sync(~0u, kept, t * 8), second = __shfl_sync(~0u, kept, t * 8 + 4);
#pragma unroll
      for (int i = 0; i < VALUE_PIECES * 4; i++) { o[i][0] *= first; o[i][1] *= second; o[i][2] *= first; o[i][3] *= second; }
    }
    const u32 b0 = packed(s[0][0], s[0][1]), b1 = packed(s[1][0], s[1][1]);
#pragma unroll
    for (int c = 0; c < VALUE_PIECES; c++) {
      u32 x[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) unpack(x[i], v[i][c], v_scale[i][c]);
#pragma unroll
      for (int m = 0; m < 4; m++)
        multiply(o[c * 4 + m], permute(x[0][m], x[1][m], 0x5410), permute(x[0][m], x[1][m], 0x7632), permute(x[2][m], x[3][m], 0x5410), permute(x[2][m], x[3][m], 0x7632), b0, b1);
    }
    fetch_values(places);
    places = locate(tile + 2 * WARPS);
  }
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
#pragma unroll
  for (int c = 0; c < VALUE_PIECES; c++)
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int query = t * 2 + e % 2, dim = c * 64 + g * 8 + m * 2 + e / 2;
        if (query < GROUP && dim < HEAD) sums[warp][query * HEAD + dim] = o[c * 4 + m][e];
      }
  if (t == 0 && g < GROUP) { tops[warp][g] = top; totals[warp][g] = total; }
  __syncthreads();

  const int head0 = kv_head * GROUP, all_heads = kv_heads * GROUP;
  const long at = ((long)decode * gridDim.z + part) * all_heads + head0;
  for (int i = threadIdx.x; i < GROUP * HEAD; i += THREADS) {
    const int g = i / HEAD;
    float most = tops[WARPS][g];
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, tops[w][g]);
    if (parts == 1 && sinks) most = fmaxf(most, sinks[head0 + g]);
    float weight = weight_of(tops[WARPS][g], most), whole = totals[WARPS][g] * weight, value = newest ? heads[GROUP * HEAD + HEAD + i % HEAD] * weight : 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      weight = weight_of(tops[w][g], most);
      whole += totals[w][g] * weight;
      value += sums[w][i] * weight;
    }
    if (parts == 1) {
      if (sinks) whole += __expf(sinks[head0 + g] - most);
      heads[i] = value / whole;  // queries are in registers
    } else {
      partial[at * HEAD + i] = value;
      if (i % HEAD == 0) { state[(at + g) * 2] = most; state[(at + g) * 2 + 1] = whole; }
    }
  }
  if (parts > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      int* arrived = arrivals + decode * kv_heads + kv_head;
      last = atomicAdd(arrived, 1) == parts - 1;
      if (last) *arrived = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const long first = (long)decode * gridDim.z * all_heads + head0;
    for (int g = warp; g < GROUP; g += WARPS) {
      float tops_of[MAX_PARTS / 32], most = sinks ? sinks[head0 + g] : NEVER, whole = 0.f;
#pragma unroll
      for (int i = 0; i < MAX_PARTS / 32; i++) {
        const int p = lane + i * 32;
        tops_of[i] = p < parts ? __ldcg(state + (first + (long)p * all_heads + g) * 2) : NEVER;
        most = fmaxf(most, tops_of[i]);
      }
      most = largest_of_warp(most);
#pragma unroll
      for (int i = 0; i < MAX_PARTS / 32; i++) {
        const int p = lane + i * 32;
        tops_of[i] = weight_of(tops_of[i], most);
        if (p < parts) whole += tops_of[i] * __ldcg(state + (first + (long)p * all_heads + g) * 2 + 1);
      }
      whole = sum_of_warp(whole) + (sinks ? __expf(sinks[head0 + g] - most) : 0.f);
#pragma unroll
      for (int i = 0; i < MAX_PARTS / 32; i++) shares[g][lane + i * 32] = tops_of[i] / whole;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD / 4; i += THREADS) {
      const int g = i * 4 / HEAD;
      float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
      for (int p = 0; p < parts; p++) {
        const float4 x = __ldcg((const float4*)(partial + (first + (long)p * all_heads) * HEAD) + i);
        const float share = shares[g][p];
        value.x += share * x.x; value.y += share * x.y; value.z += share * x.z; value.w += share * x.w;
      }
      ((float4*)heads)[i] = value;
    }
  }
  __syncthreads();
  write_group(heads, out, out_scale, terms, token, head0 * HEAD, all_heads * HEAD, out_stride, kv_head == 0);
}
