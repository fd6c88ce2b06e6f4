// Barriers, bulk copies and the matrix instruction of compute capability 9.0a. Defined around it: ROWS_TEXT (rows of the
// B operand, as a string) ACCUMULATORS INPUTS (operand lists of the instruction) OPERANDS (their bindings).

INLINE void barrier_init(u32 at, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals)); }
INLINE void barrier_expect(u32 at, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
INLINE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
INLINE void barrier_wait(u32 at, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again_%=;\n}" ::"r"(at), "r"(parity) : "memory");
}
INLINE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
INLINE void store_bulk(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// c += a * b; a from registers, b by its descriptor
INLINE void multiply(float* c, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" ROWS_TEXT "k16.f32.f16.f16 {" ACCUMULATORS "}, " INPUTS ", 1, 1, 1, 0;" : OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
