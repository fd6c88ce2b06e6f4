// What a launch in 8-bit floats has before its kernel: the matrix instruction of compute capability 9.0a, of 64 tokens
// and half of a tile's output features, and what blocks of a cluster do for each other.
// Defined around it: PART_LIST PART_INPUTS (operand lists of the instruction) PART_OPERANDS (their bindings) PREDICATE
// (of the operand that says whether D is added to) TOKENS (of a tile) STAGES (of the ring) CLUSTER (blocks of a
// cluster). Before it: bulk.cu, clusters.cu.

constexpr int FEATURES = 256, PARTS = 2, PART = 64;  // of a tile; a thread's sums of a part
constexpr int WEIGHTS_STAGE = FEATURES * 128, WEIGHTS_PART = WEIGHTS_STAGE / CLUSTER;
constexpr int X_STAGE = TOKENS * 128, SCALES_BYTES = TOKENS * 4;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + X_STAGE + SCALES_BYTES;

// c = a * b, or c += a * b; both by their descriptors
INLINE void multiply(float* c, u64 a, u64 b, int adds) {
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, " PREDICATE ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PART_LIST "}, " PART_INPUTS ", adds, 1, 1;}"
               : PART_OPERANDS : "l"(a), "l"(b), "r"(adds));
}

// One matrix of a launch, for a tile of it.
struct Segment {
  const char* weights;  // as decode.cu writes them
  const float* scales;  // of 64 output features
  float* out;           // of its own columns; with the gated epilogue the next matmul's codes
  int out_features;
  int tile;             // of its output features
  float* out_scales;    // with the gated epilogue: the next matmul's scales
  INLINE const float* tile_scales() const { return scales + tile * 4; }
};

// Computed again where it is asked for: registers are scarce, and a tile takes long.
INLINE int anew(int x) { asm volatile("" : "+r"(x)); return x; }

struct Place { int column, token_block; };  // of a tile: its output features and its tokens, by tiles

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
