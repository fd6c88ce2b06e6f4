// The end of a gated feed-forward's first product in the mat-vec: activation(gate) * up, written as the codes and terms
// that the next product reads. A block has the tile of 16 outputs of a gate's strip and the same of the strip of up after
// it, and all their columns: the sums of 16 neighbours of the next product's columns, which share a scale. Defined around
// it: what activated.cu and matvec.cu have.

INLINE float larger(float x, float y) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); return r; }

// sums: of each warp's columns, gate before up; factors: of a norm that was deferred, if one was. All of the block's threads
// come here, after what they share is written.
INLINE void store_gated(const float (&sums)[PARTS][ROWS][TILES * 16], const float (&factors)[ROWS], bool deferred, const Matrix& matrix, int block_x) {
  static_assert(TILES == 2, "a tile of gate and one of up");
  const int groups = matrix.rows_out / 32;  // of 16 outputs
#pragma unroll
  for (int i0 = 0; i0 < ROWS * 16; i0 += PARTS * 64) {
    const int i = i0 + threadIdx.x, lane = i % 32, column = i % 16;
    if (i - lane >= ROWS * 16) break;  // whole warps, for their lanes need each other
    const int m = min(i / 16, ROWS - 1);
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < PARTS; w++) { gate += sums[w][m][column]; up += sums[w][m][column + 16]; }
    if (deferred) { gate *= factors[m]; up *= factors[m]; }
    const float x = activated(gate) * up;
    float top = fabsf(x);  // NaN stays NaN, in the scale
#pragma unroll
    for (int o = 8; o; o >>= 1) top = larger(top, __shfl_xor_sync(~0u, top, o));
    const float scale = top / 127.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
    const int code = __float2int_rn(x * inverse);
    int sum = code;
#pragma unroll
    for (int o = 8; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (i >= ROWS * 16) continue;
    const long group = (long)m * groups + block_x;
    ((char*)matrix.partials)[group * 16 + column] = (char)code;
    if (column == 0) ((float2*)matrix.out_scales)[group] = make_float2(scale, scale * (float)sum);
  }
}
