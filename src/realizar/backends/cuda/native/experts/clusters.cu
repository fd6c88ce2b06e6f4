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
