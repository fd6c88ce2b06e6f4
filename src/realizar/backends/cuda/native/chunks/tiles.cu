// Attention of chunks on compute capability 9.0a. A tile has TOKENS tokens with the GROUP heads of a KV head each:
// rows for CONSUMERS / SPLIT warpgroups, 64 for each. One warp hands out tiles and copies their queries, and one
// copies keys and values, KEYS at a time, into a ring. Keys are taken from the last to the first, from fixed places
// on, and those that a row does not see change no bit of it: so its bits depend on its own context alone. Blocks stay
// and take tile after tile, the longest context first. Where there are too few tiles their contexts are cut into
// parts, which the last of them joins in a fixed order; then bits depend on where a step cuts, too.
// With FIXED contexts are cut at multiples of so many blocks instead, and parts joined from the last to the first,
// whether one block of threads has them all, or, ALONE, several have those of a single token: so both have the same
// bits. Of wide heads SPLIT warpgroups have the same rows: all their scores, and each its own dimensions of the sums,
// as all have no room in a thread's registers. A cache of codes (CODED), of int8 or E4M3, is copied into a ring of its
// own, from which one more warpgroup makes halves.
// Defined around it: NAME HEAD GROUP TOKENS BLOCK_SIZE KEYS CONSUMERS SPLIT SLOTS SKIPS WINDOWED CAP SINKS FIXED ALONE
// CODED E4M3 IN_FP8 CODE_SLOTS; of a thread of a consumer (or 0), of the warps that copy, and of those that decode:
// REGISTERS PRODUCER_REGISTERS DECODER_REGISTERS; BLOCKS, of threads that fit a multiprocessor; in blocks of KEYS, and
// in rounds of the card: LEAST_PART PART_COST FEW_ROUNDS (source.py); SUM_WIDTH, dimensions of an instruction,
// TYPE_TEXT CONVERT_TEXT KEYS_TEXT SUM_TEXT, and for both instructions, SCORE and SUM, _LIST _INPUTS _OPERANDS: the
// accumulators, the other operands, and the accumulators' bindings.

// Runs of 64 dimensions, 128 bytes, as the copy engine interleaves them; it writes zeros behind a head.
constexpr int COLUMNS = (HEAD + 63) / 64;
constexpr int QUERIES = CONSUMERS / SPLIT * 64;
constexpr int OWN = HEAD / SPLIT;  // dimensions of values of a warpgroup
constexpr int ROWS = BLOCK_SIZE < KEYS ? BLOCK_SIZE : KEYS;  // keys of a copy
constexpr int COPIES = KEYS / ROWS * (CODED ? 1 : COLUMNS);
constexpr int SLOT_BYTES = KEYS * COLUMNS * 128, QUERY_BYTES = QUERIES * COLUMNS * 128;
constexpr int SCALES = E4M3 ? 0 : (HEAD + 31) / 32, SCALES_AT = KEYS * HEAD;  // of a key; behind all codes of a place
constexpr int CODE_SLOT_BYTES = CODED ? SCALES_AT + KEYS * SCALES * 2 : 0;
constexpr int WARPGROUPS = CONSUMERS + 1 + CODED, CACHE_ARRIVALS = CODED ? 4 : 1;
constexpr int NOWHERE = -1024;  // a row before the first: the copy engine writes zeros
static_assert(COPIES <= 32 && GROUP * TOKENS <= QUERIES && HEAD % 8 == 0);
static_assert(SUM_WIDTH == HEAD || (SUM_WIDTH % 64 == 0 && OWN % SUM_WIDTH == 0));
static_assert(!CODED || ROWS * SCALES % 8 == 0);  // the copy engine takes runs of 16 bytes

struct Span { int from, to; };  // keys of a place that a tile may see; to -1 is the end

INLINE void copy_box(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
               "[%4];" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
INLINE void copy_heads(u32 to, const TensorMap* map, int x, int head, int token, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
               "%4}], [%5];" ::"r"(to), "l"(map), "r"(x), "r"(head), "r"(token), "r"(barrier) : "memory");
}

// c = a * b, or c += a * b; both operands in shared memory, rows of dimensions
template <int ADD> INLINE void multiply_keys(float (&c)[KEYS / 2], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" KEYS_TEXT "k16.f32." TYPE_TEXT " {" SCORE_LIST "}, " SCORE_INPUTS
               ", 1, 1, 0, 0;" : SCORE_OPERANDS : "l"(a), "l"(b), "n"(ADD));
}
// c += a * b; a from registers, b in shared memory, rows of keys
INLINE void multiply_values(float* c, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" SUM_TEXT "k16.f32." TYPE_TEXT " {" SUM_LIST "}, " SUM_INPUTS
               ", 1, 1, 1, 1;" : SUM_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

typedef const TensorMap* Queries;
// Keys or values of a layer: what maps them; or their codes [blocks, KV heads, block size, head], and scales, of E4M3 a
// float for all.
#if CODED
struct Cache { const char *codes, *scales; };
#else
struct Cache { const TensorMap* map; };
#endif
