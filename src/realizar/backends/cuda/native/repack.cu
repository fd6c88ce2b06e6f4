// Raw ggml blocks to fragment order on the device, for types with one-level scales; equal to fragments.py byte for
// byte. Layouts of blocks: ggml-common.h.
// Defined by the loader beside a format's macros: TYPE_<name of a layout>, NAME_TOPS, NAME_PACK.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
#define INLINE __device__ __forceinline__

INLINE float half_at(const u8* at) { float r; asm("{.reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "h"(*(const u16*)at)); return r; }
INLINE u16 to_half(float x) { u16 r; asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h;}" : "=h"(r) : "f"(x)); return r; }
INLINE u32 nibble(const u8* at, int i, int run) { return at[i % run] >> (i / run * 4) & 15; }  // column i and i + run share a byte

// Each type: weights and bytes of a block; code, scale and minimum of weight i of a block.
#if defined(TYPE_Q4_0) || defined(TYPE_Q4_1) || defined(TYPE_Q5_0) || defined(TYPE_Q5_1) || defined(TYPE_IQ4_NL)
constexpr int WEIGHTS = 32, HEAD = MINIMA ? 4 : 2, FIFTH = BITS == 5 ? 4 : 0, BYTES = HEAD + FIFTH + 16;
INLINE u32 code(const u8* b, int i) { return nibble(b + HEAD + FIFTH, i, 16) | (FIFTH ? (u32)(b[HEAD + i / 8] >> (i % 8) & 1) << 4 : 0); }
INLINE float scale(const u8* b, int) { return half_at(b); }
INLINE float minimum(const u8* b, int) { return half_at(b + 2); }
#elif defined(TYPE_Q8_0)
constexpr int WEIGHTS = 32, BYTES = 34;
INLINE u32 code(const u8* b, int i) { return b[2 + i] ^ 0x80; }
INLINE float scale(const u8* b, int) { return half_at(b); }
INLINE float minimum(const u8*, int) { return 0.f; }
#elif defined(TYPE_Q4_K) || defined(TYPE_Q5_K)
constexpr int WEIGHTS = 256, FIFTH = BITS == 5 ? 32 : 0, BYTES = 144 + FIFTH;
INLINE u32 code(const u8* b, int i) {
  return nibble(b + 16 + FIFTH + i / 64 * 32, i % 64, 32) | (FIFTH ? (u32)(b[16 + i % 32] >> (i / 32) & 1) << 4 : 0);
}
INLINE u32 six_bits(const u8* b, int group, int which) {  // which: 0 scale, 1 minimum
  const u8* s = b + 4;
  if (group < 4) return s[group + which * 4] & 63;
  return (s[group + 4] >> (which * 4) & 15) | (s[group - 4 + which * 4] >> 6) << 4;
}
INLINE float scale(const u8* b, int i) { return (float)six_bits(b, i / 32, 0) * half_at(b); }
INLINE float minimum(const u8* b, int i) { return (float)six_bits(b, i / 32, 1) * -half_at(b + 2); }
#elif defined(TYPE_Q6_K)
constexpr int WEIGHTS = 256, BYTES = 210;
INLINE u32 code(const u8* b, int i) {
  return nibble(b + i / 128 * 64, i % 128, 64) | (u32)(b[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) << 4;
}
INLINE float scale(const u8* b, int i) { return (float)(signed char)b[192 + i / 16] * half_at(b + 208); }
INLINE float minimum(const u8*, int) { return 0.f; }
#elif defined(TYPE_IQ4_XS)
constexpr int WEIGHTS = 256, BYTES = 136;
INLINE u32 code(const u8* b, int i) { return nibble(b + 8 + i / 32 * 16, i % 32, 16); }
INLINE float scale(const u8* b, int i) {
  const int g = i / 32, low = b[4 + g / 2] >> (g % 2 * 4) & 15, high = b[2 + g / 4] >> (g % 4 * 2) & 3;
  return (float)((low | high << 4) - 32) * half_at(b);
}
INLINE float minimum(const u8*, int) { return 0.f; }
#elif defined(TYPE_MXFP4)
constexpr int WEIGHTS = 32, BYTES = 17;
INLINE u32 code(const u8* b, int i) { return nibble(b + 1, i, 16); }
INLINE float scale(const u8* b, int) { return ldexpf(1.f, (int)b[0] - 128); }
INLINE float minimum(const u8*, int) { return 0.f; }
#endif

constexpr int SET_COLUMNS = 64 / SETS;
constexpr int SCALE_BYTES = TILE_SCALE_BYTES / (SETS * 16);  // with the minimum; one byte is the upper one of a half

// tops: int32 [strips, 2], zeroed before: the bits of the largest |scale| and |minimum| of 64 output features.
extern "C" __global__ void NAME_TOPS(const u8* __restrict__ raw, int* __restrict__ tops, int out_features, int cols) {
  __shared__ int largest[2];
  if (threadIdx.x < 2) largest[threadIdx.x] = 0;
  __syncthreads();
  const int groups = cols / SET_COLUMNS, first = blockIdx.y * 64;
  const long row_bytes = (long)(cols / WEIGHTS) * BYTES;
  int top = 0, low = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 64 * groups; i += gridDim.x * blockDim.x) {
    const int out_feature = first + i / groups, col = i % groups * SET_COLUMNS;
    if (out_feature >= out_features) break;
    const u8* block = raw + out_feature * row_bytes + (long)(col / WEIGHTS) * BYTES;
    top = max(top, __float_as_int(fabsf(scale(block, col % WEIGHTS))));
    if constexpr (MINIMA) low = max(low, __float_as_int(fabsf(minimum(block, col % WEIGHTS))));
  }
  atomicMax(largest, top);
  atomicMax(largest + 1, low);
  __syncthreads();
  if (threadIdx.x < 2) atomicMax(tops + blockIdx.y * 2 + threadIdx.x, largest[threadIdx.x]);
}

INLINE int exponent_above(int bits) {  // x such that a float is below 2^x
  int e = -200;
  if (bits > 0) frexpf(__int_as_float(bits), &e);
  return e;
}

// One block of 128 threads per 64 output features and chunk; a thread is a lane of a tile. Strips land `stride` apart.
extern "C" __global__ void __launch_bounds__(128) NAME_PACK(const u8* __restrict__ raw, const int* __restrict__ tops, u8* __restrict__ out, float* __restrict__ block_scales, int out_features, int cols, int chunks, int stride) {
  const int chunk = blockIdx.x, strip = blockIdx.y, tile = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  int exponent = 15 - 24 + POSITION0 - exponent_above(tops[strip * 2]);
  if constexpr (MINIMA) exponent = min(exponent, 15 - exponent_above(tops[strip * 2 + 1]));
  exponent = max(-100, min(100, exponent));
  if (chunk == 0 && threadIdx.x == 0) block_scales[(long)strip * stride] = ldexpf(1.f, -exponent);
  const long row_bytes = (long)(cols / WEIGHTS) * BYTES;
  const int col = chunk * 64 + t * 16;
  u8* block = out + ((long)strip * stride * chunks + chunk) * BLOCK_BYTES;
  u8* scales = block + CODES_BYTES + tile * TILE_SCALE_BYTES + (t * SETS / 4 * 8 + g) * (2 * SCALE_BYTES);
  u32 four[4] = {}, two[2] = {}, one = 0, eight[8] = {};
  for (int half = 0; half < 2; half++) {
    const int out_feature = strip * 64 + tile * 16 + half * 8 + g;
    const bool real = out_feature < out_features && col < cols;
    const u8* source = raw + out_feature * row_bytes + (long)(col / WEIGHTS) * BYTES;
    const int at = col % WEIGHTS;
    if (real)
      for (int i = 0; i < 16; i++) {
        const u32 q = code(source, at + i);
        const int j = i / 4, b = i % 4;
        if constexpr (BITS == 8) eight[half * 4 + j] |= q << (b * 8);
        else if constexpr (CODEBOOK) four[j] |= q << (half * 16 + b * 4);
        else four[j] |= (q & 15) << (b * 8 + half * 4);
        if constexpr (BITS == 6) two[half] |= (q >> 4) << (b * 8 + j * 2);
        if constexpr (BITS == 5) one |= (q >> 4) << (b * 8 + half * 4 + j);
      }
    if (t * SETS % 4 == 0) {
      u8* to = scales + half * SCALE_BYTES;
      const u16 bits = real ? to_half(ldexpf(scale(source, at), exponent + 24 - (half ? POSITION1 : POSITION0))) : 0;
      if constexpr (SCALE_BYTES == 1) *to = bits >> 8;
      else *(u16*)to = bits;
      if constexpr (MINIMA) ((u16*)to)[1] = real ? to_half(ldexpf(minimum(source, at), exponent)) : 0;
    }
  }
  if constexpr (BITS == 8) {
    for (int half = 0; half < 2; half++)
      *(uint4*)(block + tile * 1024 + half * 512 + lane * 16) = make_uint4(eight[half * 4], eight[half * 4 + 1], eight[half * 4 + 2], eight[half * 4 + 3]);
  } else *(uint4*)(block + threadIdx.x * 16) = make_uint4(four[0], four[1], four[2], four[3]);
  if constexpr (BITS == 6) *(uint2*)(block + 2048 + threadIdx.x * 8) = make_uint2(two[0], two[1]);
  if constexpr (BITS == 5) *(u32*)(block + 2048 + threadIdx.x * 4) = one;
}
