// The entry of the mat-vec of pairs, after matvec.cu: a block has one pair of a token and an expert, and some tiles.
// Defined around it: ACTIVATION where gate and up, interleaved, end with the activation; the entry's declaration.

KERNEL_ENTRY(
    const char* weights, const float* block_scales, const void* table, char* out, float2* out_terms,
    const float* factors, const float* biases, const int* chosen, const char* codes, const float2* terms, long long stride, int strips,
    int out_features, int chunks, int blocks, int pairs_of_input, const float* square_sums, int parts,
    float inverse_width, float eps) {
  const int pair = blockIdx.x / blocks, block_x = blockIdx.x % blocks;
  wait_for_previous();
  const long expert = load_int(chosen + pair), row = pair / pairs_of_input;
  if (expert < 0) return;
  const Norm norm{square_sums + row * parts, parts, inverse_width, eps};
  const Shape shape{1, chunks, 1, out_features, 0, norm};
  Matrix matrix{weights + expert * stride, block_scales + expert * strips, table};
  matrix.out_features = out_features;
  matrix.factor = 1.f;
  matrix.bias = biases ? biases + expert * out_features : nullptr;
#ifdef ACTIVATION
  const long at = (long)pair * (out_features / 2);
  matrix.partials = (float*)(out + at);
  matrix.out_scales = (float*)(out_terms + at / 16);
#else
  matrix.partials = (float*)out + (long)pair * out_features;
  if (factors) matrix.factor = load_float(factors + pair);
#endif
  multiply_matrix(matrix, shape, block_x, codes + row * chunks * 64, terms + row * chunks * 4);
}
