// The gated epilogue of the Hopper kernel: activation(gate) * up, written as halves in the order in which the next
// matmul reads them. Strips of gate and up alternate, so that a warpgroup's two strips, or the strips of a pair of
// warpgroups, are gate and up of the same 64 outputs: one chunk of the next matmul's columns.
// Defined around it: what gated_epilogue.cu and wgmma.cu have.

// Bytes from one core matrix column to the next: of a chunk in memory, and as staged, where a warp's stores shall hit
// more banks.
constexpr int CORE_BYTES = TOKENS * 16, CORE_PITCH = CORE_BYTES + 16, GATED_BYTES = 8 * CORE_PITCH;

// Without two strips, gate and up have a warpgroup each. Each finishes half the tokens: it keeps its sums of those, and
// gives the other's to the thread there that has the same outputs.
constexpr int PAIRED = STRIPS == 2 ? 1 : 2;  // warpgroups that share outputs
static_assert(PAIRED == 1 || (STRIPS == 1 && GROUPS == 2), "gate and up of an output are in one block");
constexpr int GATED_ROOM = PAIRED == 1 ? GROUPS * GATED_BYTES : GATED_BYTES + TOKENS * 256;
constexpr int KEPT = TOKENS / 4;  // sums of a thread

#if STRIPS == 1
template <int FIRST>  // of the sums that are given
INLINE void give_sums(const float (&c)[TOKENS / 2], float strip_scale, const float* scales, int t, float4* to) {
#pragma unroll
  for (int i = FIRST; i < FIRST + KEPT; i += 4) {
    const float first = strip_scale * scales[i * 2 + t * 2], second = strip_scale * scales[i * 2 + t * 2 + 1];
    to[(i - FIRST) / 4 * 128] = make_float4(c[i] * first, c[i + 1] * second, c[i + 2] * first, c[i + 3] * second);
  }
}

template <int FIRST>  // of the sums that are kept: 0 of gates, KEPT of ups
INLINE void stage_half(
    const float (&c)[TOKENS / 2], float strip_scale, const float* scales, int t, const float4* given, char* to) {
#pragma unroll
  for (int i = FIRST; i < FIRST + KEPT; i += 4) {
    const float4 four = given[(i - FIRST) / 4 * 128];
    const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float own = c[i + j] * (strip_scale * scales[i * 2 + t * 2 + j % 2]);
      const float result = FIRST == 0 ? gated(own, others[j]) : gated(others[j], own);
      *(u16*)(to + j / 2 * 4 * CORE_PITCH + i * 32 + j % 2 * 16) = limited_half(result * (1.f / TOKEN_FACTOR));
    }
  }
}
#endif

// c: sums of gate and up, or of one of them, with their blocks' scales. strip: the first of them, of `strips`. scales:
// of the block's tokens. All of the block's tokens are written, also those beyond the step's: they come from the same
// tokens of the input, and no token of the next matmul sees another. room: shared memory of GATED_ROOM bytes, which
// where blocks stay the copy engine may still read then.
INLINE void store_gated(
    const float (&c)[STRIPS][TOKENS / 2], const float (&strip_scales)[STRIPS], const Matrix& matrix, int block_x,
    int token_block, int strip, int strips, const float* scales, char* room) {
  static_assert(TURNS == 1 && TOKENS <= GROUPS * 128, "a thread for each row");
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int tile = thread / 32, g = thread % 32 >> 2, t = thread & 3;
  if (block_x == 0 && threadIdx.x < TOKENS) matrix.out_scales[token_block * TOKENS + threadIdx.x] = TOKEN_FACTOR;
  if (strip >= strips) return;
  // Of column d = 16 tile + g (+ 8) of the chunk: core matrix d % 16 / 4 * 2 + d % 2, place d / 16 * 2 + d % 4 / 2.
  char* staged = room + group / PAIRED * GATED_BYTES;
  char* to = staged + ((g >> 2) * 2 + (g & 1)) * CORE_PITCH + t * 32 + (tile * 2 + (g >> 1 & 1)) * 2;
#if STRIPS == 2
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
#else
  float4* to_first = (float4*)(room + GATED_BYTES) + thread;
  float4* to_second = to_first + KEPT / 4 * 128;
  if (group == 0) give_sums<KEPT>(c[0], strip_scales[0], scales, t, to_second);
  else give_sums<0>(c[0], strip_scales[0], scales, t, to_first);
  asm volatile("bar.sync 2, 256;" ::: "memory");
  if (group == 0) stage_half<0>(c[0], strip_scales[0], scales, t, to_first, to);
  else stage_half<KEPT>(c[0], strip_scales[0], scales, t, to_second, to);
#endif
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, %1;" ::"r"(group / PAIRED + 2), "n"(PAIRED * 128) : "memory");
  if (group % PAIRED == 0 && thread < 8) {
    char* out = (char*)matrix.partials + ((long)token_block * (strips / 2) + strip / 2) * (8 * CORE_BYTES);
    store_bulk(out + thread * CORE_BYTES, (u32)__cvta_generic_to_shared(staged + thread * CORE_PITCH), CORE_BYTES);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if constexpr (!STAYS) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
