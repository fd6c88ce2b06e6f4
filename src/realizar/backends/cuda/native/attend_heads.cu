// Heads of queries, keys and values as a block of attention holds them: where they lie, how they are normed, rotated,
// kept in the cache and multiplied.
// Defined around it: what attend.cu has.

constexpr int THREADS = WARPS * 32, TILE = 16;
constexpr int EACH = (HEAD + 31) / 32;  // dimensions of a lane: lane, lane + 32, ...
constexpr int KEY_VECTORS = (HEAD + 31) / 32, VALUE_VECTORS = (HEAD + 63) / 64;  // of eight dimensions, of a lane and a key
static_assert(BLOCK_SIZE % TILE == 0, "tiles lie in one block");
constexpr int HEAD_PITCH = HEAD + 2;  // of heads in shared memory, so that a fragment's loads hit all banks
constexpr int MAX_PARTS = 64, CUT = 64;  // keys that parts are multiples of
constexpr int SCALE_GROUPS = (HEAD + 31) / 32;
constexpr bool IN_LANE = !INTERLEAVED && ROTARY % 64 == 0;  // whether a lane holds both dimensions of a pair
#define NEVER __int_as_float(0xff800000)  // minus infinity

#if ELEMENT >= 2
typedef uint2 Vector;
constexpr int BYTES = 1, SCALES_BYTES = ELEMENT == 2 ? TILE * SCALE_GROUPS * 2 : 0;  // of a tile of keys
#else
typedef uint4 Vector;
constexpr int BYTES = 2, SCALES_BYTES = 0;
#endif
// A tile lies in shared memory as runs of keys, each a step of banks after the one before; with four runs, lanes that
// read at once read from different ones. n, t, e stand for key 2n + 4t, or 2n + 4(t ^ 2) + 1.
constexpr int RUN = TILE / RUNS, KEY_BYTES = HEAD * BYTES, RUN_BYTES = RUN * KEY_BYTES, RUN_PITCH = RUN_BYTES + (RUNS > 1 ? 32 : 0);
constexpr int TILE_BYTES = RUNS * RUN_PITCH;
INLINE int key_of(int n, int t, int e) { return (e ? (t ^ 2) * 4 + 1 : t * 4) + n * 2; }
static_assert(2 * (TILE_BYTES + SCALES_BYTES) <= STAGE_BYTES);  // keys, values, the keys' scales, the values'
// A warp's result takes their place: two queries, then room, so that stores hit more banks.
constexpr int PAIR_PITCH = 2 * HEAD + 4;
static_assert((GROUP + 1) / 2 * PAIR_PITCH * 4 <= STAGES * STAGE_BYTES);

#if ELEMENT == 0
#define HALVES "bf16"
#else
#define HALVES "f16"
#endif

