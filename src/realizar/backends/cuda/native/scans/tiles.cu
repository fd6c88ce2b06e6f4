// What the kernels of a scan hand to one another, in tiles of 64 tokens: numbers of a step's tiles come in the order of
// its rows, and what lies behind a row's last token is zero.
//
//   mixed:   halves [tiles, heads, HEAD / 64, 64 tokens, 64], heads of queries times the scale of outputs, of keys, and
//            of values times VALUE_UNIT
//   links:   halves [tiles, value heads, 2, 64 tokens, 64 tokens]: (I + A)^-1 times beta, then scores
//   factors: float [tiles, value heads, FACTORS]: each token's decay d from the tile's start, each token's decay to its
//            end, and the whole tile's
//
// Rows of halves have 128 bytes, whose eights of 16 bytes are interleaved as matrix instructions read them.
// Defined around it: NAME KEY_HEADS VALUE_HEADS TILED, and where tiles are multiplied SHARED_LIST SHARED_INPUTS
// SHARED_OPERANDS, of the instruction.

constexpr int HEAD = 128, TILE = 64, HEADS = 2 * KEY_HEADS + VALUE_HEADS, CHANNELS = HEADS * HEAD;
constexpr int FIELDS = 8;  // of a row of the table `recurring`
constexpr int RUN = TILE * 128, HEAD_BYTES = HEAD / 64 * RUN, LINK_BYTES = 2 * RUN;
constexpr int FACTORS = 2 * TILE + 4, FACTOR_BYTES = FACTORS * 4;  // a multiple of 16 bytes
// Halves have all their digits from 6e-5 to 65,504: values and states, times this, from 4e-6 to 4,094. Queries, which
// are not longer than one, are divided by it.
constexpr float VALUE_UNIT = 16.f;

// Halves of two numbers, the largest ones of what is beyond them.
INLINE u32 pair(float low, float high) {
  u32 r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Where a row's 16 bytes of a number lie, within a run of 64 columns.
INLINE u32 interleaved(int row, int eighth) { return row * 128 + ((eighth ^ (row & 7)) << 4); }
INLINE const u16* mixed_head(const u16* mixed, int tile, int head) {
  return mixed + ((long)tile * HEADS + head) * (HEAD_BYTES / 2);
}
// Four parts of 8 x 8 halves, each transposed; a lane gives the address of a row of one of them.
INLINE void load_transposed(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
#ifdef SHARED_LIST
// c = a * b, or c += a * b, of 64 x 64; both operands in shared memory, rows of columns
template <int ADD> INLINE void multiply_shared(float (&c)[TILE / 2], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SHARED_LIST "}, " SHARED_INPUTS ", 1, 1, 0, 0;"
               : SHARED_OPERANDS : "l"(a), "l"(b), "n"(ADD));
}
// The same of heads.
INLINE void multiply_heads(float (&c)[TILE / 2], u64 a, u64 b) {
#pragma unroll
  for (int k = 0; k < HEAD / 16; k++) {
    const u64 step = k / 4 * (RUN / 16) + k % 4 * 2;
    if (k == 0) multiply_shared<0>(c, a, b);
    else multiply_shared<1>(c, a + step, b + step);
  }
}
#endif
INLINE int key_head_of(int head) {
#if TILED
  return head % KEY_HEADS;
#else
  return head / (VALUE_HEADS / KEY_HEADS);
#endif
}
