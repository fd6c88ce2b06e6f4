// What blocks of a cluster do for each other where each copies a part of what all of them read.
// Defined around it: CLUSTER (blocks of a cluster). Before it: bulk.cu.

// Computed again where it is asked for: registers are scarce, and a tile takes long.
INLINE int anew(int x) { asm volatile("" : "+r"(x)); return x; }

INLINE void arrive_in_cluster(u32 barrier, int block) {
  if constexpr (CLUSTER == 1) return barrier_arrive(barrier);
  asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(barrier), "r"(block) : "memory");
}
// The same for all blocks of a cluster, at the same place in each, and with its barrier.
INLINE void copy_bulk_to_all(u32 to, const void* from, u32 bytes, u32 barrier) {
  if constexpr (CLUSTER == 1) return copy_bulk(to, from, bytes, barrier);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier),
               "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}
