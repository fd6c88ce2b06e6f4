// A tile's queries, keys and values after the convolution, and after norms. A warp has 16 tokens of a head, whose
// columns its lanes take by fours. Grid: heads, tiles.
// Defined around it, beside what tiles.cu has: LENGTH (of the convolution) RING WIDTH (of a ring: tokens, columns).

constexpr int TOKENS = 16, BEFORE = LENGTH - 1;

struct Sums { const float *partials, *bias; int splits, split_stride, token_stride; };

INLINE float4 four(const float* at) {
  const uint4 x = load16(at);
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}
INLINE void add(float4& to, float4 x) { to.x += x.x; to.y += x.y; to.z += x.z; to.w += x.w; }

struct Row { const float* ring; int start, count, position; };

// Some columns of a warp's tokens, and of those that the first of them sees: from sums of the matmul's parts, or from
// the ring where they came before the step. `first`: its place among the row's tokens of the step. All is asked for
// before any of it is used.
INLINE void load_inputs(float4 (&x)[TOKENS + BEFORE], const Sums& sums, const Row& row, int first, int column) {
  const float* tokens = sums.partials + (long)(row.start + first) * sums.token_stride + column;
#pragma unroll
  for (int i = 0; i < TOKENS + BEFORE; i++) {
    const int offset = first + i - BEFORE;
    x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i < BEFORE && offset < 0) {
      if (row.position + offset >= 0) x[i] = four(row.ring + (row.position + offset) % RING * WIDTH + column);
    } else if (offset < row.count) {
      x[i] = four(tokens + (i - BEFORE) * (long)sums.token_stride);
    }
  }
  if (sums.splits == 1 && !sums.bias) return;
#pragma unroll
  for (int i = 0; i < TOKENS + BEFORE; i++) {
    const int offset = first + i - BEFORE;
    if (offset < 0 || offset >= row.count) continue;
    const float* at = tokens + (i - BEFORE) * (long)sums.token_stride;
#pragma unroll 1
    for (int s = 1; s < sums.splits; s++) add(x[i], four(at + (long)s * sums.split_stride));
    if (sums.bias) add(x[i], four(sums.bias + column));
  }
}
INLINE float silu(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + power2(x * -1.4426950408889634f)));
  return x * r;
}

extern "C" __global__ void __launch_bounds__(128)
NAME(const float* partials, const float* bias, const float* rings, const float* kernel, const int* recurring,
     const int* tile_rows, const int* tile_firsts, char* mixed, float scale, int splits, int split_stride,
     int token_stride) {
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.x, tile = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int index = load_int(tile_rows + tile);
  if (index < 0) return;
  const int* fields = recurring + index * FIELDS;
  const int slot = load_int(fields);
  const Row row{rings + (long)slot * (RING * WIDTH), load_int(fields + 1), load_int(fields + 2), load_int(fields + 5)};
  const int first = load_int(tile_firsts + tile) + warp * TOKENS, column = head * HEAD + lane * 4;
  float4 x[TOKENS + BEFORE];
  load_inputs(x, {partials, bias, splits, split_stride, token_stride}, row, first, column);
  float taps[4 * LENGTH];
#pragma unroll
  for (int i = 0; i < LENGTH; i++) *(float4*)(taps + i * 4) = *(const float4*)(kernel + column * LENGTH + i * 4);
  char* to = mixed + ((long)tile * HEADS + head) * HEAD_BYTES + lane / 16 * RUN + (lane & 1) * 8;
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int tap = 0; tap < LENGTH; tap++) {
      y.x += taps[tap] * x[t + tap].x;
      y.y += taps[1 * LENGTH + tap] * x[t + tap].y;
      y.z += taps[2 * LENGTH + tap] * x[t + tap].z;
      y.w += taps[3 * LENGTH + tap] * x[t + tap].w;
    }
    y = make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w));
    float factor = VALUE_UNIT;
    if (head < 2 * KEY_HEADS) {
      float square_sum = y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
#pragma unroll
      for (int apart = 16; apart > 0; apart /= 2) square_sum += __shfl_xor_sync(~0u, square_sum, apart);
      factor = rsqrtf(square_sum + 1e-6f) * (head < KEY_HEADS ? scale / VALUE_UNIT : 1.f);
    }
    if (first + t >= row.count) factor = 0.f;
    const int place = warp * TOKENS + t;
    const uint2 halves = make_uint2(pair(y.x * factor, y.y * factor), pair(y.z * factor, y.w * factor));
    *(uint2*)(to + interleaved(place, lane % 16 / 2)) = halves;
  }
}
