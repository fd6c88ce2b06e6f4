// A ring of stages in shared memory, its barriers, and where in it a warp is.
// Defined around it: STAGES. Before it: primitives.cu, bulk.cu.

struct Ring { u32 full, empty, base; };  // addresses

struct Turn {
  int slot, parity;
  INLINE void advance() { if (++slot == STAGES) { slot = 0; parity ^= 1; } }
};

// By all threads of the block; arrivals: at a stage's full barrier and at its empty one.
INLINE void make_barriers(u64 (&barriers)[2 * STAGES], int full_arrivals, int empty_arrivals) {
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, full_arrivals);
      barrier_init(empty + s * 8, empty_arrivals);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}
