// One grouped matmul: a fixed number of blocks takes its items one after the other in the order of experts; how many
// there are stands in memory.

INLINE void produce(const Experts& experts, const Ring& ring, int total, int per_tile) {
  int tile = 0, entry = 0, pairs[OWN_ROWS];
  auto read_list = [&](int item) {
    tile = item / per_tile;
    entry = load_listed(experts.work + 1 + tile);
    if constexpr (GATHER)
#pragma unroll
      for (int i = 0; i < OWN_ROWS; i++) {
        const int place = own_place(i);
        pairs[i] = place < TOKENS ? load_listed(experts.slots + tile * TOKENS + place) : -1;
      }
  };
  Turn turn{0, 1};
  bool ready = false;
  if ((int)blockIdx.x < total) read_list(blockIdx.x);
  for (int item = blockIdx.x; item < total; item += gridDim.x) {
    const int own_tile = tile, own_entry = entry;
    int own_pairs[OWN_ROWS];
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) own_pairs[i] = pairs[i];
    if (item + (int)gridDim.x < total) read_list(item + gridDim.x);
    // The first weights need not wait for the kernel before.
    produce_item(
        experts, ring, turn, own_tile, item % per_tile * WIDTH, own_entry, own_pairs, [&] { return ready; },
        [&] { wait_for_previous(); let_next_start(); ready = true; });
  }
}

INLINE void multiply_experts(const Experts& experts) {
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  __shared__ Places places[2];
  make_barriers(barriers, ARRIVALS, GROUPS * 4);
  if constexpr (GATHER) { wait_for_previous(); let_next_start(); }
  const int per_tile = items_of_tile(experts), total = load_listed(experts.work) * per_tile;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), thread = threadIdx.x % 128;
  if (warp >= GROUPS * 4) {
    if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const u32 full = (u32)__cvta_generic_to_shared(barriers);
    const Ring own{full, full + STAGES * 8, (u32)__cvta_generic_to_shared(ring)};
    if (warp == GROUPS * 4) produce(experts, own, total, per_tile);
    return;
  }
  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS ? REGISTERS : 24));
  if constexpr (!GATHER) wait_for_previous();

  // Made once; the producer has no registers to keep them.
  const u32 full = shared_address(barriers);
  const Ring own{full, full + STAGES * 8, shared_address(ring)};
  const u32 x_low = x_descriptor(own.base);
  Turn turn{0, 0};
  int other = 0;
  auto pair_at = [&](int item) {
    return thread < TOKENS ? load_listed(experts.slots + item / per_tile * TOKENS + thread) : -1;
  };
  auto expert_at = [&](int item) { return load_listed(experts.work + 1 + item / per_tile) >> 1; };
  int next_pair = (int)blockIdx.x < total ? pair_at(blockIdx.x) : -1;
  int next_expert = (int)blockIdx.x < total ? expert_at(blockIdx.x) : 0;
  for (int item = blockIdx.x; item < total; item += gridDim.x, other ^= 1) {
    const int expert = next_expert, pair = next_pair;
    if (item + (int)gridDim.x < total) {
      next_pair = pair_at(item + gridDim.x);
      next_expert = expert_at(item + gridDim.x);
    }
    multiply_item(
        experts, own, turn, item / per_tile, item % per_tile * WIDTH, expert, pair, x_low, places[other]);
  }
}
