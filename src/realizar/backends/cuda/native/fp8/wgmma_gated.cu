// The gated epilogue of the kernel for 8-bit floats: activation(gate) * up, in 8-bit floats as the next matmul reads
// them. A thread has gate and up of its outputs, and four lanes the 128 columns of a token that share a scale.
// Defined around it: what gated_epilogue.cu and wgmma.cu have. Before it: codes.cu.

// All of the block's tokens are written, also those beyond the step's: no token of the next matmul sees another.
// bias, features: of the tile's output features, or null.
INLINE void store_gated(const float (&sums)[OWN_PARTS][PART], const Segment& segment, const float* bias,
                        const float* features, int token_block) {
  const int thread = anew(threadIdx.x), g = thread % 32 >> 2, t = thread & 3;
  const int groups = (segment.out_features + FEATURES - 1) / FEATURES;
  const int left = segment.out_features - segment.tile * FEATURES;
  const long group = (long)token_block * groups + segment.tile;
  const int first = OWN_PARTS == PARTS ? 0 : thread / 128;  // of the warpgroup's parts
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = thread / 32 % ROW_WARPS * 16 + r * 8 + g;
    float x[16 * OWN_PARTS];  // of every eight columns two
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < 16 * OWN_PARTS; i++) {
      const int o = i / 2, part = first + o / 8;  // octet of outputs
      const int at = part * 128 + o % 8 * 8 + t * 2 + i % 2;  // gate's feature
      const float* sum = sums[o / 8] + o % 8 * 4 + r * 2 + i % 2;
      float gate = sum[0], up = sum[PART / 2];
      if (features && part * 128 < left) gate *= __ldg(features + at), up *= __ldg(features + at + 64);
      if (bias && part * 128 < left) gate += __ldg(bias + at), up += __ldg(bias + at + 64);
      x[i] = gated(gate, up);
      top = larger(top, fabsf(x[i]));
    }
    top = larger(top, __shfl_xor_sync(~0u, top, 1));
    top = larger(larger(top, __shfl_xor_sync(~0u, top, 2)), 1e-30f);
    if constexpr (OWN_PARTS < PARTS) {  // the other warpgroup has the other columns that share a scale
      __shared__ float tops[2][PARTS][TOKENS];
      if (t == 0) tops[r][first][row] = top;
      asm volatile("bar.sync 1, 256;" ::: "memory");
      top = larger(top, tops[r][first ^ 1][row]);
    }
    const float inverse = 448.f / top;
    if (t == 0 && first == 0) segment.out_scales[group * LAID + scale_place(row)] = top / 448.f;
    char* to = (char*)segment.out + group * (LAID * 128) + row * 16 + t * (LAID * 16);
#pragma unroll
    for (int h = 0; h < OWN_PARTS; h++) {  // 64 columns
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* y = x + (h * 8 + i * 2) * 2;
        words[i] = e4m3_pair(y[0] * inverse, y[1] * inverse) | e4m3_pair(y[2] * inverse, y[3] * inverse) << 16;
      }
      *(uint4*)(to + (first + h) * (LAID * 64)) = sixteen_columns(words, t);
    }
  }
}
