// What a launch in 8-bit floats has before its kernel: the matrix instruction of compute capability 9.0a, of 64 tokens
// and half of a tile's output features.
// Defined around it: PART_LIST PART_INPUTS (operand lists of the instruction) PART_OPERANDS (their bindings) PREDICATE
// (of the operand that says whether D is added to) TOKENS (of a tile) STAGES (of the ring) CLUSTER (blocks of a
// cluster) STORED (1: weights are e4m3 as they lie in fragment order). Before it: bulk.cu, clusters.cu, sharing.cu.

constexpr int FEATURES = 256, PARTS = 2, PART = 64;  // of a tile; a thread's sums of a part
constexpr int WEIGHTS_STAGE = FEATURES * 128, WEIGHTS_PART = WEIGHTS_STAGE / CLUSTER;
constexpr int X_STAGE = TOKENS * 128, SCALES_BYTES = TOKENS * 4, STRIPS_BYTES = FEATURES / 64 * 4;
constexpr int STAGE_BYTES = WEIGHTS_STAGE + X_STAGE + SCALES_BYTES + 512;  // scales of strips; eight rows of weights

// c = a * b, or c += a * b; both by their descriptors
INLINE void multiply(float* c, u64 a, u64 b, int adds) {
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, " PREDICATE ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PART_LIST "}, " PART_INPUTS ", adds, 1, 1;}"
               : PART_OPERANDS : "l"(a), "l"(b), "r"(adds));
}

// One matrix of a launch, for a tile of it.
struct Segment {
  const char* weights;  // as decode.cu writes them; STORED: their map
  const float* scales;  // of 64 output features and 128 columns, as decode.cu writes them
  float* out;           // of its own columns; with the gated epilogue the next matmul's codes
  int out_features;
  int tile;             // of its output features
  float* out_scales;    // with the gated epilogue: the next matmul's scales
  const float* features;  // STORED: factors of output features, or null
  int expert;             // STORED
};

struct Place { int column, token_block, split; };  // of a tile: its output features and its tokens, by tiles
