// The entry of the mat-vec of pairs, after matvec.cu and pairs.cu: a block has one pair of a token and an expert, and
// some tiles. Defined around it: ACTIVATION where gate and up, interleaved, end with the activation; the entry's
// declaration.
// With factors the matrix is down, whose kernel before has waited for the choice of experts before it let this one
// start: experts are known, and their first weights are asked for while that kernel still works.

// experts_read: how many experts all launches with factors have read, each once, and how many launches there were.
KERNEL_ENTRY(
    const char* weights, const float* block_scales, const void* table, char* out, float2* out_terms,
    const float* factors, const float* biases, const int* chosen, const char* codes, const float2* terms,
    u64* experts_read, long long stride, int strips, int out_features, int chunks, int blocks, int pairs_of_input,
    const float* square_sums, int parts, float inverse_width, float eps) {
  const int pair = blockIdx.x / blocks, block_x = blockIdx.x % blocks;
  if (factors == nullptr) wait_for_previous();
  const long expert = load_earlier(chosen + pair), row = pair / pairs_of_input;
  if (expert < 0) return wait_for_previous();  // what comes after waits for the kernel before through this one
  if (factors && block_x == 0 && threadIdx.x < 32) count_expert(chosen, pair, (int)expert, experts_read);
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
  if (factors) matrix.factor = __int_as_float(load_earlier(factors + pair));
#endif
  multiply_matrix(matrix, shape, block_x, codes + row * chunks * 64, terms + row * chunks * 4);
}
