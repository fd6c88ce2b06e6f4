// The products and the kernel of attention of chunks by mma.sync. Before it: sync_copies.cu, rows.cu.

INLINE void make_scores(Rows (&rows)[ATOMS], u32 queries, u32 keys) {
#pragma unroll
  for (int a = 0; a < ATOMS; a++)
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) rows[a].scores[i] = 0.f;
#pragma unroll
  for (int k = 0; k < HEAD / 16; k++) {
    u32 q[ATOMS][4];
#pragma unroll
    for (int a = 0; a < ATOMS; a++) load_matrices(q[a], queries + a * 16 * STRIDE + k * 32);
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      u32 b[4];
      load_matrices(b, keys + n * 16 * STRIDE + k * 32);
#pragma unroll
      for (int a = 0; a < ATOMS; a++) {
        multiply(rows[a].scores + n * 8, q[a], b[0], b[1]);
        multiply(rows[a].scores + n * 8 + 4, q[a], b[2], b[3]);
      }
    }
  }
}

INLINE void add_values(Rows (&rows)[ATOMS], u32 values) {
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
    for (int d = 0; d < HEAD / 16; d++) {
      u32 b[4];
      load_transposed(b, values + k * 16 * STRIDE + d * 32);
#pragma unroll
      for (int a = 0; a < ATOMS; a++) {
        multiply(rows[a].sums + d * 8, rows[a].weights[k], b[0], b[1]);
        multiply(rows[a].sums + d * 8 + 4, rows[a].weights[k], b[2], b[3]);
      }
    }
}

INLINE void copy_queries(const Arguments& in, const Tile& tile, u32 to) {
#pragma unroll
  for (int first = 0; first < ROWS; first += AT_ONCE) {
    const int row = first + threadIdx.x / 8, head = tile.kv_head * GROUP + row % GROUP;
    const bool own = row < tile.own * GROUP;
    const long token = tile.token + (own ? row / GROUP : 0);
    copy_row(to + row * STRIDE + threadIdx.x % 8 * 16,
             in.queries.values + token * in.queries.row_bytes + head * (HEAD * 2) + threadIdx.x % 8 * 16, own);
  }
}

INLINE int first_row_of(int thread) { return thread / 32 * (ATOMS * 16) + thread % 32 / 4; }

INLINE void attend_tile(const Arguments& in, const Tile& tile) {
  const int lane = threadIdx.x % 32;
  const float log2e = 1.4426950408889634f, factor = CAP ? log2e : in.scale * log2e;
  const u32 queries = (u32)__cvta_generic_to_shared(ring), keys = queries + ROWS * STRIDE;
  const u32 values = keys + KEYS * STRIDE;
  // Lane l has the address of row l % 8 of the matrix l / 8 of four: of queries and values the second is below the
  // first, of keys beside it.
  const u32 below = lane % 16 * STRIDE + lane / 16 * 16;
  const u32 beside = (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 16;
  Seeker seeker{in.tables + (long)(in.first_table + tile.row) * load_int(in.table_stride),
                WINDOWED ? max(tile.earliest - in.window + 1, 0) : 0, tile.length, in.kv_heads, tile.kv_head};
  const int last = tile.earliest + tile.own - 1;
  seeker.look_up(tile.high - 1);
  copy_queries(in, tile, queries);
  seeker.copy(keys, in.keys, tile.high - 1);
  Rows rows[ATOMS];
#pragma unroll
  for (int a = 0; a < ATOMS; a++) {
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) rows[a].sums[i] = 0.f;
    rows[a].top[0] = rows[a].top[1] = __int_as_float(0xff800000);
    rows[a].total[0] = rows[a].total[1] = 0.f;
  }
#pragma unroll 1
  for (int index = tile.high - 1; index >= tile.low; index--) {
    await_copies();
    seeker.copy(values, in.values, index);
    make_scores(rows, queries + threadIdx.x / 32 * (ATOMS * 16) * STRIDE + below, keys + beside);
    if (index > tile.low) seeker.look_up(index - 1);
    await_copies();
    if (index > tile.low) seeker.copy(keys, in.keys, index - 1);
    const int start = index * KEYS;
    const bool masked = start + KEYS - 1 > tile.earliest || (WINDOWED && start <= last - in.window);
#pragma unroll
    for (int a = 0; a < ATOMS; a++) {
      float kept[2];
      if (CAP) cap_scores(rows[a].scores, in.scale * 2.f * log2e / in.soft_cap, in.soft_cap);
      if (masked) {
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread));  // nothing of it is kept from step to step: registers are few
        const int row = first_row_of(thread) + a * 16, limit = tile.earliest - start - thread % 4 * 2;
        mask(rows[a].scores, {limit + row / GROUP, limit + (row + 8) / GROUP}, in.window);
      }
      weigh(rows[a], kept, factor);
      rescale(rows[a], kept);
      round_weights(rows[a]);
    }
    add_values(rows, values + below);
  }
#pragma unroll
  for (int a = 0; a < ATOMS; a++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      rows[a].total[r] += __shfl_xor_sync(~0u, rows[a].total[r], 1);
      rows[a].total[r] += __shfl_xor_sync(~0u, rows[a].total[r], 2);
    }
    write_rows(in, tile, rows[a], factor, first_row_of(threadIdx.x) + a * 16, 0, lane % 4);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
NAME(const char* queries, long query_bytes, const char* keys, const char* values, const int* tile_rows,
     const int* tile_firsts, const int* starts, const int* counts, const int* contexts, const int* tables,
     const int* table_stride, const float* sinks, float* out, char* inputs, float* input_scales, int* next_tile,
     float4* parts, float* states, int* arrivals, float scale, float soft_cap, int window, int tiles, int kv_heads,
     int first_table, int out_stride, int block_tokens, int chunks, int most_parts, int in_fp8) {
  let_next_start();
  wait_for_previous();
  const Arguments in{{queries, query_bytes}, {keys}, {values}, tile_rows, tile_firsts, starts, counts, contexts, tables,
                     table_stride, sinks, out, inputs, input_scales, next_tile, parts, states, arrivals, scale,
                     soft_cap, window, tiles, kv_heads, first_table, out_stride, block_tokens, chunks, most_parts,
                     in_fp8};
  const int index = blockIdx.y;  // the longest contexts first, with all heads
  if (load_int(tile_rows + index) < 0) return;
  const Seen seen = seen_by(in, index);
  const int own = min(TOKENS, seen.count - seen.offset), token = load_int(starts + seen.row) + seen.offset;
  const int earliest = seen.length - seen.count + seen.offset, kv_head = blockIdx.x;
  attend_tile(in, {own, token, earliest, kv_head, seen.low, seen.high, seen.length, seen.row, 0, 0, 1});
}
