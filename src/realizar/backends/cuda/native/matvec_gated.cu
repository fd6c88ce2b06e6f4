// The gated epilogue of the mat-vec: activation(gate) * up, written as the codes and terms that the next matmul reads.
// A block has the tile of 16 outputs of a gate's strip and the same of the strip of up after it, and all their columns:
// the sums of 16 neighbours of the next matmul's columns, which share a scale.
// Defined around it: what gated_epilogue.cu and matvec.cu have.

// sums: of each warp's columns, gate before up; factors: the scale of a folded norm, if there is one. All of the
// block's threads come here, after their shared memory is written. biases: of the thread's gate and up.
INLINE void store_gated(const float (&sums)[PARTS][TOKENS][TILES * 16], const float (&factors)[TOKENS], bool folded, const float (&biases)[2], const Matrix& matrix, int block_x) {
  static_assert(TILES == 2, "a tile of gate and one of up");
  const int groups = matrix.out_features / 32;  // of 16 outputs
#pragma unroll
  for (int i0 = 0; i0 < TOKENS * 16; i0 += PARTS * 64) {
    const int i = i0 + threadIdx.x, lane = i % 32, column = i % 16;
    if (i - lane >= TOKENS * 16) break;  // whole warps, for their lanes need each other
    const int m = min(i / 16, TOKENS - 1);
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < PARTS; w++) { gate += sums[w][m][column]; up += sums[w][m][column + 16]; }
    if (folded) { gate *= factors[m]; up *= factors[m]; }
    if (matrix.bias) { gate += biases[0]; up += biases[1]; }
    const float x = gated(gate, up);
    const Code code = code_of(x);
    if (i < TOKENS * 16) code.store((char*)matrix.partials, (float2*)matrix.out_scales, (long)m * groups + block_x, column);
  }
}