INLINE u32 load_u16(const void* at) {
  u16 r;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(r) : "l"(at) : "memory");
  return r;
}
INLINE int load_s8(const void* at) {
  int r;
  asm volatile("ld.global.s8 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}
INLINE void store_u16(void* at, u32 bits) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"((u16)bits) : "memory"); }
INLINE u32 to_half(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
INLINE u32 to_bfloat(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
INLINE float from_half(u32 x) { return low_half(x); }

// The one scale of a layer's keys, or of its values.
INLINE float scale_of(const char* scales) { return ELEMENT == 3 ? __ldg((const float*)scales) : 1.f; }
// Two bytes of e4m3 as halves; what is no number stays so. Without the instruction, bits in the places of a half, which
// is 2^-8 of the number.
INLINE u32 from_e4m3(u32 pair) {
#if __CUDA_ARCH__ >= 890
  u32 r;
  asm("{.reg .b16 both; cvt.u16.u32 both, %1; cvt.rn.f16x2.e4m3x2 %0, both;}" : "=r"(r) : "r"(pair));
  return r;
#else
  const u32 upper = permute(pair, 0, 0x1404), halves = (upper >> 1 & 0x3f803f80u) | (upper & 0x80008000u);
  return mul2(halves | ((halves + 0x00800080u) & 0x40004000u), 0x5c005c00u);
#endif
}
// The byte of the nearest e4m3, of two the even one, or of 448.
INLINE u32 to_e4m3(float x) {
#if __CUDA_ARCH__ >= 890
  return e4m3_pair(x, 0.f) & 0xff;
#else
  const u32 bits = __float_as_uint(x), size = bits & 0x7fffffff;
  const u32 normal = (size + 0x7ffff + (size >> 20 & 1) >> 20) - (120 << 3);
  const u32 number = size < 0x3c800000 ? (u32)__float2int_rn(fabsf(x) * 512.f) : min(normal, 0x7e);
  const u32 code = size > 0x7f800000 ? 0x7f : number;
  return code | (bits >> 24 & 0x80);
#endif
}

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
INLINE void unpack(u32 (&x)[4], const Vector& raw, u32 scale) {
  const u32 words[2] = {raw.x ^ 0x80808080u, raw.y ^ 0x80808080u};
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = mul2(add2(permute(words[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140), 0xe480e480u), scale);
}
#elif ELEMENT == 3
INLINE void unpack(u32 (&x)[4], const Vector& raw, u32) {
  x[0] = from_e4m3(raw.x); x[1] = from_e4m3(raw.x >> 16); x[2] = from_e4m3(raw.y); x[3] = from_e4m3(raw.y >> 16);
}
#else
INLINE void unpack(u32 (&x)[4], const Vector& raw, u32) { x[0] = raw.x; x[1] = raw.y; x[2] = raw.z; x[3] = raw.w; }
#endif

#define COPIES_BULK (BULK && __CUDA_ARCH__ >= 900)
#if !COPIES_BULK
// Copies that a thread waits for by number: all but the newest N groups. What is read once leaves the second-level
// cache first.
INLINE void copy_async16(u32 to, const void* from) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INLINE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif

INLINE float largest_of_warp(float x) { for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o)); return x; }
INLINE float sum_of_warp(float x) { for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o); return x; }
INLINE float cap_score(float s, float cap) { return CAP ? cap - 2.f * cap / (__expf(s * (2.f / cap)) + 1.f) : s; }
INLINE float weight_of(float top, float reference) { return top == NEVER ? 0.f : __expf(top - reference); }

// One warp: the columns of a head, the matmul's splits summed, plus the bias; zeros where it is not `live`.
INLINE void sum_splits(float (&x)[EACH], const float* from, const float* bias, int split_stride, bool live, int lane) {
  float parts_of[EACH][SPLITS];
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
      parts_of[i][s] = live && lane + i * 32 < HEAD ? load_float(from + (long)s * split_stride + i * 32) : 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    x[i] = parts_of[i][0];
#pragma unroll
    for (int s = 1; s < SPLITS; s++) x[i] += parts_of[i][s];
    if constexpr (BIAS) x[i] += live && lane + i * 32 < HEAD ? bias[i * 32] : 0.f;
  }
}

// Cosines and sines for a lane's dimensions, where it holds both of each pair.
struct Angles { float cosine[ROTARY / 64 + 1], sine[ROTARY / 64 + 1]; };

// One warp: a head's float32 values, normed and rotated; `weight` is 0 where nothing is normed. `room`: for a head.
INLINE void norm_and_rotate(float (&x)[EACH], float* room, const float* weight, const float* norm_bias, float eps, const Angles& angles, const float* cosine, const float* sine, int lane) {
  if constexpr (NORM > 0)
    if (weight) {
      float mean = 0.f, square_sum = 0.f;
#pragma unroll
      for (int i = 0; i < EACH; i++) mean += x[i];
      mean = NORM == 2 ? sum_of_warp(mean) / HEAD : 0.f;
#pragma unroll
      for (int i = 0; i < EACH; i++) { x[i] = lane + i * 32 < HEAD ? x[i] - mean : 0.f; square_sum += x[i] * x[i]; }
      const float scale = 1.f / sqrtf(sum_of_warp(square_sum) / HEAD + eps);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int d = lane + i * 32;
        if (d < HEAD) x[i] = x[i] * scale * weight[d] + (NORM_BIAS ? norm_bias[d] : 0.f);
      }
    }
  if constexpr (ROTARY > 0 && IN_LANE) {
#pragma unroll
    for (int i = 0; i < ROTARY / 64; i++) {
      const float first = x[i], second = x[i + ROTARY / 64];
      x[i] = first * angles.cosine[i] - second * angles.sine[i];
      x[i + ROTARY / 64] = second * angles.cosine[i] + first * angles.sine[i];
    }
  } else if constexpr (ROTARY > 0) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (lane + i * 32 < ROTARY) room[lane + i * 32] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int d = lane + i * 32;
      if (d >= ROTARY) continue;
      const bool first = INTERLEAVED ? d % 2 == 0 : d < ROTARY / 2;
      const int partner = INTERLEAVED ? d ^ 1 : first ? d + ROTARY / 2 : d - ROTARY / 2, angle = INTERLEAVED ? d / 2 : first ? d : partner;
      x[i] = x[i] * cosine[angle] + (first ? -room[partner] : room[partner]) * sine[angle];
    }
    __syncwarp();
  }
}

