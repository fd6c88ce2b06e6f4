// Attention of one token of a row against one part of its context; grid: decodes, KV heads, parts.
// A block sums, norms and turns the queries of one KV head; that of the last part also makes the new key and value,
// writes them to the cache and takes them from shared memory. LANES lanes read a key, eight dimensions each; warps take
// tiles of keys in turn and are joined at the end. The block that comes last joins the parts, in their order.
// Defined around it: NAME HEAD GROUP (queries of a KV head) SPLITS (of the product) BIAS NORM (0 none, 1 RMS, 2 layer)
// NORM_BIAS ROTARY INTERLEAVED ELEMENT (0 bf16, 1 f16, 2 int8) BLOCK_SIZE FORM (0 float32, 1 int8, 2 half) BLOCK_ROWS.

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int power_above(int x) { int p = 1; while (p < x) p *= 2; return p; }
constexpr int LANES = power_above((HEAD + 7) / 8), KEYS_AT_ONCE = 32 / LANES;
constexpr int PADDED_GROUP = power_above(GROUP);
constexpr int UNROLL = LANES / PADDED_GROUP < 1 ? 1 : LANES / PADDED_GROUP > 4 ? 4 : LANES / PADDED_GROUP;
constexpr int SCORES = UNROLL * PADDED_GROUP, TILE = KEYS_AT_ONCE * UNROLL;
constexpr int SPREAD = LANES / SCORES;  // lanes that hold the same score
static_assert(SCORES <= LANES, "more scores than lanes");
constexpr int MAX_PARTS = 64, CUT = 64;  // keys that parts are multiples of
constexpr int SCALE_GROUPS = (HEAD + 31) / 32;
#define NEVER __int_as_float(0xff800000)  // minus infinity

struct Fetched {
#if ELEMENT == 2
  uint2 k[UNROLL], v[UNROLL];
  float k_scale[UNROLL], v_scale[UNROLL];
#else
  uint4 k[UNROLL], v[UNROLL];
#endif
};

INLINE void store_u16(void* at, u32 bits) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"((u16)bits) : "memory"); }
INLINE u32 to_half(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
INLINE u32 to_bfloat(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
INLINE float from_half(u32 x) { return low_half(x); }

// Eight values as floats; int8 without their scale.
#if ELEMENT == 2
INLINE void unpack(const uint2& raw, float(&x)[8]) {
  const u32 words[2] = {raw.x ^ 0x80808080u, raw.y ^ 0x80808080u};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __uint_as_float(permute(words[i / 4], 0x4b000000u, 0x7440 | (i % 4))) - 8388736.f;
}
#else
INLINE void unpack(const uint4& raw, float(&x)[8]) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if ELEMENT == 0
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
    x[2 * i] = low_half(words[i]);
    x[2 * i + 1] = high_half(words[i]);
#endif
  }
}
#endif

// Sums over LANES lanes of SCORES values: afterwards a lane holds the value whose number is its top bits.
template <int COUNT, int WIDTH>
INLINE float sum_lanes(float (&v)[COUNT], int lane) {
  if constexpr (WIDTH == 1) return v[0];
  else if constexpr (COUNT == 1) {
    v[0] += __shfl_xor_sync(~0u, v[0], WIDTH / 2);
    return sum_lanes<1, WIDTH / 2>(v, lane);
  } else {
    float kept[COUNT / 2];
    const bool upper = lane & (WIDTH / 2);
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      const float mine = upper ? v[i + COUNT / 2] : v[i], other = upper ? v[i] : v[i + COUNT / 2];
      kept[i] = mine + __shfl_xor_sync(~0u, other, WIDTH / 2);
    }
    return sum_lanes<COUNT / 2, WIDTH / 2>(kept, lane);
  }
}

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

