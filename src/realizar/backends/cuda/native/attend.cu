// Attention of one token of a row against one part of its context; grid: KV heads, decodes, parts. A block sums, norms
// and rotates the queries of one KV head. The block of the last part also makes the new key and value and writes them to
// the cache, or takes them from there, and reads them from shared memory. Warps take tiles of 16 keys alternately, on
// the tensor cores: scores are queries x keys and the result is values^T x weights^T, so that both read what lies side
// by side in memory. A warp copies its tiles into shared memory of its own, the first ones before the kernel before has
// ended. The block that finishes last combines the parts, in their order.
// Defined around it: NAME WARPS RESIDENT (warps of a multiprocessor) STAGES (tiles of a warp on their way) LEAST (64s
// of keys that a part has at least) HEAD GROUP (queries of a KV head, at most 8) SPLITS (of the matmul) BIAS NORM (0
// none, 1 RMS, 2 layer) NORM_BIAS ROTARY INTERLEAVED ELEMENT (0 bf16, 1 f16, 2 int8, 3 e4m3, whose keys and values have
// a scale each in float32) BLOCK_SIZE FORM (0 float32, 1 int8, 2 half) BLOCK_TOKENS RUNS (of a tile: 1, 4) BULK (whether
// the copy engine fetches tiles, where there is one; else lanes copy 16 bytes each) STAGE_BYTES (of a warp and a stage)
// CAP (whether scores are capped) VALUE_NORM (whether values are divided by their root mean square) GROWTH (whether queries grow with the position)
// STORED (whether the cache has the new key and value: then `partials` has queries alone).
// Before it: primitives.cu, bulk.cu, attend_heads.cu, attend_results.cu.

