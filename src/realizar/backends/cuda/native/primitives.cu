// Primitives of all matmul kernels, for any weight format: half floats, memory, programmatic launch. No header is
// included; half floats are handled through inline PTX.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__
#define SMALL_F16 0
#define SMALL_U4_PAIR 1
#define SMALL_I8 3
#define SMALL_U4_ODD 4
#define SMALL_NONE 5
#define SMALL_F16_HIGH 6

INLINE u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
INLINE u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
INLINE u32 add2(u32 a, u32 b) { u32 r; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
INLINE float low_half(u32 x) { float r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(x)); return r; }
INLINE float high_half(u32 x) { float r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(x)); return r; }
INLINE float power2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
INLINE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
// Eight times the byte's sign bit where bit 3 of its selector is set.
INLINE u32 permute_or_sign(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
// (a & mask) | b in one instruction
INLINE u32 masked_or(u32 a, u32 mask, u32 b) { u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(b)); return r; }
template <int N> INLINE u32 shifted(u32 x) { if constexpr (N >= 0) return x << N; else return x >> -N; }

// Two floats as halves, those beyond the largest cut to it; NaN stays NaN.
INLINE u32 limited_halves(float low, float high) {
  u32 r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
constexpr float LARGEST_HALF = 65504.f;
// The same of one, also before compute capability 9.0.
INLINE u16 limited_half(float x) {
  u16 half;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(-LARGEST_HALF));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(LARGEST_HALF));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}
// An activation's outputs are divided by this as they leave as halves, as a token's largest is not known then, and the
// next matmul multiplies it back. They hold up to 65504 * 64 = 4.2e6, beyond which values stop there, in steps of
// 2^-24 * 64 = 3.8e-6 at the least.
constexpr float TOKEN_FACTOR = 64.f;
INLINE u32 e4m3_pair(float low, float high) {
  u32 r;
  asm("{.reg .b16 both; cvt.rn.satfinite.e4m3x2.f32 both, %2, %1; cvt.u32.u16 %0, both;}"
      : "=r"(r) : "f"(low), "f"(high));
  return r;
}
// Where the scale of a row of 8-bit floats stands in its block, so that a lane of the matmul has those of its two
// tokens two places apart: layouts/activations.py.
INLINE int scale_place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2; }
// Words of four lanes: the k-th of each goes to lane k, in the order of lanes.
INLINE void transpose_words(u32 (&words)[4], int t) {
#pragma unroll
  for (int s = 1; s <= 2; s *= 2)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (k & s) continue;
      const u32 got = __shfl_xor_sync(~0u, t & s ? words[k] : words[k | s], s);
      if (t & s) words[k] = got;
      else words[k | s] = got;
    }
}
// 8-bit floats of 64 columns that four lanes have, columns 2 t and 2 t + 1 of every eight: those of the columns from
// 16 i on in word i. Returns the sixteen from 16 t on, in their order.
INLINE uint4 sixteen_columns(u32 (&words)[4], int t) {
  transpose_words(words, t);
  return make_uint4(permute(words[0], words[1], 0x5410), permute(words[2], words[3], 0x5410),
                    permute(words[0], words[1], 0x7632), permute(words[2], words[3], 0x7632));
}
// Sums that leave as halves are divided by this: `HALF_FACTOR` of kernels/reduce.py.
constexpr float SUM_FACTOR = 16.f;

// Programmatic dependent launch; nothing before compute capability 9.0.
INLINE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
INLINE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Activations and their scales, written by the kernel before: never through the read-only path, and never before the
// wait.
INLINE uint4 load16(const void* at) { uint4 r; asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at) : "memory"); return r; }
INLINE float2 load_float2(const void* at) { float2 r; asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(at) : "memory"); return r; }
INLINE float load_float(const void* at) { float r; asm volatile("ld.global.f32 %0, [%1];" : "=f"(r) : "l"(at) : "memory"); return r; }
// Sixteen bytes from global to shared memory, asynchronously.
INLINE void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

INLINE int load_int(const void* at) {
  int r;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}

