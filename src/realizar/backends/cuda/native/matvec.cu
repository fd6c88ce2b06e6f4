// Matmuls for few tokens: dot products of codes with int8 activations, as integers; of e4m3, which are no integers,
// as halves.
// Defined around it: TOKENS (1-7) TILES (tiles per block) PARTS (warps of a block that share a tile's columns) UNROLL
// (chunks requested at once) BLOCKS (blocks per multiprocessor); ACTIVATION beside matvec_gated.cu where the epilogue
// is a feed-forward's activation, RESIDUAL beside matvec_residual.cu where it is the residual add; with it PAIR_PARTS
// where each warp has a matrix of its own and so many share one's columns, whose outputs, with their biases, are
// multiplied by the matrix's factor.

INLINE void read_biases(float (&biases)[2], const Matrix& matrix, int block_x) {
#ifdef ACTIVATION
  const int own = block_x / 4 * 128 + block_x % 4 * 16 + threadIdx.x % 16;
  biases[0] = __ldg(matrix.bias + own);
  biases[1] = __ldg(matrix.bias + own + 64);
#elif defined PAIR_PARTS
  const int warp = threadIdx.x / 32, own = (block_x * TILES + warp % TILES) * 16 + threadIdx.x % 32 / 4;
  if (warp / TILES % PAIR_PARTS || own >= matrix.out_features) return;  // of those that share columns one adds them
  biases[0] = __ldg(matrix.bias + own);
  biases[1] = __ldg(matrix.bias + own + 8);
#else
  const int own = block_x * TILES * 16 + threadIdx.x % (TILES * 16);
  if (own < matrix.out_features) biases[0] = __ldg(matrix.bias + own);
#endif
}

// How many warps share a tile's columns, which of them a warp is, and what it has of an output's sum.
#ifdef PAIR_PARTS
INLINE int sharing_warps(int splits) { return PAIR_PARTS; }
INLINE int sharing_warp(int cut) { return cut % PAIR_PARTS; }
INLINE float weighed(float sum, float bias, const Matrix& matrix) { return (sum + bias) * matrix.factor; }
#else
INLINE int sharing_warps(int splits) { return splits * PARTS; }
INLINE int sharing_warp(int cut) { return blockIdx.y * PARTS + cut; }
INLINE float weighed(float sum, float bias, const Matrix& matrix) { return sum; }
#endif

// Codes of a lane's sixteen columns of half R as bytes, four to a word.
template <int R, bool... SIDE>
INLINE void all_code_bytes(u32 (&words)[4], const Raw& raw, const void* table) {
  words[0] = code_bytes<R, 0, SIDE...>(raw, table);
  words[1] = code_bytes<R, 1, SIDE...>(raw, table);
  words[2] = code_bytes<R, 2, SIDE...>(raw, table);
  words[3] = code_bytes<R, 3, SIDE...>(raw, table);
}

#if E4M3
// Dot products of a lane's sixteen columns with 2^-8 of its weights of both halves, in pairs of columns; eight of them
// are added as halves.
INLINE void dot_floats(float (&d0)[TOKENS], float (&d1)[TOKENS], const Raw& raw, const uint4 (&x)[TOKENS]) {
  // A byte behind 0x64 is 1024 more than itself, behind 0x44 four more than 2^-8 of it; xx is 128 more than the code.
  constexpr u32 UPPER = E4M3_POWER ? 0x64646464u : 0x44444444u, LESS = E4M3_POWER ? 0xe480e480u : 0xc480c480u;
  u32 sums[2][TOKENS];
  auto step = [&](auto j) {
    constexpr int J = decltype(j)::value;
    u32 low[2], high[2];
    e4m3_halves(low, raw.codes[J]);
    e4m3_halves(high, raw.codes[4 + J]);
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
      const u32 codes = (J == 0 ? x[m].x : J == 1 ? x[m].y : J == 2 ? x[m].z : x[m].w) ^ 0x80808080u;
      const u32 first = add2(permute(codes, UPPER, E4M3_NEIGHBOURS ? 0x4140 : 0x4240), LESS);
      const u32 second = add2(permute(codes, UPPER, E4M3_NEIGHBOURS ? 0x4342 : 0x4341), LESS);
      sums[0][m] = fma2(low[1], second, J % 2 ? fma2(low[0], first, sums[0][m]) : mul2(low[0], first));
      sums[1][m] = fma2(high[1], second, J % 2 ? fma2(high[0], first, sums[1][m]) : mul2(high[0], first));
      if constexpr (J % 2) {
        d0[m] = (J == 1 ? 0.f : d0[m]) + (low_half(sums[0][m]) + high_half(sums[0][m]));
        d1[m] = (J == 1 ? 0.f : d1[m]) + (low_half(sums[1][m]) + high_half(sums[1][m]));
      }
    }
  };
  step(Index<0>{}); step(Index<1>{}); step(Index<2>{}); step(Index<3>{});
}
#endif