extern "C" __global__ void __launch_bounds__(THREADS, HEAD <= 128 ? RESIDENT / WARPS : 1)
NAME(const float* partials, const float* bias, const float* cosine, const float* sine, const float* query_scales,
     const float* query_norm, const float* key_norm, const float* query_norm_bias, const float* key_norm_bias,
     char* keys, char* values, char* key_scales, char* value_scales, const int* slots, const float* sinks,
     float* partial, float* state, int* arrivals, const int4* decodes, const int* tables, const int* table_stride,
     char* out, float* out_scale, float* terms,
     float eps, float value_eps, float score_scale, float soft_cap, int split_stride, int token_stride, int key_at,
     int value_at, int kv_heads, int window, int table_rows, int out_stride) {
  __shared__ __align__(16) float heads[(GROUP + 2) * HEAD_PITCH];
  __shared__ float tops[WARPS + 1][GROUP], totals[WARPS + 1][GROUP], part_weights[GROUP][MAX_PARTS];
  __shared__ int last;
  const int decode = blockIdx.y, kv_head = blockIdx.x, part = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int4 step = decodes[decode];  // row, token, length of the context, position
  const int row = step.x, token = step.y, length = row >= 0 ? step.z : 0, seen = window > 0 && length > window ? length - window : 0, low = seen / CUT * CUT;
  const int cuts = (length - low + CUT - 1) / CUT, even = (cuts + (int)gridDim.z - 1) / (int)gridDim.z, each = even > LEAST ? even : LEAST;
  const int parts = (cuts + each - 1) / each;
  if (part >= parts) return;  // rows that are none have no part
  const bool newest = part == parts - 1;
  const int from = low + part * each * CUT, until = from + each * CUT, begin = from > seen ? from : seen;
  const int end = until < length - 1 ? until : length - 1, start = begin / TILE * TILE, tiles = end > begin ? (end - start + TILE - 1) / TILE : 0;
  const int* table = tables + (long)(table_rows + row) * table_stride[0];
  const int g = lane >> 2, t = lane & 3;

  auto locate = [&](int tile) {  // the place of a tile's first key
    const int key = start + tile * TILE;
    return tile < tiles ? (table[key / BLOCK_SIZE] * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE : 0;
  };
  char* own = ring + warp * STAGES * STAGE_BYTES;
  const u32 own_at = (u32)__cvta_generic_to_shared(own);
#if COPIES_BULK
  __shared__ __align__(8) u64 barriers[WARPS][STAGES][2];  // of keys and of values
  const u32 barriers_at = (u32)__cvta_generic_to_shared(barriers[warp]);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < 2 * STAGES; i++) barrier_init(barriers_at + i * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
#endif
  // Starts to copy keys (0) or values (1) of a tile, if there is one: what its stage held has been read.
  auto fetch = [&](int which, int tile, int place, int stage) {
    const char *from = (which ? values : keys) + (long)place * HEAD * BYTES, *scales = (which ? value_scales : key_scales) + (long)place * SCALE_GROUPS * 2;
    const u32 to = own_at + stage * STAGE_BYTES + which * TILE_BYTES, scales_to = own_at + stage * STAGE_BYTES + 2 * TILE_BYTES + which * SCALES_BYTES;
#if COPIES_BULK
    if (tile < tiles && lane < RUNS) {
      const u32 barrier = barriers_at + (stage * 2 + which) * 8;
      if (lane == 0) {
        barrier_expect(barrier, RUNS * RUN_BYTES + SCALES_BYTES);
        if constexpr (SCALES_BYTES > 0) copy_bulk_once(scales_to, scales, SCALES_BYTES, barrier);
      }
      copy_bulk_once(to + lane * RUN_PITCH, from + lane * RUN_BYTES, RUN_BYTES, barrier);
    }
#else
    if (tile < tiles) {
      for (int at = lane * 16; at < RUNS * RUN_BYTES; at += 512) copy_async16(to + at + at / RUN_BYTES * (RUN_PITCH - RUN_BYTES), from + at);
      for (int at = lane * 16; at < SCALES_BYTES; at += 512) copy_async16(scales_to + at, scales + at);
    }
    commit_copies();  // nothing counts too
#endif
  };
  auto wait_for = [&](int which, int stage, int parity) {
#if COPIES_BULK
    barrier_wait(barriers_at + (stage * 2 + which) * 8, parity);
#else
    wait_for_copies<2 * STAGES - 1>();
    __syncwarp();
#endif
  };
  // Eight dimensions of a key (0) or a value (1) of a stage.
  auto read = [&](u32 (&x)[4], const char* stage, int which, int key, int dim) {
    Vector vector{};
    u32 scale = 0;
    if (HEAD % 64 == 0 || dim < HEAD) {
      vector = *(const Vector*)(stage + which * TILE_BYTES + key / RUN * RUN_PITCH + key % RUN * KEY_BYTES + dim * BYTES);
#if ELEMENT == 2
      scale = *(const u16*)(stage + 2 * TILE_BYTES + which * SCALES_BYTES + (key * SCALE_GROUPS + dim / 32) * 2) * 0x10001u;
#endif
    }
    unpack(x, vector, scale);
  };
  // Keys of earlier steps and the step's own arrays are there already: reading them needs no wait.
  int ahead[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) ahead[i] = locate(warp + i * WARPS);
  const int used = newest ? GROUP + 2 : GROUP;
#pragma unroll
  for (int i = 0; i < STAGES; i++)
    for (int which = 0; which < 2; which++) fetch(which, warp + i * WARPS, ahead[i], i);
  int place_next = locate(warp + STAGES * WARPS);
  const int slot = slots[token];
  const long angles_at = (long)step.w * (ROTARY / 2);
  Angles angles;
  if constexpr (IN_LANE) {
#pragma unroll
    for (int i = 0; i < ROTARY / 64; i++) { angles.cosine[i] = __ldg(cosine + angles_at + lane + i * 32); angles.sine[i] = __ldg(sine + angles_at + lane + i * 32); }
  } else if (threadIdx.x < (ROTARY / 2 + 31) / 32) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(cosine + angles_at + threadIdx.x * 32));
    asm volatile("prefetch.global.L1 [%0];" ::"l"(sine + angles_at + threadIdx.x * 32));
  }
  const float key_scale = scale_of(key_scales), value_scale = scale_of(value_scales), query_scale = GROWTH ? __ldg(query_scales + step.w) : 1.f;
  let_next_start();
  wait_for_previous();

  constexpr int OWN = (GROUP + 2 + WARPS - 1) / WARPS;  // heads of a warp
  const long place = ((long)(slot / BLOCK_SIZE) * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;
  float x[OWN][EACH];
#pragma unroll
  for (int o = 0; o < OWN; o++) {
    const int h = warp + o * WARPS, column = (h < GROUP ? (kv_head * GROUP + h) * HEAD : (h == GROUP ? key_at : value_at) + kv_head * HEAD);
    const float* from = partials + (long)token * token_stride + column + lane;
    const bool live = h < used, kept = live && slot >= 0;
    if (STORED && h >= GROUP)
      take_kept(x[o], h == GROUP ? keys : values, h == GROUP ? key_scales : value_scales, place, kept, lane);
    else sum_splits(x[o], from, bias + column + lane, split_stride, live, lane);
  }
#pragma unroll
  for (int o = 0; o < OWN; o++) {
    const int h = warp + o * WARPS;
    if (h >= used) break;
    float* head = heads + h * HEAD_PITCH;
    const bool query = h < GROUP;
    if (h <= GROUP - STORED) norm_and_rotate(x[o], head, query ? query_norm : key_norm, query ? query_norm_bias : key_norm_bias, eps, angles, cosine + angles_at, sine + angles_at, lane);
    else if (VALUE_NORM && !STORED) divide_by_root(x[o], value_eps);
    if (GROWTH && query)
#pragma unroll
      for (int i = 0; i < EACH; i++) x[o][i] *= query_scale;
    if (h >= GROUP && !STORED) keep(x[o], h == GROUP ? keys : values, h == GROUP ? key_scales : value_scales, place, slot >= 0, lane);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (lane + i * 32 < HEAD) head[lane + i * 32] = x[o][i];
  }
  __syncthreads();
  for (int h = WARPS - 1 - warp; h < GROUP; h += WARPS) {  // the new key's scores; the last warps have the fewest tiles
    float score = 0.f;
    if (newest)
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (lane + i * 32 < HEAD) score += heads[h * HEAD_PITCH + lane + i * 32] * heads[GROUP * HEAD_PITCH + lane + i * 32];
    score = cap_score(sum_of_warp(score) * score_scale, soft_cap);
    if (lane == 0) { tops[WARPS][h] = newest ? score : NEVER; totals[WARPS][h] = newest ? 1.f : 0.f; }
  }

  u32 q[KEY_VECTORS][4];  // of query g
#pragma unroll
  for (int j = 0; j < KEY_VECTORS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int dim = j * 32 + t * 8 + i * 2;
      const bool live = g < GROUP && dim < HEAD;
      const float2 pair = live ? *(const float2*)(heads + g * HEAD_PITCH + dim) : make_float2(0.f, 0.f);
      q[j][i] = packed(pair.x * score_scale, pair.y * score_scale);
    }
  float o[VALUE_VECTORS * 4][4];  // of queries 2t and 2t + 1: dimensions c * 64 + g * 8 + 2m, and the next
#pragma unroll
  for (int i = 0; i < VALUE_VECTORS * 4; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  float top = NEVER, total = 0.f;  // of query g; the sum is over the lane's keys alone
  int stage = 0, parity = 0;
  for (int tile = warp; tile < tiles; tile += WARPS) {
    const char* held = own + stage * STAGE_BYTES;
    const int key0 = start + tile * TILE;
    const bool whole = key0 >= begin && key0 + TILE <= end;
    wait_for(0, stage, parity);
    float s[2][2][4];  // two chains for each eight keys
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][0][e] = s[n][1][e] = 0.f;
#pragma unroll
      for (int j = 0; j < KEY_VECTORS; j++) {
        u32 y[4];
        read(y, held, 0, key_of(n, g / 2, g % 2), j * 32 + t * 8);
        multiply(s[n][0], q[j][0], 0, q[j][1], 0, y[0], y[1]);
        multiply(s[n][1], q[j][2], 0, q[j][3], 0, y[2], y[3]);
      }
    }
    __syncwarp();  // all have read
    fetch(0, tile + STAGES * WARPS, place_next, stage);
    float higher = top;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int key = key0 + key_of(n, t, e);
        s[n][0][e] = whole || (key >= begin && key < end) ? cap_score((s[n][0][e] + s[n][1][e]) * key_scale, soft_cap) : NEVER;
        higher = fmaxf(higher, s[n][0][e]);
      }
    higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
    const float reference = higher == NEVER ? 0.f : higher, kept = __expf(top - reference);
    const bool rescaled = top != NEVER && kept != 1.f;  // the first tile finds zeros
    top = higher;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) s[n][0][e] = __expf(s[n][0][e] - reference);
    total = total * kept + (s[0][0][0] + s[0][0][1]) + (s[1][0][0] + s[1][0][1]);
    if (__any_sync(~0u, rescaled)) {
      const float first = __shfl_sync(~0u, kept, t * 8), second = __shfl_sync(~0u, kept, t * 8 + 4);
#pragma unroll
      for (int i = 0; i < VALUE_VECTORS * 4; i++) { o[i][0] *= first; o[i][1] *= second; o[i][2] *= first; o[i][3] *= second; }
    }
    const u32 b0 = packed(s[0][0][0], s[0][0][1]), b1 = packed(s[1][0][0], s[1][0][1]);
    wait_for(1, stage, parity);
