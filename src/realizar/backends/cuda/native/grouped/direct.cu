// Grouped matmuls for tiles of few places, from compute capability 8.0 on. Each warp reads weights of its own from
// memory into registers, some chunks ahead, also those of its next item, and multiplies them by mma.sync. Activations
// of all columns lie in shared memory, for as many items as share a tile of pairs: a block's items follow each other.
// Defined around it: TOKENS (8 or 16) CHUNKS (of columns) SLOTS (of an item: each two tiles of 16 output features)
// PARTS (warps that share a slot's columns) AHEAD (chunks of a warp that are on their way) GATED (1: a slot has the
// same outputs of gate and of up, else it has neighbours).

constexpr int THREADS = SLOTS * PARTS * 32;
constexpr int COUNT = (CHUNKS + PARTS - 1) / PARTS;  // chunks of a warp, at the most
constexpr int X_CHUNK = TOKENS * 128;
static_assert(THREADS % TOKENS == 0, "a thread gathers rows of one place");

// The sums of an item: of each part, slot and output those of all places.
typedef float Sums[PARTS][SLOTS][32][TOKENS];

// A slot's strip, and the tile in it, for the first or the second of its tiles.
INLINE int strip_of(int unit, int second) { return GATED ? unit / 4 * 2 + second : unit / 2; }
INLINE int tile_of(int unit, int second) { return GATED ? unit % 4 : unit % 2 * 2 + second; }

// What a block's items of one tile of pairs have in common.
struct Tile {
  int index, expert;
  const float2* factors;  // of its places: see `pair_factors`
  const int* pairs;       // or -1
};

INLINE float sum_parts(const Sums& sums, int slot, int output, int token) {
  float sum = 0.f;
#pragma unroll
  for (int p = 0; p < PARTS; p++) sum += sums[p][slot][output][token];
  return sum;
}

// The body.
// Copies the activations of a tile's places to shared memory; places without a pair keep what was there.
INLINE void fetch_tile(const Experts& experts, int tile, const int* pairs, u32 base) {
  const int place = threadIdx.x % TOKENS;
  const int pair = GATHER ? pairs[place] : 0;
  const long row = GATHER && pair >= 0 ? row_of(experts, pair) : 0;
  const char* from = GATHER ? experts.x + row * 16 : experts.x + ((long)tile * CHUNKS * X_CHUNK + place * 16);
  const long step = GATHER ? (long)experts.x_block * 16 : TOKENS * 16;  // from one core matrix to the next
  if (pair >= 0)
    for (int core = threadIdx.x / TOKENS; core < CHUNKS * 8; core += THREADS / TOKENS)
      copy16(base + (core * TOKENS + place) * 16, from + core * step);
  asm volatile("cp.async.wait_all;" ::: "memory");
}

