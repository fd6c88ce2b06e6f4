// The residual-add epilogue of the mat-vec: it adds the sums to the residual stream. Where a norm comes next, it writes
// stream * norm_weight as the codes and terms that the next matmul reads, and the partial sums of squares from which
// that one applies the norm's scale. A block has all columns of its tiles; 16 outputs share a scale.
// Defined around it: what codes.cu and matvec.cu have.

// A thread's columns of the stream: requested early, used at the end.
struct ResidualAdd {
  static constexpr int COLUMNS = TILES * 16, COUNT = TOKENS * COLUMNS, THREADS = TILES * PARTS * 32, OWN = (COUNT + THREADS - 1) / THREADS;
  float before[OWN], norm_weight[OWN];

  INLINE static int place(int i) { return min(i * THREADS + (int)threadIdx.x, COUNT - 1); }
  INLINE static int column(const Matrix& matrix, int i, int block_x) { return min(block_x * COLUMNS + place(i) % COLUMNS, matrix.out_features - 1); }
  INLINE static float* at(const Matrix& matrix, int i, int block_x) { return matrix.partials + (long)(place(i) / COLUMNS) * matrix.out_features + column(matrix, i, block_x); }

  INLINE void read_weights(const Matrix& matrix, const ResidualStream& stream, int block_x) {
#pragma unroll
    for (int i = 0; i < OWN; i++) norm_weight[i] = stream.norm_weight ? __ldg(stream.norm_weight + column(matrix, i, block_x)) : 0.f;
  }
  INLINE void read_stream(const Matrix& matrix, const ResidualStream& stream, int block_x) {
#pragma unroll
    for (int i = 0; i < OWN; i++) before[i] = load_float(at(matrix, i, block_x));
  }
  // All of the block's threads come here, after their shared memory is written. The stream's width is a multiple of 16.
  INLINE void store(const float (&sums)[PARTS][TOKENS][COLUMNS], const Matrix& matrix, const ResidualStream& stream, int block_x) const {
    const int groups = (matrix.out_features + 63) / 64 * 4;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (i * THREADS + threadIdx.x / 32 * 32 >= COUNT) break;  // whole warps, for their lanes need each other
      const int m = place(i) / COLUMNS, own = place(i) % COLUMNS, all = block_x * COLUMNS + own;
      const bool inside = i * THREADS + threadIdx.x < COUNT && all < matrix.out_features;
      float sum = stream.bias ? __ldg(stream.bias + column(matrix, i, block_x)) : 0.f;
#pragma unroll
      for (int w = 0; w < PARTS; w++) sum += sums[w][m][own];
      const float x = before[i] + stream.scale * sum;
      if (inside) *at(matrix, i, block_x) = x;
      if (!stream.norm_weight) continue;
      const Code code = code_of(x * norm_weight[i]);
      float square = x * x;
#pragma unroll
      for (int o = 8; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
      if (inside) code.store(stream.codes, stream.terms, (long)m * groups + all / 16, all % 16);
      if (inside && all % 16 == 0) stream.square_sums[(long)m * stream.parts + all / 16] = square;
    }
  }
};
