// Clusters of blocks: their barrier, and shared memory of each other.

INLINE void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
INLINE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of this shared memory in another block of the cluster.
INLINE u32 in_cluster(const void* own, int block) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"((u32)__cvta_generic_to_shared(own)), "r"(block));
  return r;
}
INLINE void store_in_cluster(const void* own, int block, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(in_cluster(own, block)), "f"(x) : "memory");
}
INLINE void arrive_in_cluster(u32 barrier, int block) {
  asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(barrier), "r"(block) : "memory");
}
// By the copy engine to all `blocks` of the cluster, at the same place in each, and with its barrier.
INLINE void copy_bulk_to_all(u32 to, const void* from, u32 bytes, u32 barrier, int blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)((1 << blocks) - 1))
               : "memory");
}