#if !defined(ACTIVATION) && !defined(RESIDUAL)
INLINE void store_sums(
    const float (&sums)[PARTS][TOKENS][TILES * 16], const float (&factors)[TOKENS], bool normed, float bias,
    const Matrix& matrix, const Shape& shape, int block_x) {
#pragma unroll
  for (int i0 = 0; i0 < TOKENS * TILES * 16; i0 += TILES * PARTS * 32) {
    const int i = i0 + threadIdx.x;
    if (i >= TOKENS * TILES * 16) break;
    const int m = i / (TILES * 16), out = block_x * TILES * 16 + i % (TILES * 16);
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < PARTS; w++) sum += sums[w][m][i % (TILES * 16)];
    if (normed) sum *= factors[m];
    if (matrix.bias) sum += bias;
    sum *= matrix.factor;
    const long at = (long)blockIdx.y * shape.split_stride + (long)m * shape.token_stride + out;
    if (out < matrix.out_features) matrix.partials[at] = sum;
  }
}
#endif

INLINE void multiply_matrix(const Matrix& matrix, const Shape& shape, int block_x, const char* codes, const float2* terms) {
  const void* table = matrix.table;
  const int chunks = shape.chunks, splits = shape.splits;
  constexpr int WARPS = TILES * PARTS, OWN_TOKENS = (TOKENS + WARPS - 1) / WARPS;  // whose norm a warp finishes
  constexpr int EARLY = TOKENS <= 2 ? 8 : 1;  // times 32 partial sums of squares, of which few tokens have many
  __shared__ float sums[PARTS][TOKENS][TILES * 16];
  __shared__ float factors[TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int slot = warp % TILES, cut = warp / TILES, parts = sharing_warps(splits), part = sharing_warp(cut);
#ifdef ACTIVATION
  const int tile = (block_x / 4 * 2 + slot) * 4 + block_x % 4;  // the same of two strips, gate's and up's
#else
  const int tile = block_x * TILES + slot;
#endif
  // Warps take chunks alternately, so that those of a block read what lies together.
  const int count = tile * 16 < matrix.out_features ? (chunks - part + parts - 1) / parts : 0;
  const char* strip = matrix.weights + (long)(tile / 4) * strip_bytes(chunks);

  auto request = [&](Raw(&raws)[UNROLL], int from) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (from + u < count) {
        const int chunk = part + (from + u) * parts;
        const Streamed block{strip + block_at(chunk)}, supers{strip + supers_at(chunk)};
        read_codes(raws[u], block, tile % 4, lane);
        read_scales(raws[u], block, supers, tile % 4, lane);
      }
  };
  Raw even[UNROLL], odd[UNROLL];
  request(even, 0);
  const float block_scale = count > 0 ? __ldg(matrix.block_scales + tile / 4) : 0.f;
  float biases[2] = {0.f, 0.f};  // of the outputs that the thread stores, the same of each token
  if (matrix.bias) read_biases(biases, matrix, block_x);
#ifdef RESIDUAL
  ResidualAdd residual_add;
  residual_add.read_weights(matrix, shape.stream, block_x);
#endif
  let_next_start();
  wait_for_previous();
#ifdef RESIDUAL
  residual_add.read_stream(matrix, shape.stream, block_x);
  const Norm norm{};  // of attention or an activation: there is none
#else
  const Norm& norm = shape.norm;
#endif
  float square_sums[OWN_TOKENS][EARLY];  // asked for now, summed at the end
#pragma unroll
  for (int i = 0; i < OWN_TOKENS; i++)
#pragma unroll
    for (int e = 0; e < EARLY; e++) {
      const int m = i * WARPS + warp, p = e * 32 + lane;
      square_sums[i][e] = m < TOKENS && p < norm.parts ? load_float(norm.square_sums + (long)m * norm.parts + p) : 0.f;
    }

  float scaled[2][TOKENS], beside[2][TOKENS];  // sums of scale * dot product, and of minima or scales * sum of x
#pragma unroll
  for (int m = 0; m < TOKENS; m++) scaled[0][m] = scaled[1][m] = beside[0][m] = beside[1][m] = 0.f;
  auto add = [&](const Raw& raw, const uint4(&x)[TOKENS], const float2(&term)[TOKENS]) {
#if E4M3
    float floats0[TOKENS], floats1[TOKENS];
    dot_floats(floats0, floats1, raw, x);
#else
    u32 q0[4], q1[4];
    all_code_bytes<0>(q0, raw, table);
    all_code_bytes<1>(q1, raw, table);
#endif
#if E2M1
    u32 n0[4], n1[4];
    all_code_bytes<0, true>(n0, raw, table);
    all_code_bytes<1, true>(n1, raw, table);
#endif
    const Pairs p = scale_pairs(raw);
    const float s0 = low_half(p.pair[0]), s1 = MINIMA ? low_half(p.pair[1]) : high_half(p.pair[0]);
    const float m0 = MINIMA ? high_half(p.pair[0]) : s0, m1 = MINIMA ? high_half(p.pair[1]) : s1;
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
#if E4M3
      const float d0 = floats0[m], d1 = floats1[m];
#else
      auto dots = [&](const u32(&q)[4]) {
        return dot4(q[3], x[m].w, dot4(q[2], x[m].z, dot4(q[1], x[m].y, dot4(q[0], x[m].x, 0))));
      };
#if E2M1
      const int d0 = dots(q0) - dots(n0), d1 = dots(q1) - dots(n1);
#else
      const int d0 = dots(q0), d1 = dots(q1);
#endif
#endif
      scaled[0][m] += s0 * term[m].x * (float)d0;
      scaled[1][m] += s1 * term[m].x * (float)d1;
      if constexpr (MINIMA || OFFSET != 0.f) { beside[0][m] += m0 * term[m].y; beside[1][m] += m1 * term[m].y; }
    }
  };
  auto load_x = [&](uint4(&x)[TOKENS], float2(&term)[TOKENS], int k) {
    const long chunk = part + k * parts;
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
      x[m] = load16(codes + ((long)m * chunks + chunk) * 64 + t * 16);
      term[m] = load_float2(terms + ((long)m * chunks + chunk) * 4 + t);
    }
  };
  auto consume = [&](const Raw(&raws)[UNROLL], int k) {
    if (k + UNROLL <= count) {
      uint4 x[UNROLL][TOKENS];
      float2 term[UNROLL][TOKENS];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) load_x(x[u], term[u], k + u);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) add(raws[u], x[u], term[u]);
    } else {
#pragma unroll
      for (int u = 0; u < UNROLL; u++)
        if (k + u < count) {
          uint4 x[TOKENS];
          float2 term[TOKENS];
          load_x(x, term, k + u);
          add(raws[u], x, term);
        }
    }
  };
  for (int k = 0; k < count; k += 2 * UNROLL) {
    request(odd, k + UNROLL);
    consume(even, k);
    request(even, k + 2 * UNROLL);
    consume(odd, k + UNROLL);
  }
  constexpr float scale0 = E4M3 ? 1.f : power(POSITION0 - 24), scale1 = E4M3 ? 1.f : power(POSITION1 - 24 - (BYTES_TIMES_16 ? 4 : 0));
  constexpr float shift0 = MINIMA ? 1.f : -OFFSET * power(POSITION0 - 24), shift1 = MINIMA ? 1.f : -OFFSET * power(POSITION1 - 24);
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    float low = scaled[0][m] * scale0 + beside[0][m] * shift0, high = scaled[1][m] * scale1 + beside[1][m] * shift1;
    low += __shfl_xor_sync(~0u, low, 1);
    high += __shfl_xor_sync(~0u, high, 1);
    low += __shfl_xor_sync(~0u, low, 2);
    high += __shfl_xor_sync(~0u, high, 2);
    if (t == 0) { sums[cut][m][slot * 16 + g] = weighed(low * block_scale, biases[0], matrix); sums[cut][m][slot * 16 + g + 8] = weighed(high * block_scale, biases[1], matrix); }
  }
  if (norm.parts > 0) {
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; i++) {
      const int m = i * WARPS + warp;
      if (m >= TOKENS) break;
      float sum = square_sums[i][0];
#pragma unroll
      for (int e = 1; e < EARLY; e++) sum += square_sums[i][e];
      for (int p = EARLY * 32 + lane; p < norm.parts; p += 32) sum += load_float(norm.square_sums + (long)m * norm.parts + p);
#pragma unroll
      for (int o = 1; o < 32; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
      if (lane == 0) factors[m] = norm.factor(sum);
    }
  }
  __syncthreads();
#ifdef ACTIVATION
  store_gated(sums, factors, norm.parts > 0, biases, matrix, block_x);
#elif defined RESIDUAL
  residual_add.store(sums, matrix, shape.stream, block_x);
#else
  store_sums(sums, factors, norm.parts > 0, biases[0], matrix, shape, block_x);
#endif
}
