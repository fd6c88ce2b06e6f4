// Gate and up, then down, of a step of few pairs in one launch. Items are taken one after the other, those of gate and
// up first: a block that finds none of them left goes on with down, whose first weights it asks for at once and whose
// rows it waits for, tile by tile. Which block has which item changes no sum.
// Defined around it: TOKENS GROUPS STAGES. Before it: lists.cu, ring.cu, and wgmma.cu in two
// namespaces, gate_up and down.

// Zeros between launches: how many items blocks have asked for, blocks that ask for none any more, and of each tile how
// often a warp has written its outputs of gate and up. As items are taken in order by blocks that run, none waits for
// a block that does not.
struct Progress { int taken, done, ready[LISTED_TILES]; };

INLINE int load_acquired(const int* at) {
  int r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}

// By a warpgroup that has written an item's outputs: each warp says so for itself, of those that have written some.
INLINE void publish(int* ready) {
  if (threadIdx.x % 128 >= 8 * TOKENS) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(ready) : "memory");
}

// An item's tile, the first of its strips, and whether it is of gate and up.
struct Task { int tile, strip0; bool first; };

struct Tasks {
  int firsts, total, per_tile, down_per_tile;
  INLINE Task at(int item) const {
    const bool first = item < firsts;
    const int index = first ? item : item - firsts, each = first ? per_tile : down_per_tile;
    return {index / each, index % each * (first ? gate_up::WIDTH : down::WIDTH), first};
  }
};

INLINE void produce(
    const gate_up::Experts& first, const down::Experts& last, const Lists& lists, const Tasks& tasks,
    const Ring& ring, int* items, Progress* progress, int taken) {
  const int lane = threadIdx.x % 32;
  Turn turn{0, 1};
  while (true) {
    const int item = __shfl_sync(~0u, taken, 0);
    if (item >= tasks.total) break;
    const Task task = tasks.at(item);
    barrier_wait(ring.empty + turn.slot * 8, turn.parity);
    if (lane == 0) items[turn.slot] = item;
    int pairs[gate_up::OWN_ROWS];
#pragma unroll
    for (int i = 0; i < gate_up::OWN_ROWS; i++) {
      const int place = gate_up::own_place(i);
      pairs[i] = place < TOKENS ? lists.pair(task.tile, place) : -1;
    }
    const int entry = lists.entry(task.tile);
    if (task.first) {
      gate_up::produce_item(
          first, ring, turn, task.tile, task.strip0, entry, pairs, [] { return true; }, [] {});
    } else {
      static_assert(TOKENS <= 16, "a group has four warps");
      const int wanted = tasks.per_tile * GROUPS * (TOKENS / 4);  // warps that have outputs
      const int* ready = progress->ready + task.tile;
      auto is_ready = [&] {
        const bool found = __all_sync(~0u, load_acquired(ready) >= wanted);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // the copy engine reads what others wrote
        return found;
      };
      down::produce_item(
          last, ring, turn, task.tile, task.strip0, entry, pairs, is_ready, [&] { while (!is_ready()) {} });
    }
    // Not before, though the answer takes long: a block that has asked for more than others ends later.
    if (lane == 0) taken = atomicAdd(&progress->taken, 1);
  }
  barrier_wait(ring.empty + turn.slot * 8, turn.parity);
  if (lane == 0) {
    items[turn.slot] = -1;
    barrier_arrive(ring.full + turn.slot * 8);
  }
  barrier_arrive(ring.full + turn.slot * 8);
  int done = 0;
  if (lane == 0) done = atomicAdd(&progress->done, 1);
  if (__shfl_sync(~0u, done, 0) < (int)gridDim.x - 1) return;
  for (int i = lane; i < lists.count; i += 32) progress->ready[i] = 0;
  if (lane == 0) progress->taken = progress->done = 0;
}

constexpr int REQUESTS = 4;  // of a block

// Before the lists are made: a stage of a strip of gate and up, of an expert that a pair goes to, is on its way to the
// second-level cache. request: a number among those of all blocks.
INLINE void request_weights(const gate_up::Experts& first, const int* chosen, int pairs, int request) {
  const int strips = (first.out_features + 63) / 64, pair = request / strips;
  const int expert = pair < pairs ? gate_up::load_listed(chosen + pair) : -1;
  if (expert < 0 || expert >= EXPERTS) return;
  const char* strip = first.weights + expert * first.stride + request % strips * gate_up::strip_bytes(first.chunks);
  prefetch_bulk_once(strip, gate_up::strip_bytes(first.chunks < STEP ? first.chunks : STEP));
}

INLINE void multiply_fused(
    const gate_up::Experts& first, const down::Experts& last, const int* chosen, int pairs, u64* experts_read,
    Progress* progress) {
  __shared__ __align__(8) u64 barriers[2 * STAGES];  // full, then empty
  __shared__ int items[STAGES];  // that begins in a stage; -1: no more come
  __shared__ gate_up::Places gate_up_places[2];
  __shared__ down::Places down_places[2];
  __shared__ Lists lists;
  make_barriers(barriers, ARRIVALS, GROUPS * 4);
  wait_for_previous();
  let_next_start();
  int taken = 0;
  const int idle = threadIdx.x - GROUPS * 128;  // of the warp that makes no lists
  if (idle == 0) taken = atomicAdd(&progress->taken, 1);
  if (idle >= 0 && idle < REQUESTS) request_weights(first, chosen, pairs, blockIdx.x * REQUESTS + idle);
  make_lists(lists, chosen, pairs, blockIdx.x == 0 ? experts_read : nullptr, (int*)ring);
  const int per_tile = gate_up::items_of_tile(first), down_per_tile = down::items_of_tile(last);
  const Tasks tasks{lists.count * per_tile, lists.count * (per_tile + down_per_tile), per_tile, down_per_tile};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), thread = threadIdx.x % 128;
  const u32 full = shared_address(barriers);
  const Ring own{full, full + STAGES * 8, shared_address(ring)};
  if (warp >= GROUPS * 4) return produce(first, last, lists, tasks, own, items, progress, taken);
  const u32 gate_up_x = gate_up::x_descriptor(own.base), down_x = down::x_descriptor(own.base);
  Turn turn{0, 0};
  for (int other = 0;; other ^= 1) {
    barrier_wait(own.full + turn.slot * 8, turn.parity);
    // Read by the lane that gives the stage back.
    const int item = __shfl_sync(~0u, thread % 32 == 0 ? items[turn.slot] : 0, 0);
    if (item < 0) break;
    const Task task = tasks.at(item);
    const int expert = lists.entry(task.tile) >> 1, pair = thread < TOKENS ? lists.pair(task.tile, thread) : -1;
    if (task.first) {
      gate_up::multiply_item(
          first, own, turn, task.tile, task.strip0, expert, pair, gate_up_x, gate_up_places[other]);
      publish(progress->ready + task.tile);
    } else {
      down::multiply_item(last, own, turn, task.tile, task.strip0, expert, pair, down_x, down_places[other]);
    }
  }
}
