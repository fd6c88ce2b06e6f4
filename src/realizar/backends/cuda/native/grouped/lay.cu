// Rows of x laid in tiles, for a grouped matmul that then reads whole tiles: each item of a tile would gather the same
// rows again. A warp has four places, so that rows of whole chunks are read by 128 bytes, and tiles written by 64.
// Defined by the loader: TOKENS (places of a tile) CHUNKS_EACH (chunks of a block) SCALES (1: of 8-bit floats, whose
// chunks have 128 columns and a scale). Before it: primitives.cu.

// x: 16 bytes [blocks, chunks, 8, x_block], of which x_share pairs share a row. tiles: 16 bytes [tiles, chunks, 8,
// TOKENS]; places without a pair keep what they had, which no other place's sums read. slots, work: as route.cu
// writes them. scales: [rows, chunks], of blocks of one row; tile_scales: [tiles, chunks, TOKENS], in the order of
// layouts/activations.py; both null without SCALES. A block per tile and CHUNKS_EACH chunks; a thread per place and
// core matrix.
extern "C" __global__ void __launch_bounds__(TOKENS * 8)
lay_rows(const char* x, char* tiles, const int* slots, const int* work, const float* scales,
         float* tile_scales, int chunks, int x_share, int x_block) {
  const int tile = blockIdx.x, first = blockIdx.y * CHUNKS_EACH;
  const int place = threadIdx.x / 8, core = threadIdx.x % 8;
  wait_for_previous();
  let_next_start();
  const int pair = load_int(slots + tile * TOKENS + place);
  if (tile >= load_int(work) || pair < 0) return;
  const int row = pair / x_share;
  const long block = ((long)(row / x_block) * chunks + first) * 8 + core;
  const char* from = x + (block * x_block + row % x_block) * 16;
  char* to = tiles + ((((long)tile * chunks + first) * 8 + core) * TOKENS + place) * 16;
  uint4 values[CHUNKS_EACH];
#pragma unroll
  for (int i = 0; i < CHUNKS_EACH; i++)
    if (first + i < chunks) values[i] = load16(from + (long)i * 128 * x_block);
#pragma unroll
  for (int i = 0; i < CHUNKS_EACH; i++)
    if (first + i < chunks) *(uint4*)(to + (long)i * 128 * TOKENS) = values[i];
#if SCALES
  const int chunk = first + core;
  if (core < CHUNKS_EACH && chunk < chunks)
    tile_scales[((long)tile * chunks + chunk) * TOKENS + scale_place(place)] =
        load_float(scales + (long)row * chunks + chunk);
#endif
}
