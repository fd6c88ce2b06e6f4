// Weights of any format as 8-bit floats (e4m3), in the order of the tensor cores' B operand: tiles of 256 output
// features, then groups of 128 columns, 32 KB each: [8 runs of 16 columns][32 octets of features][8][16], columns of a
// run in the order of layouts/activations.py. What lies beyond the matrix is zeros. Octets of gate and up of a
// feed-forward, whose strips of 64 alternate, alternate: a thread of the matmul has both of an output.
// Defined around it: NAME (of the kernel) POWER (2^POWER times weights as decoded fit e4m3) INTERLEAVED. Before it:
// weights.cu.

// Four weights, from two pairs of halves.
INLINE u32 to_e4m3(u32 first, u32 second) {
  u32 r;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, %1; cvt.rn.satfinite.e4m3x2.f16x2 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(r) : "r"(mul2(first, half_power(POWER))), "r"(mul2(second, half_power(POWER))));
  return r;
}

// A block of eight warps: of two strips of 64 output features, y, and two groups, x, of one matrix, z, of which each
// begins `stride` bytes behind the one before. scales: of 64 output features.
extern "C" __global__ void __launch_bounds__(256)
NAME(const char* weights, const float* block_scales, const void* table, char* out, float* scales, long stride,
     int strips, int chunks) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strip = blockIdx.y * 2 + warp / 4, tile = warp % 4;
  const int groups = (chunks + 1) / 2, tiles = gridDim.y / 2;
  weights += blockIdx.z * stride, block_scales += blockIdx.z * strips;
  out += (long)blockIdx.z * tiles * groups * 32768, scales += blockIdx.z * tiles * 4;
  if (blockIdx.x == 0 && lane == 0 && tile == 0)
    scales[strip] = strip < strips ? block_scales[strip] * power(-(POWER)) : 0.f;
  const int octet = INTERLEAVED ? (strip / 2 % 2 * 8 + tile * 2) * 2 + strip % 2 : strip % 4 * 8 + tile * 2;
  constexpr int APART = INTERLEAVED ? 256 : 128;  // bytes between the octets of a tile of 16 rows
  const char* from = weights + strip * strip_bytes(chunks);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int chunk = blockIdx.x * 4 + i;
    if (chunk / 2 >= groups) return;
    u32 values[8];  // run i / 2 of the chunk, octet i % 2
#pragma unroll
    for (int j = 0; j < 8; j++) values[j] = 0;
    if (strip < strips && chunk < chunks) {
      const Streamed block{from + block_at(chunk)}, supers{from + supers_at(chunk)};
      Raw raw;
      u32 halves[4][4];
      read_codes(raw, block, tile, lane);
      read_scales(raw, block, supers, tile, lane);
      decode(halves, raw, table);
#pragma unroll
      for (int j = 0; j < 8; j++) values[j] = to_e4m3(halves[j / 2][j % 2], halves[j / 2][j % 2 + 2]);
    }
    char* to = out + ((long)(strip / 4) * groups + chunk / 2) * 32768 + chunk % 2 * 16384 + octet * 128 + lane * 4;
#pragma unroll
    for (int j = 0; j < 8; j++) *(u32*)(to + j / 2 * 4096 + j % 2 * APART) = values[j];
  }
}
