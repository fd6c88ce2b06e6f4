// The gated epilogue of the Hopper kernel: activation(gate) * up, written as halves in the order in which the next
// matmul reads them. Strips of gate and up alternate, so that a warpgroup's two strips are gate and up of the same 64
// outputs: one chunk of the next matmul's columns.
// Defined around it: what gated_epilogue.cu and wgmma.cu have.

// A token's largest value is not known here, so all tokens are divided by the same power of two. Halves then hold up to
// 65504 * 64 = 4.2e6, beyond which values stop there, in steps of 2^-24 * 64 = 3.8e-6 at the least.
constexpr float TOKEN_FACTOR = 64.f, LARGEST_HALF = 65504.f;
// Bytes from one core matrix column to the next: of a chunk in memory, and as staged, where a warp's stores shall hit
// more banks.
constexpr int CORE_BYTES = TOKENS * 16, CORE_PITCH = CORE_BYTES + 16, GATED_BYTES = 8 * CORE_PITCH;

INLINE u16 limited_half(float x) {  // NaN stays NaN
  u16 half;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(-LARGEST_HALF));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(LARGEST_HALF));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}

// c: sums of gate and up, with their blocks' scales. strip: the gate's, of `strips`. scales: of the block's tokens. All
// of the block's tokens are written, also those beyond the step's: they come from the same tokens of the input, and no
// token of the next matmul sees another. The ring is free: every warpgroup has waited for its matmuls.
INLINE void store_gated(const float (&c)[STRIPS][TOKENS / 2], const float (&strip_scales)[STRIPS], const Matrix& matrix, int block_x, int strip, int strips, const float* scales) {
  static_assert(STRIPS == 2 && TURNS == 1, "a warpgroup holds the gate and up of its outputs, the same in every block");
  static_assert(TOKENS <= 128, "a thread of the first warpgroup for each row");
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, tile = thread / 32, g = thread % 32 >> 2, t = thread & 3;
  if (block_x == 0 && threadIdx.x < TOKENS) matrix.out_scales[blockIdx.z * TOKENS + threadIdx.x] = TOKEN_FACTOR;
  if (strip >= strips) return;
  // Of column d = 16 tile + g (+ 8) of the chunk: core matrix d % 16 / 4 * 2 + d % 2, place d / 16 * 2 + d % 4 / 2.
  char* staged = ring + group * GATED_BYTES;
  char* to = staged + ((g >> 2) * 2 + (g & 1)) * CORE_PITCH + t * 32 + (tile * 2 + (g >> 1 & 1)) * 2;
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float scale = scales[m * 8 + t * 2 + e];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = m * 4 + half * 2 + e;
        const float gate = c[0][i] * (strip_scales[0] * scale), up = c[1][i] * (strip_scales[1] * scale);
        *(u16*)(to + half * 4 * CORE_PITCH + m * 128 + e * 16) = limited_half(gated(gate, up) * (1.f / TOKEN_FACTOR));
      }
    }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
  if (thread < 8) {
    char* out = (char*)matrix.partials + ((long)blockIdx.z * (strips / 2) + strip / 2) * (8 * CORE_BYTES);
    store_bulk(out + thread * CORE_BYTES, (u32)__cvta_generic_to_shared(staged + thread * CORE_PITCH), CORE_BYTES);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