#pragma unroll
    for (int c = 0; c < VALUE_VECTORS; c++) {
      u32 y[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = key_of(i / 2, t, i % 2);
        read(y[i], held, 1, key, c * 64 + g * 8);
        if (!whole && (key0 + key < begin || key0 + key >= end)) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;  // whatever lies there
      }
#pragma unroll
      for (int m = 0; m < 4; m++)
        multiply(o[c * 4 + m], permute(y[0][m], y[1][m], 0x5410), permute(y[0][m], y[1][m], 0x7632), permute(y[2][m], y[3][m], 0x5410), permute(y[2][m], y[3][m], 0x7632), b0, b1);
    }
    __syncwarp();
    fetch(1, tile + STAGES * WARPS, place_next, stage);
    place_next = locate(tile + (STAGES + 1) * WARPS);
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  if (t == 0 && g < GROUP) { tops[warp][g] = top; totals[warp][g] = total; }
  __syncthreads();

  const int head0 = kv_head * GROUP, all_heads = kv_heads * GROUP;
  float most = NEVER;  // of query g
  if (g < GROUP) {
#pragma unroll
    for (int w = 0; w <= WARPS; w++) most = fmaxf(most, tops[w][g]);
    if (parts == 1 && sinks) most = fmaxf(most, sinks[head0 + g]);
  }
  const float weight = weight_of(top, most);
  {
    const float first = __shfl_sync(~0u, weight, t * 8) * value_scale, second = __shfl_sync(~0u, weight, t * 8 + 4) * value_scale;
    float* sums = (float*)own;
#pragma unroll
    for (int c = 0; c < VALUE_VECTORS; c++)
#pragma unroll
      for (int m = 0; m < 4; m += 2) {
        const float(&a)[4] = o[c * 4 + m], (&b)[4] = o[c * 4 + m + 1];
        const int dim = c * 64 + g * 8 + m * 2;
        if (dim < HEAD && t * 2 < GROUP) *(float4*)(sums + t * PAIR_PITCH + dim) = make_float4(a[0] * first, a[2] * first, b[0] * first, b[2] * first);
        if (dim < HEAD && t * 2 + 1 < GROUP) *(float4*)(sums + t * PAIR_PITCH + HEAD + dim) = make_float4(a[1] * second, a[3] * second, b[1] * second, b[3] * second);
      }
  }
  if (t == 0 && g < GROUP) {
    totals[warp][g] *= weight;
    if (warp == 0) part_weights[g][0] = most;
  }
  __syncthreads();

  const long at = ((long)decode * gridDim.z + part) * all_heads + head0;