extern "C" __global__ void __launch_bounds__(THREADS)
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
  const int cuts = (length - low + CUT - 1) / CUT, even = (cuts + (int)gridDim.z - 1) / (int)gridDim.z, each = even > 2 ? even : 2;
  const int parts = (cuts + each - 1) / each;
  if (part >= parts) return;  // rows that are none have no part
  const bool newest = part == parts - 1;
  const int from = low + part * each * CUT, until = from + each * CUT, begin = from > seen ? from : seen;
  const int end = until < length - 1 ? until : length - 1, tiles = end > begin ? (end - begin + TILE - 1) / TILE : 0;
  const int* table = tables + (long)(table_rows + row) * table_stride[0];
  const int of_key = lane / LANES, within = lane % LANES, dim = within * 8;

  auto fetch = [&](Fetched& to, int tile) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int key = begin + tile * TILE + u * KEYS_AT_ONCE + of_key;
      const bool live = key < end && dim < HEAD;
      const long place = live ? ((long)table[key / BLOCK_SIZE] * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE : 0;
#if ELEMENT == 2
      to.k[u] = to.v[u] = make_uint2(0, 0);
      to.k_scale[u] = to.v_scale[u] = 0.f;
      if (live) {
        to.k[u] = *(const uint2*)(keys + place * HEAD + dim);
        to.v[u] = *(const uint2*)(values + place * HEAD + dim);
        to.k_scale[u] = from_half(*(const u16*)(key_scales + (place * SCALE_GROUPS + dim / 32) * 2));
        to.v_scale[u] = from_half(*(const u16*)(value_scales + (place * SCALE_GROUPS + dim / 32) * 2));
      }
#else
      to.k[u] = to.v[u] = make_uint4(0, 0, 0, 0);
      if (live) {
        to.k[u] = Streamed{keys + (place * HEAD + dim) * 2}.read16(0);
        to.v[u] = Streamed{values + (place * HEAD + dim) * 2}.read16(0);
      }
#endif
    }
  };
  // Steps before this one wrote these keys, so they need no wait.
  Fetched even_tile, odd_tile;
  fetch(even_tile, warp);
  let_next_start();
  wait_for_previous();

  const int token = starts[row], used = newest ? GROUP + 2 : GROUP;
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
  const long angles = (long)positions[token] * (ROTARY / 2);
  const int slot = slots[token];
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

  float q[GROUP][8], o[GROUP][8];
#pragma unroll
  for (int g = 0; g < GROUP; g++)
#pragma unroll
    for (int i = 0; i < 8; i++) { q[g][i] = dim < HEAD ? heads[g * HEAD + dim + i] * score_scale : 0.f; o[g][i] = 0.f; }
  const int own = within / SPREAD, own_key = own / PADDED_GROUP * KEYS_AT_ONCE + of_key, base = lane - within;
  float top = NEVER, total = 0.f;  // of the lane's query; the sum is over the lane's keys alone
  auto across_keys = [&](float x, auto join) {
#pragma unroll
    for (int o = PADDED_GROUP * SPREAD; o < 32; o *= 2) x = join(x, __shfl_xor_sync(~0u, x, o));
    return x;
  };
  auto absorb = [&](const Fetched& tile_data, int tile) {
    if (tile >= tiles) return;
    float scores[SCORES];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float k[8];
      unpack(tile_data.k[u], k);
#pragma unroll
      for (int g = 0; g < PADDED_GROUP; g++) {
        float sum = 0.f;
        if (g < GROUP)
#pragma unroll
          for (int i = 0; i < 8; i++) sum += q[g < GROUP ? g : 0][i] * k[i];
#if ELEMENT == 2
        sum *= tile_data.k_scale[u];
#endif
        scores[u * PADDED_GROUP + g] = sum;
      }
    }
    const float found = cap_score(sum_lanes<SCORES, LANES>(scores, within), soft_cap);
    const float score = begin + tile * TILE + own_key < end ? found : NEVER;
    const float higher = fmaxf(top, across_keys(score, [](float a, float b) { return fmaxf(a, b); }));
    const float kept = weight_of(top, higher), p = weight_of(score, higher);
    total = total * kept + p;
    top = higher;
    if (__any_sync(~0u, kept != 1.f)) {
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        const float factor = __shfl_sync(~0u, kept, base + g * SPREAD);
#pragma unroll
        for (int i = 0; i < 8; i++) o[g][i] *= factor;
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float v[8];
      unpack(tile_data.v[u], v);
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        float share = __shfl_sync(~0u, p, base + (u * PADDED_GROUP + g) * SPREAD);
#if ELEMENT == 2
        share *= tile_data.v_scale[u];
#endif
#pragma unroll
        for (int i = 0; i < 8; i++) o[g][i] += share * v[i];
      }
    }
  };
  for (int tile = warp; tile < tiles; tile += 2 * WARPS) {
    fetch(odd_tile, tile + WARPS);
    absorb(even_tile, tile);
    fetch(even_tile, tile + 2 * WARPS);
    absorb(odd_tile, tile + WARPS);
  }
  total = across_keys(total, [](float a, float b) { return a + b; });
#pragma unroll
  for (int g = 0; g < GROUP; g++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
      for (int n = LANES; n < 32; n *= 2) o[g][i] += __shfl_xor_sync(~0u, o[g][i], n);
      if (of_key == 0 && dim < HEAD) sums[warp][g * HEAD + dim + i] = o[g][i];
    }
  if (lane < PADDED_GROUP * SPREAD && lane % SPREAD == 0 && lane / SPREAD < GROUP) { tops[warp][lane / SPREAD] = top; totals[warp][lane / SPREAD] = total; }
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
