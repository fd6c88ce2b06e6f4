// The gated epilogue of the kernel for 8-bit floats: activation(gate) * up, in 8-bit floats as the next matmul reads
// them. A thread has gate and up of its outputs, and four lanes the 128 columns of a token that share a scale.
// Defined around it: what gated_epilogue.cu and wgmma.cu have. Before it: codes.cu.

// All of the block's tokens are written, also those beyond the step's: no token of the next matmul sees another.
// bias: of the tile's output features, or null.
INLINE void store_gated(const float (&sums)[PARTS][PART], const Segment& segment, const float* bias, int token_block) {
  const int thread = anew(threadIdx.x), g = thread % 32 >> 2, t = thread & 3;
  const bool odd = t % 2;
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
      const int o = i / 2;  // octet of outputs: gate's, then up's
      const float* sum = sums[o / 8] + o % 8 * 8 + r * 2 + i % 2;
      float gate = sum[0], up = sum[4];
      if (bias && o / 8 * 128 < left) {
        const float* own = bias + o / 8 * 128 + o % 8 * 8 + t * 2 + i % 2;
        gate += __ldg(own), up += __ldg(own + 64);
      }
      x[i] = gated(gate, up);
      top = larger(top, fabsf(x[i]));
    }
    top = larger(top, __shfl_xor_sync(~0u, top, 1));
    top = larger(larger(top, __shfl_xor_sync(~0u, top, 2)), 1e-30f);
    const float inverse = 448.f / top;
    if (t == 0) segment.out_scales[group * TOKENS + scale_place(row)] = top / 448.f;
    char* to = (char*)segment.out + group * (TOKENS * 128) + row * 16 + (t / 2 + odd * 2) * (TOKENS * 16);
#pragma unroll
    for (int h = 0; h < 2; h++) {  // 64 columns: lanes t and t ^ 1 have the columns of runs of 16 bytes between them
      u32 words[4];
#pragma unroll
      for (int s = 0; s < 2; s++) {  // 32 columns
        const float* y = x + (h * 8 + s * 4) * 2;
        auto run = [&](int i) {
          return e4m3_pair(y[i * 2] * inverse, y[i * 2 + 1] * inverse) |
                 e4m3_pair(y[i * 2 + 4] * inverse, y[i * 2 + 5] * inverse) << 16;
        };
        const u32 even_run = run(0), odd_run = run(1), other = __shfl_xor_sync(~0u, odd ? even_run : odd_run, 1);
        const u32 low = odd ? other : even_run, high = odd ? odd_run : other;
        words[s * 2] = permute(low, high, 0x5140);
        words[s * 2 + 1] = permute(low, high, 0x7362);
      }
      *(uint4*)(to + h * (TOKENS * 64)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}