// One warp: a head's float32 values by their root mean square.
INLINE void divide_by_root(float (&x)[EACH], float eps) {
  float square_sum = 0.f;  // beyond the head are zeros
#pragma unroll
  for (int i = 0; i < EACH; i++) square_sum += x[i] * x[i];
  const float scale = 1.f / sqrtf(sum_of_warp(square_sum) / HEAD + eps);
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] *= scale;
}

// One warp: a head into its place in the cache; it becomes what the cache then holds.
INLINE void keep(float (&head)[EACH], char* cache, char* scales, long place, bool stored, int lane) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int d = lane + i * 32;
    const float x = d < HEAD ? head[i] : 0.f;
#if ELEMENT == 2
    const u32 largest = to_half(largest_of_warp(fabsf(x)) / 127.f), bits = __any_sync(~0u, x != x) ? 0x7e00 : largest;
    const float scale = from_half(bits), code = fminf(fmaxf(rintf(x / (scale > 0.f ? scale : 1.f)), -127.f), 127.f);
    head[i] = code * scale;
    if (stored && d < HEAD) cache[place * HEAD + d] = (char)(int)code;
    if (stored && lane == 0) store_u16(scales + (place * SCALE_GROUPS + i) * 2, bits);
#elif ELEMENT == 3
    const float scale = scale_of(scales);
    const u32 code = to_e4m3(x / scale);
    head[i] = from_half(from_e4m3(code)) * scale;
    if (stored && d < HEAD) cache[place * HEAD + d] = (char)code;
#else
    const u32 bits = ELEMENT == 0 ? to_bfloat(x) : to_half(x);
    head[i] = ELEMENT == 0 ? __uint_as_float(bits << 16) : from_half(bits);
    if (stored && d < HEAD) store_u16(cache + (place * HEAD + d) * 2, bits);
#endif
  }
}

// One warp: a head that `keep` has stored; zeros where it is not `live`. An earlier kernel of the step wrote it.
INLINE void take_kept(float (&head)[EACH], const char* cache, const char* scales, long place, bool live, int lane) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int d = lane + i * 32;
    head[i] = 0.f;
    if (!live || d >= HEAD) continue;
#if ELEMENT == 2
    const float scale = from_half(load_u16(scales + (place * SCALE_GROUPS + i) * 2));
    head[i] = (float)load_s8(cache + place * HEAD + d) * scale;
#elif ELEMENT == 3
    head[i] = from_half(from_e4m3(load_s8(cache + place * HEAD + d) & 0xff)) * scale_of(scales);
#else
    const u32 bits = load_u16(cache + (place * HEAD + d) * 2);
    head[i] = ELEMENT == 0 ? __uint_as_float(bits << 16) : from_half(bits);
#endif
  }
}
