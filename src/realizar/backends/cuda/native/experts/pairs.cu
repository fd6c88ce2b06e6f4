// Pairs of a token and an expert, whose choice was complete before the kernel before this one let it start.

// What a kernel before the last has written, read before the wait: never from a cache that its values may have missed.
INLINE int load_earlier(const void* at) {
  int r;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}

// True if no pair before this one has its expert. Of the whole warp.
INLINE bool is_first(const int* chosen, int pair, int expert) {
  bool found = false;
  for (int i = threadIdx.x % 32; i < pair; i += 32) found |= load_earlier(chosen + i) == expert;
  return !__any_sync(~0u, found);
}

// Counts an expert that a step reads, once, and with the first pair a step of a mixture. Of the whole warp.
INLINE void count_expert(const int* chosen, int pair, int expert, u64* experts_read) {
  if (!is_first(chosen, pair, expert) || threadIdx.x % 32) return;
  atomicAdd(experts_read, 1ull);
  if (pair == 0) atomicAdd(experts_read + 1, 1ull);
}
