// The results of attention: a token's input of the output projection, from one part or combined from several.
// Before it: attend_heads.cu.

constexpr int UNITS = GROUP * HEAD / 4;  // of four dimensions

// Four neighbours from column c on of a token's input of the output projection; four lanes have the values of one
// scale.
INLINE void write_four(float4 x, char* out, float* terms, long token, int c, int columns, int out_stride, bool live) {
  const int chunks = (columns + 63) / 64;
#if FORM == 0
  if (live) *(float4*)((float*)out + token * out_stride + c) = x;
#elif FORM == 1
  float top = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float scale = top * (1.f / 127.f), inverse = top > 0.f ? __fdividef(127.f, top) : 0.f;
  const int codes[4] = {__float2int_rn(x.x * inverse), __float2int_rn(x.y * inverse), __float2int_rn(x.z * inverse), __float2int_rn(x.w * inverse)};
  int sum = (codes[0] + codes[1]) + (codes[2] + codes[3]);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (!live) return;
  *(u32*)(out + token * chunks * 64 + c) = permute(permute(codes[0], codes[1], 0x0040), permute(codes[2], codes[3], 0x0040), 0x5410);
  if (c % 16 == 0) *(float2*)(terms + token * chunks * 8 + c / 8) = make_float2(scale, (float)sum * scale);
#else
  if (!live) return;
  // Means of the cache's values: they are not divided, and cut to what a half holds in place of becoming infinite.
  auto half = [](float value) { return to_half(value > 65504.f ? 65504.f : value < -65504.f ? -65504.f : value); };
  const int d = c % 64, core = d % 16 / 4 * 2, block = (int)token / BLOCK_TOKENS, row = (int)token % BLOCK_TOKENS;
  char* to = out + ((((long)block * chunks + c / 64) * 8 + core) * (BLOCK_TOKENS / 8) + row / 8) * 128 + row % 8 * 16 + d / 16 * 4;
  *(u32*)to = half(x.x) | half(x.z) << 16;
  *(u32*)(to + BLOCK_TOKENS * 16) = half(x.y) | half(x.w) << 16;
#endif
}
INLINE float4 added(float4 a, float4 b, float weight) { return make_float4(a.x + b.x * weight, a.y + b.y * weight, a.z + b.z * weight, a.w + b.w * weight); }

// The parts of a KV head's queries into one result. partial [decodes, grid's parts, heads, HEAD], not divided; state
// [decodes, grid's parts, heads, 2]: the largest score, the sum of weights. part_weights: room.
INLINE void join_parts(const float* partial, const float* state, const float* sinks, float (&part_weights)[GROUP][MAX_PARTS], char* out, float* out_scale, float* terms, long token, int decode, int kv_head, int kv_heads, int parts, int out_stride) {
  const int head0 = kv_head * GROUP, all_heads = kv_heads * GROUP;
  const long first = (long)decode * gridDim.z * all_heads + head0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Threads that are more than units take slices of the parts; the first of them are on their way while the weights are
  // computed.
  constexpr int SLICES = UNITS % 32 == 0 && THREADS % UNITS == 0 ? THREADS / UNITS : 1, AHEAD = 16;
  const int slice = SLICES > 1 ? threadIdx.x / UNITS : 0, first_unit = threadIdx.x - slice * UNITS;
  float4 part_of[AHEAD];
  auto load_parts = [&](int u, int from) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++)
      if (from + j * SLICES < parts) part_of[j] = __ldcg((const float4*)(partial + (first + (long)(from + j * SLICES) * all_heads) * HEAD + u * 4));
  };
  load_parts(first_unit < UNITS ? first_unit : UNITS - 1, slice);
  for (int g = warp; g < GROUP; g += WARPS) {
    float2 state_of[MAX_PARTS / 32];
    float most = sinks ? sinks[head0 + g] : NEVER, whole = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_PARTS / 32; i++) {
      const int p = lane + i * 32;
      state_of[i] = p < parts ? __ldcg((const float2*)state + first + (long)p * all_heads + g) : make_float2(NEVER, 0.f);
      most = fmaxf(most, state_of[i].x);
    }
    most = largest_of_warp(most);
#pragma unroll
    for (int i = 0; i < MAX_PARTS / 32; i++) {
      state_of[i].x = weight_of(state_of[i].x, most);
      whole += state_of[i].x * state_of[i].y;
    }
    whole = sum_of_warp(whole) + (sinks ? __expf(sinks[head0 + g] - most) : 0.f);
#pragma unroll
    for (int i = 0; i < MAX_PARTS / 32; i++) part_weights[g][lane + i * 32] = state_of[i].x / whole;
  }
  __syncthreads();
#if FORM == 2
  if (kv_head == 0 && threadIdx.x == 0) out_scale[token] = 1.f;
#endif
  for (int u = first_unit; u - lane < UNITS; u += THREADS) {
    const bool live = u < UNITS;
    const int i = (live ? u : UNITS - 1) * 4, h = i / HEAD;
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int from = slice; from < parts; from += AHEAD * SLICES) {
      if (u != first_unit || from != slice) load_parts(i / 4, from);
#pragma unroll
      for (int j = 0; j < AHEAD; j++)
        if (from + j * SLICES < parts) value = added(value, part_of[j], part_weights[h][from + j * SLICES]);
    }
    if constexpr (SLICES > 1) {
      float4* sums = (float4*)ring;
      if (slice > 0) sums[threadIdx.x - UNITS] = value;
      __syncthreads();
      if (slice > 0) return;
#pragma unroll
      for (int s = 1; s < SLICES; s++) value = added(value, sums[(s - 1) * UNITS + u], 1.f);
    }
    write_four(value, out, terms, token, head0 * HEAD + i, all_heads * HEAD, out_stride, live);
  }
}
