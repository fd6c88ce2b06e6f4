// The matrix instruction of compute capability 9.0a.
// Defined around it: TOKENS_TEXT (columns of D, as a string) MATMUL_LIST MATMUL_INPUTS (operand lists of the
// instruction) MATMUL_OPERANDS (their bindings).

// c += a * b; a from registers, b by its descriptor
INLINE void multiply(float* c, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" TOKENS_TEXT "k16.f32.f16.f16 {" MATMUL_LIST "}, " MATMUL_INPUTS ", 1, 1, 1, 0;" : MATMUL_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
