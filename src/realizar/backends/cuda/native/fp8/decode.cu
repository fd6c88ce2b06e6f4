// Weights of any format as 8-bit floats (e4m3), in the order of the tensor cores' B operand: tiles of 256 output
// features, then groups of 128 columns, 32 KB each: [2 chunks][256 features][64 columns], of a feature its four runs of
// 16 columns in the places that the copy engine gives them (a swizzle of 64 bytes). What lies beyond the matrix is
// zeros.
// Defined around it: NAME (of the kernel) POWER (2^POWER times weights as decoded fit e4m3). Before it: weights.cu.

// Four weights in the order of their columns, from the pairs of the first and third, and of the others.
INLINE u32 to_e4m3(u32 first, u32 second) {
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, %1; cvt.rn.satfinite.e4m3x2.f16x2 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(r) : "r"(mul2(first, half_power(POWER))), "r"(mul2(second, half_power(POWER))));
  return permute(r, r, 0x3120);
}

#if E4M3
// Divides scales by the largest of the strip's in these columns, which it returns: where all are equal, as those of
// blocks of 128 x 128, numbers stay as they are stored.
INLINE float take_out_scale(Raw (&raw)[2], int chunks, bool inside, int strip, int tile) {
  __shared__ float tops[2][4];
  float top = 1e-30f;
  for (int c = 0; c < chunks && inside; c++)
    top = fmaxf(top, fmaxf(fabsf(low_half(raw[c].scales[0])), fabsf(high_half(raw[c].scales[0]))));
#pragma unroll
  for (int o = 16; o; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  __syncthreads();  // of the columns before, all have been read
  tops[strip][tile] = top;
  __syncthreads();
  top = fmaxf(fmaxf(tops[strip][0], tops[strip][1]), fmaxf(tops[strip][2], tops[strip][3]));
  for (int c = 0; c < chunks && inside; c++) {  // 256: numbers are decoded times 2^-8
    const float low = low_half(raw[c].scales[0]) * (256.f / top), high = high_half(raw[c].scales[0]) * (256.f / top);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(raw[c].scales[0]) : "f"(high), "f"(low));
  }
  return top * power(-8);
}
#endif

// A block of eight warps: of two strips of 64 output features, y, and two groups, x, of one matrix, z, of which each
// begins `stride` bytes behind the one before. scales: [tiles, groups, 4], of 64 output features and 128 columns.
extern "C" __global__ void __launch_bounds__(256)
NAME(const char* weights, const float* block_scales, const void* table, char* out, float* scales, long stride,
     int strips, int chunks) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strip = blockIdx.y * 2 + warp / 4, tile = warp % 4;
  const int groups = (chunks + 1) / 2, tiles = gridDim.y / 2;
  const long before = (long)blockIdx.z * tiles * groups + strip / 4 * groups;
  const float block_scale = strip < strips ? block_scales[blockIdx.z * strips + strip] * power(-(POWER)) : 0.f;
  const int g = lane >> 2, run = lane & 3, feature = strip % 4 * 64 + tile * 16 + g;
  const char* from = weights + blockIdx.z * stride + strip * strip_bytes(chunks);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int group = blockIdx.x * 2 + i, there = chunks - group * 2 < 2 ? chunks - group * 2 : 2;
    if (there <= 0) return;
    Raw raw[2];
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (strip < strips && c < there) {
        const int chunk = group * 2 + c;
        const Streamed block{from + block_at(chunk)}, supers{from + supers_at(chunk)};
        read_codes(raw[c], block, tile, lane);
        read_scales(raw[c], block, supers, tile, lane);
      }
    float scale = block_scale;
#if E4M3
    scale *= take_out_scale(raw, there, strip < strips, warp / 4, tile);
#endif
    if (lane == 0 && tile == 0) scales[(before + group) * 4 + strip % 4] = scale;
    char* to = out + (before + group) * 32768 + feature * 64 + (run ^ g / 2) * 16;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      uint4 low = make_uint4(0, 0, 0, 0), high = low;  // of features g and g + 8
      if (strip < strips && c < there) {
        u32 halves[4][4];
        decode(halves, raw[c], table);
        auto four = [&](int j, int half) { return to_e4m3(halves[j][half], halves[j][half + 2]); };
        low = make_uint4(four(0, 0), four(1, 0), four(2, 0), four(3, 0));
        high = make_uint4(four(0, 1), four(1, 1), four(2, 1), four(3, 1));
      }
      *(uint4*)(to + c * 16384) = low;
      *(uint4*)(to + c * 16384 + 512) = high;
    }
  }
}
