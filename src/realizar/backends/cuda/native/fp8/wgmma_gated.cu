// The gated epilogue of the kernel for 8-bit floats: activation(gate) * up, in 8-bit floats as the next matmul reads
// them. A thread has gate and up of its outputs, and four lanes the 128 columns of a token that share a scale.
// Defined around it: what gated_epilogue.cu and wgmma.cu have. Before it: codes.cu.

// All of the block's tokens are written, also those beyond the step's: no token of the next matmul sees another.
// bias, features: of the tile's output features, or null.
INLINE void store_gated(const float (&sums)[PARTS][PART], const Segment& segment, const float* bias,
                        const float* features, int token_block) {
  const int thread = anew(threadIdx.x), g = thread % 32 >> 2, t = thread & 3;
  const int groups = (segment.out_features + FEATURES - 1) / FEATURES;
  const int left = segment.out_features - segment.tile * FEATURES;
  const long group = (long)token_block * groups + segment.tile;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = thread / 32 * 16 + r * 8 + g;
    float x[32];  // of every eight columns two
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int o = i / 2, at = o / 8 * 128 + o % 8 * 8 + t * 2 + i % 2;  // octet of outputs, and gate's feature
      const float* sum = sums[o / 8] + o % 8 * 4 + r * 2 + i % 2;
      float gate = sum[0], up = sum[PART / 2];
      if (features && o / 8 * 128 < left) gate *= __ldg(features + at), up *= __ldg(features + at + 64);
      if (bias && o / 8 * 128 < left) gate += __ldg(bias + at), up += __ldg(bias + at + 64);
      x[i] = gated(gate, up);
      top = larger(top, fabsf(x[i]));
    }
    top = larger(top, __shfl_xor_sync(~0u, top, 1));
    top = larger(larger(top, __shfl_xor_sync(~0u, top, 2)), 1e-30f);
    const float inverse = 448.f / top;
    if (t == 0) segment.out_scales[group * TOKENS + scale_place(row)] = top / 448.f;
    char* to = (char*)segment.out + group * (TOKENS * 128) + row * 16 + t * (TOKENS * 16);
#pragma unroll
    for (int h = 0; h < 2; h++) {  // 64 columns
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* y = x + (h * 8 + i * 2) * 2;
        words[i] = e4m3_pair(y[0] * inverse, y[1] * inverse) | e4m3_pair(y[2] * inverse, y[3] * inverse) << 16;
      }
      *(uint4*)(to + h * (TOKENS * 64)) = sixteen_columns(words, t);
    }
  }
}
