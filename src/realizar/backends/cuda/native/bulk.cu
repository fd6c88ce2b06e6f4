// Copies of contiguous memory by compute capability 9.0's copy engine, and barriers that count their bytes.

#if __CUDA_ARCH__ >= 900
// The address of shared memory, made once: the compiler would compute it again wherever it is used, which takes long.
INLINE u32 shared_address(const void* at) {
  u32 address = (u32)__cvta_generic_to_shared(at);
  asm volatile("" : "+r"(address));
  return address;
}
INLINE void barrier_init(u32 at, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals)); }
INLINE void barrier_expect(u32 at, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
INLINE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
INLINE void barrier_wait(u32 at, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again_%=;\n}" ::"r"(at), "r"(parity) : "memory");
}
INLINE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Of what is read once, or again only after much else: it leaves the second-level cache first.
INLINE u64 leaves_first() {
  u64 policy;  // volatile: made anew, it takes no registers in between
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
INLINE void copy_bulk_once(u32 to, const void* from, u32 bytes, u32 barrier) {
  const u64 policy = leaves_first();
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// To the second-level cache.
INLINE void prefetch_bulk_once(const void* from, u32 bytes) {
  asm volatile(
      "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes), "l"(leaves_first())
      : "memory");
}
// Where the engine finds boxes of an array: chunks/tensor_map.py.
struct __align__(64) TensorMap { char bytes[128]; };
INLINE void store_bulk(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
#endif
