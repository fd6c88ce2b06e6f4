// The end of an item of gate and up: a warpgroup's two strips are gate and up of the same 64 outputs, one chunk of the
// next matmul's columns, which leaves as halves in that one's order.
// Bytes from one core matrix column to the next: of a chunk in memory, and as staged, where a warp's stores shall hit
// more banks.
constexpr int CORE_BYTES = TOKENS * 16, CORE_PITCH = CORE_BYTES + 16, GATED_BYTES = 8 * CORE_PITCH;
constexpr int STAGED_AT = STAGES * STAGE_BYTES;

INLINE void finish(const float (&c)[STRIPS][TOKENS / 2], const float (&strip_scales)[STRIPS],
                   const float (&bias)[STRIPS][2], const Experts& experts, const Item& item) {
  static_assert(STRIPS == 2, "a warpgroup holds the gate and up of its outputs");
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, g = thread % 32 >> 2, t = thread & 3;
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  // Of column d = 16 tile + g (+ 8) of the chunk: core matrix d % 16 / 4 * 2 + d % 2, place d / 16 * 2 + d % 4 / 2.
  char* staged = ring + STAGED_AT + group * GATED_BYTES;
  char* to = staged + ((g >> 2) * 2 + (g & 1)) * CORE_PITCH + t * 32 + (thread / 32 * 2 + (g >> 1 & 1)) * 2;
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float scale = item.factors[m * 8 + t * 2 + e].x;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = m * 4 + half * 2 + e;
        const float gate = c[0][i] * (strip_scales[0] * scale) + bias[0][half];
        const float up = c[1][i] * (strip_scales[1] * scale) + bias[1][half];
        char* place = to + half * 4 * CORE_PITCH + m * 128 + e * 16;
        *(u16*)place = limited_half(gated(gate, up) * (1.f / TOKEN_FACTOR));
      }
    }
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  char* out = experts.out + ((long)item.tile * (item.strips / 2) + item.strip / 2) * (8 * CORE_BYTES);
#pragma unroll
  for (int i = thread; i < 8 * TOKENS; i += 128)
    *(uint4*)(out + i * 16) = *(const uint4*)(staged + i / TOKENS * CORE_PITCH + i % TOKENS * 16);
}