INLINE void multiply_experts(const Experts& experts) {
  __shared__ Sums sums[2];
  __shared__ float2 factors[TOKENS];
  __shared__ int pairs[TOKENS];
  const u32 base = (u32)__cvta_generic_to_shared(ring);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int slot = warp % SLOTS, part = warp / SLOTS, count = (CHUNKS - part + PARTS - 1) / PARTS;
  const int strips = (experts.out_features + 63) / 64, units = strips * 2, per_tile = (units + SLOTS - 1) / SLOTS;
  if constexpr (GATHER) { wait_for_previous(); let_next_start(); }
  const long total = load_listed(experts.work) * per_tile;
  const int first = (int)(total * blockIdx.x / gridDim.x), last = (int)(total * (blockIdx.x + 1) / gridDim.x);
  if (first == last) {
    if constexpr (!GATHER) wait_for_previous();
    return;
  }

  auto unit_of = [&](int item) {  // of an item that ends early the last slot repeats the one before
    const int unit = item % per_tile * SLOTS + slot;
    return unit < units ? unit : units - 1;
  };
  auto expert_of = [&](int tile) { return load_listed(experts.work + 1 + tile) >> 1; };
  auto request = [&](Raw(&raw)[2], int expert, int unit, int k) {
    if (k >= count) return;
    const char* weights = experts.weights + expert * experts.stride;
    const int chunk = part + k * PARTS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const char* strip = weights + strip_of(unit, i) * strip_bytes(CHUNKS);
      const Streamed block{strip + block_at(chunk)}, supers{strip + supers_at(chunk)};
      read_codes(raw[i], block, tile_of(unit, i), lane);
      read_scales(raw[i], block, supers, tile_of(unit, i), lane);
    }
  };
  auto open_tile = [&](int tile) {
    if (threadIdx.x < TOKENS) {
      const int pair = load_listed(experts.slots + tile * TOKENS + threadIdx.x);
      pairs[threadIdx.x] = pair;
      factors[threadIdx.x] = pair_factors(experts, pair);
    }
    if constexpr (GATHER) __syncthreads();
    fetch_tile(experts, tile, pairs, base);
    __syncthreads();
  };
  float c[2][TOKENS / 8][4];
  auto multiply_chunk = [&](const Raw(&raw)[2], int chunk) {
    u32 b[TOKENS / 8][2][4];
    // Lane l addresses row l % 8 of core matrix 4 h + l / 8: two K steps at once.
    const u32 core_row = base + chunk * X_CHUNK + (lane / 8 * TOKENS + lane % 8) * 16;
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) load_matrices(b[m][h], core_row + h * 4 * TOKENS * 16 + m * 128);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 a[4][4];
      decode(a, raw[i], experts.table);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++) {
          const u32* columns = b[m][j / 2] + j % 2 * 2;
          multiply(c[i][m], a[j], columns[0], columns[1]);
        }
    }
  };
  Raw raws[AHEAD][2];
  Tile tile{first / per_tile, expert_of(first / per_tile), factors, pairs};
#pragma unroll
  for (int d = 0; d < AHEAD; d++) request(raws[d], tile.expert, unit_of(first), d);
  if constexpr (!GATHER) { wait_for_previous(); let_next_start(); }
  open_tile(tile.index);
  int turn = 0;
  for (int item = first; item < last; item++, turn ^= 1) {
    const bool more = item + 1 < last;
    const int unit = unit_of(item), next_tile = more ? (item + 1) / per_tile : tile.index;
    const int next_expert = next_tile == tile.index ? tile.expert : expert_of(next_tile);
    ItemEnd end;
    end.read(experts, tile.expert, item % per_tile, strips);  // asked for now: at the end their latency would be seen
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int m = 0; m < TOKENS / 8; m++) c[i][m][0] = c[i][m][1] = c[i][m][2] = c[i][m][3] = 0.f;
#pragma unroll 1
    for (int k = 0; k < COUNT; k += AHEAD)
#pragma unroll
      for (int d = 0; d < AHEAD; d++) {
        if (k + d < count) multiply_chunk(raws[d], part + (k + d) * PARTS);
        if (k + AHEAD < COUNT) request(raws[d], tile.expert, unit, k + d + AHEAD);
        else if (more) request(raws[d], next_expert, unit_of(item + 1), d);
      }
    float(*own)[TOKENS] = sums[turn][part][slot];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int m = 0; m < TOKENS / 8; m++) {
        *(float2*)&own[i * 16 + g][m * 8 + t * 2] = make_float2(c[i][m][0], c[i][m][1]);
        *(float2*)&own[i * 16 + 8 + g][m * 8 + t * 2] = make_float2(c[i][m][2], c[i][m][3]);
      }
    __syncthreads();  // the other sums are free: whoever is here has finished the item before
    end.finish(sums[turn], experts, tile, item % per_tile, strips);
    if (next_tile != tile.index) {
      __syncthreads();
      tile.index = next_tile;
      tile.expert = next_expert;
      open_tile(next_tile);
    }
  }
}
