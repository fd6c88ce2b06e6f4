// The entry of the mat-vec of a token's experts, after matvec.cu and pairs.cu: a block has all pairs of a token and
// some tiles, and adds the experts' weighted sum to the residual stream. PAIR_PARTS warps share a tile's columns of
// each of the PAIRS experts. A token of padding has no experts at all.
KERNEL_ENTRY(
    const char* weights, const float* block_scales, const void* table, float* hidden, const float* biases,
    const float* factors, const int* chosen, const char* codes, const float2* terms, u64* experts_read,
    long long stride, int strips, int out_features, int chunks, int blocks, float scale, const float* norm_weight,
    char* out_codes, float2* out_terms, float* out_square_sums, int out_parts) {
  const int token = blockIdx.x / blocks, block_x = blockIdx.x % blocks, warp = threadIdx.x / 32, cut = warp / TILES;
  const int pair = token * PAIRS + cut / PAIR_PARTS;
  if (load_earlier(chosen + token * PAIRS) < 0) return wait_for_previous();
  const long expert = load_earlier(chosen + pair);
  if (block_x == 0 && warp % (TILES * PAIR_PARTS) == 0) count_expert(chosen, pair, (int)expert, experts_read);
  const long groups = (out_features + 63) / 64 * 4;
  float* const square_sums = out_square_sums + (long)token * out_parts;
  const ResidualStream stream{
      nullptr, scale, norm_weight, out_codes + token * groups * 16, out_terms + token * groups, square_sums, out_parts};
  const Shape shape{1, chunks, 1, out_features, 0, Norm{}, stream};
  Matrix matrix{weights + expert * stride, block_scales + expert * strips, table};
  matrix.partials = hidden + (long)token * out_features;
  matrix.out_features = out_features;
  matrix.factor = __int_as_float(load_earlier(factors + pair));
  matrix.bias = biases ? biases + expert * out_features : nullptr;
  multiply_matrix(matrix, shape, block_x, codes + (long)pair * chunks * 64, terms + (long)pair * chunks * 4);
}