// Where weights are read from: global memory, each byte once, or shared memory. Fetched by 256 bytes instead of 128 a
// step of one token took 1.5 % longer.
struct Streamed {
  const char* base;
  INLINE uint4 read16(int at) const { uint4 r; asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(base + at)); return r; }
  INLINE uint2 read8(int at) const { uint2 r; asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(base + at)); return r; }
  INLINE u32 read4(int at) const { u32 r; asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(r) : "l"(base + at)); return r; }
  INLINE u32 read2(int at) const { u16 r; asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(base + at)); return r; }
  INLINE u32 read1(int at) const { u32 r; asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(r) : "l"(base + at)); return r; }
};
struct Staged {
  const char* base;
  INLINE uint4 read16(int at) const { return *(const uint4*)(base + at); }
  INLINE uint2 read8(int at) const { return *(const uint2*)(base + at); }
  INLINE u32 read4(int at) const { return *(const u32*)(base + at); }
  INLINE u32 read2(int at) const { return *(const u16*)(base + at); }
  INLINE u32 read1(int at) const { return *(const u8*)(base + at); }
};

// A power of two as a half, twice in a word; 2^-24 .. 2^15.
constexpr u32 half_power(int e) { return (e >= -14 ? (u32)(e + 15) << 10 : 1u << (e + 24)) * 0x10001u; }
// Of 0 it is 0: a compiler evaluates it in branches that it discards, too, and would take 0.8 s until it gave up.
constexpr int log2_of(float x) {
  int e = 0;
  for (; x > 1.f; x *= 0.5f) e++;
  for (; x > 0.f && x < 1.f; x *= 2.f) e--;
  return e;
}

// Computed again where it is asked for: registers are scarce there, and a tile takes long.
INLINE int anew(int x) { asm volatile("" : "+r"(x)); return x; }

template <int N> struct Index { static constexpr int value = N; };

INLINE int dot4(u32 codes, u32 x, int sum) { int r; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(codes), "r"(x), "r"(sum)); return r; }
constexpr float power(int e) { float r = 1.f; for (; e < 0; e++) r *= 0.5f; for (; e > 0; e--) r *= 2.f; return r; }

extern __shared__ __align__(1024) char ring[];

// One matrix of a launch: its first block in x is 0 for the kernel's body.
struct Matrix {
  const char* weights;
  const float* block_scales;
  const void* table;
  float* partials;  // of its own columns; with the gated epilogue the next matmul's codes or halves, and with the
                    // residual-add epilogue the stream
  int out_features;
  float* out_scales;  // with the gated epilogue: the next matmul's token scales, or its terms
  float factor;       // of its outputs
  const float* bias;  // of its out_features, or null
};
// A folded norm: tokens still lack their factor 1 / sqrt(mean of squares + eps). A token's sum of squares comes in
// parts, a multiple of 8; zero parts: no norm is folded.
struct Norm {
  const float* square_sums;  // [tokens, parts]
  int parts;
  float inverse_width, eps;
  INLINE float factor(float sum) const { return rsqrtf(sum * inverse_width + eps); }
};
// The residual stream that a matmul's sums are added to, and the norm of it that comes next, but for its root.
struct ResidualStream {
  const float* bias;         // of the matmul, or null
  float scale;               // of what is added
  const float* norm_weight;  // null: the sums are added and nothing else is written
  char* codes;               // of stream * norm_weight: [tokens, chunks of 64]
  float2* terms;
  float* square_sums;  // [tokens, parts]: partial sums of a token's squares, each of 16 columns
  int parts;
};
// Fields that the matrices of a launch have in common.
struct Shape { int tokens, chunks, splits, token_stride, split_stride; Norm norm; ResidualStream stream; };

// The factor of a token's sums. Only after the wait; tokens beyond the step's have no squares.
INLINE float token_scale(const float* token_scales, const Shape& shape, int token) {
  const float scale = load_float(token_scales + token);
  if (shape.norm.parts == 0 || token >= shape.tokens) return scale;
  const float* square_sums = shape.norm.square_sums + (long)token * shape.norm.parts;
  float sum = 0.f;
  for (int p = 0; p < shape.norm.parts; p += 8) {
    const uint4 a = load16(square_sums + p), b = load16(square_sums + p + 4);
    sum += ((__uint_as_float(a.x) + __uint_as_float(a.y)) + (__uint_as_float(a.z) + __uint_as_float(a.w))) +
           ((__uint_as_float(b.x) + __uint_as_float(b.y)) + (__uint_as_float(b.z) + __uint_as_float(b.w)));
  }
  return scale * shape.norm.factor(sum);
}