#if FORM == 2
  if (parts == 1 && kv_head == 0 && threadIdx.x == 0) out_scale[token] = 1.f;
#endif
  for (int u = threadIdx.x; u - lane < UNITS; u += THREADS) {  // whole warps: lanes need each other
    const bool live = u < UNITS;
    const int i = (live ? u : UNITS - 1) * 4, h = i / HEAD;
    const float newer = weight_of(tops[WARPS][h], part_weights[h][0]);
    float whole = totals[WARPS][h] * newer;
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
    if (newest) {
      const float2* last_value = (const float2*)(heads + (GROUP + 1) * HEAD_PITCH + i % HEAD);
      value = make_float4(last_value[0].x * newer, last_value[0].y * newer, last_value[1].x * newer, last_value[1].y * newer);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      whole += totals[w][h];
      value = added(value, *(const float4*)(ring + w * STAGES * STAGE_BYTES + (i + h / 2 * 4) * 4), 1.f);
    }
    if (parts == 1) {
      if (sinks) whole += __expf(sinks[head0 + h] - part_weights[h][0]);
      const float inverse = __fdividef(1.f, whole);
      value = make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse);
      write_four(value, out, terms, token, head0 * HEAD + i, all_heads * HEAD, out_stride, live);
    } else if (live) {
      *(float4*)(partial + at * HEAD + i) = value;
      if (i % HEAD == 0) { state[(at + h) * 2] = part_weights[h][0]; state[(at + h) * 2 + 1] = whole; }
    }
  }
  if (parts == 1) return;
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
  join_parts(partial, state, sinks, part_weights, out, out_scale, terms, token, decode, kv_head, kv_heads, parts, out_stride);
}
