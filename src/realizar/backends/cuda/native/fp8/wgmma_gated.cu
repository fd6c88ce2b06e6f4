// The gated epilogue of the kernel for 8-bit floats: activation(gate) * up, in 8-bit floats as the next matmul reads
// them. Strips of gate and up alternate: a block's two warpgroups have gate and up of the same 64 outputs, a chunk of
// the next matmul's columns, and a cluster of two blocks the 128 columns that share a scale.
// Defined around it: what gated_epilogue.cu and wgmma.cu have. Before it: clusters.cu, codes.cu.

constexpr int ROW_PITCH = 68;  // floats of a token, 64 used: rows read by 16 bytes hit all banks

INLINE u32 to_e4m3(float first, float second) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(second), "f"(first));
  return r;
}

// sums: of gate (group 0) or up, by parts of the block's tokens. The ring is free. All of the block's tokens are
// written, also those beyond the step's: no token of the next matmul sees another. chunk: of `chunks` of the outputs.
// tops: [TOKENS], of which the cluster's other block writes those of its outputs.
INLINE void store_gated(const float (&sums)[4][TOKENS / 8], float block_scale, const Matrix& matrix, int chunk,
                        int chunks, int token_block, float* tops) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int tile = thread / 32, g = thread % 32 >> 2, t = thread & 3;
  constexpr int OWN = TOKENS / 8;  // sums of a part
  float* rows = (float*)ring;     // [TOKENS][ROW_PITCH]
  float* handed = rows + TOKENS * ROW_PITCH + group * (2 * OWN * 128);
  const float* taken = rows + TOKENS * ROW_PITCH + (1 - group) * (2 * OWN * 128);
#pragma unroll
  for (int i = 0; i < 2 * OWN; i++)  // up of the first two parts, gate of the others
    handed[i * 128 + thread] = (group ? sums[i / OWN][i % OWN] : sums[2 + i / OWN][i % OWN]) * block_scale;
  asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 2 * OWN; i++) {
    const float own = (group ? sums[2 + i / OWN][i % OWN] : sums[i / OWN][i % OWN]) * block_scale;
    const float other = taken[i * 128 + thread];
    const int token = group * (TOKENS / 2) + i / 4 * 8 + t * 2 + i % 2, feature = tile * 16 + i / 2 % 2 * 8 + g;
    rows[token * ROW_PITCH + feature] = group ? gated(other, own) : gated(own, other);
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
  const int token = threadIdx.x;
  const float4* row = (const float4*)(rows + token * ROW_PITCH);
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float4 four = row[i];
    top = larger(larger(larger(top, fabsf(four.x)), fabsf(four.y)), larger(fabsf(four.z), fabsf(four.w)));
  }
  store_in_cluster(tops + token, chunk % 2 ^ 1, top);
  arrive_at_cluster();
  wait_for_cluster();
  top = larger(larger(top, tops[token]), 1e-30f);
  const float scale = top / 448.f, inverse = 448.f / top;
  const long next_group = (long)token_block * ((chunks + 1) / 2) + chunk / 2;
  const int place = token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
  if (chunk % 2 == 0) matrix.out_scales[next_group * TOKENS + place] = scale;
  char* out = (char*)matrix.partials + (next_group * 2 + chunk % 2) * (TOKENS * 64) + token * 16;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {  // columns 16 i + 4 j + 0, 2, 1, 3
      const float4 four = row[4 * i + j];
      words[i] = to_e4m3(four.x * inverse, four.z * inverse) | to_e4m3(four.y * inverse, four.w * inverse) << 16;
    }
    *(uint4*)(out + j * (TOKENS * 16)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
