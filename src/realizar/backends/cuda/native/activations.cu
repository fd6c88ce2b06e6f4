// Float activations to the formats that matmuls read; the backend's own kernels write them where they compute the
// values.
// Defined by the loader: NAME_INT8 NAME_HALF, the kernels' names.
// Before it: primitives.cu, codes.cu.

// One warp per token and 32 columns. x: float32 [tokens, cols]; codes, terms: as layouts/activations.py says.
extern "C" __global__ void NAME_INT8(const float* __restrict__ x, char* __restrict__ codes, float2* __restrict__ terms, int tokens, int cols, int padded_cols) {
  const int lane = threadIdx.x % 32, groups = padded_cols / 32;
  const long unit = (long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (unit >= (long)tokens * groups) return;
  const int token = (int)(unit / groups), group = (int)(unit % groups), col = group * 32 + lane;
  const float value = col < cols ? x[(long)token * cols + col] : 0.f;
  code_of(value).store(codes, terms, unit * 2 + lane / 16, lane % 16);
}

// One block per token; tokens beyond `tokens` become zeros. values: halves [blocks, chunks, 8, block_tokens, 8].
extern "C" __global__ void NAME_HALF(const float* __restrict__ x, unsigned short* __restrict__ values, float* __restrict__ token_scales, int tokens, int cols, int padded_cols, int block_tokens) {
  __shared__ float tops[32];
  const int token = blockIdx.x;
  float top = 0.f;
  if (token < tokens)
    for (int c = threadIdx.x; c < cols; c += blockDim.x) top = fmaxf(top, fabsf(x[(long)token * cols + c]));
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  for (int w = 0; w < (int)blockDim.x / 32; w++) top = fmaxf(top, tops[w]);
  int exponent;
  frexpf(top, &exponent);
  const int shift = exponent > 14 ? exponent - 14 : exponent < -8 && exponent > -100 && top > 0.f ? exponent + 4 : 0;
  if (threadIdx.x == 0) token_scales[token] = ldexpf(1.f, shift);
  const float factor = ldexpf(1.f, -shift);
  const int block = token / block_tokens, r = token % block_tokens;
  for (int c = threadIdx.x; c < padded_cols; c += blockDim.x) {
    const int chunk = c / 64, d = c % 64, core = d % 16 / 4 * 2 + d % 2, place = d / 16 * 2 + d % 4 / 2;
    const float value = token < tokens && c < cols ? x[(long)token * cols + c] * factor : 0.f;
    unsigned short bits;
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h;}" : "=h"(bits) : "f"(value));
    values[((((long)block * (padded_cols / 64) + chunk) * 8 + core) * block_tokens + r) * 8 + place] = bits;
  }
}
