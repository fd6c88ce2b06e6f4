// What all matrices of a launch in 8-bit floats share: the matrix instruction of compute capability 9.0a, of a quarter
// of a block's tokens, and the order of blocks.
// Defined around it: PART_TEXT (columns of D, as a string) PART_LIST PART_INPUTS (operand lists of the instruction)
// PART_OPERANDS (their bindings) PREDICATE (of the operand that says whether D is added to) BESIDE (blocks of tokens that
// run beside each other with the same weights) CLUSTER (blocks of a cluster).

// c = a * b, or c += a * b; a from registers, b by its descriptor
INLINE void multiply(float* c, const u32* a, u64 b, int adds) {
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, " PREDICATE ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" PART_TEXT "k32.f32.e4m3.e4m3 "
               "{" PART_LIST "}, " PART_INPUTS ", adds, 1, 1;}"
               : PART_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

// Which output features and tokens a block has. Blocks start in the order of their numbers: those of BESIDE blocks of
// tokens share weights in the second-level cache, where the activations of all of them stay as well. The blocks of a
// cluster have the same tokens.
struct Place { int block_x, token_block; };
INLINE Place place_of() {
  const int id = (blockIdx.z * gridDim.x + blockIdx.x) / CLUSTER, all = gridDim.x / CLUSTER * BESIDE;
  const int first = id / all * BESIDE;
  const int beside = (int)gridDim.z - first < BESIDE ? (int)gridDim.z - first : BESIDE;
  return {id % all / beside * CLUSTER + (int)blockIdx.x % CLUSTER, first + id % all % beside};
}
