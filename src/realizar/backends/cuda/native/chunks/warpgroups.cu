// Around the matrix instructions of compute capability 9.0a: their order, their operands in shared memory, and places
// in a ring of those.

// Nothing that reads or writes these moves across.
template <int N> INLINE void pin(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}
INLINE void begin_matmuls() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void end_matmuls() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> INLINE void await_matmuls() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
INLINE void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
INLINE void arrive_some(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A descriptor of shared memory of rows of 128 bytes, interleaved by the copy engine in eights; `columns_apart`: bytes.
INLINE u64 descriptor(u32 at, u32 columns_apart) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)(columns_apart >> 4) << 16 | (at & 0x3ffff) >> 4;
}

template <int PLACES> struct Place {  // in a ring
  int slot = 0, parity = 0;
  INLINE void advance() { if (++slot == PLACES) { slot = 0; parity ^= 1; } }
};
