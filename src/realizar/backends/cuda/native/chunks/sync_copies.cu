// Attention of chunks by mma.sync, for cards without wgmma. A block of threads has a tile, TOKENS tokens with the GROUP
// heads of a KV head each, and a warp 16 or 32 rows of it. All threads copy keys and values, KEYS at a time, with
// cp.async: values while scores are made, and the next keys while values are summed; another block of the same
// multiprocessor multiplies where one waits. Keys are taken from the last to the first, from fixed places on, and those
// that a row does not see change no bit of it: so its bits depend on its own context alone.
// Defined around it: NAME HEAD GROUP TOKENS BLOCK_SIZE KEYS ROWS WARPS BLOCKS SKIPS WINDOWED CAP SINKS IN_FP8 TYPE_TEXT
// CONVERT_TEXT (source.py).

constexpr int OWN = HEAD, THREADS = WARPS * 32, ATOMS = ROWS / (WARPS * 16);
constexpr int RUNS = HEAD / 8;  // of 16 bytes
// An odd number of runs from row to row: eight rows' runs of the same dimensions lie in different banks.
constexpr int STRIDE = (RUNS + 1) * 16;
constexpr int AT_ONCE = THREADS / 8;  // rows of a copy by all threads: eight have a row
constexpr int COPIES = KEYS / AT_ONCE;
static_assert(HEAD % 16 == 0 && ROWS % (WARPS * 16) == 0 && KEYS % AT_ONCE == 0 && GROUP * TOKENS <= ROWS);
static_assert(BLOCK_SIZE % 16 == 0 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0);

struct Queries { const char* values; long row_bytes; };  // of a token
struct Cache { const char* values; };  // [blocks, KV heads, block size, HEAD]

// Sixteen bytes, or zeros.
INLINE void copy16_if(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
INLINE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
INLINE void await_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}
// This thread's part of a row. `to` and `from` are those of its first run.
INLINE void copy_row(u32 to, const char* from, bool there) {
#pragma unroll
  for (int run = 0; run < RUNS; run += 8)
    if (run + 8 <= RUNS || threadIdx.x % 8 < RUNS % 8) copy16_if(to + run * 16, from + run * 16, there);
}

// Keys that a tile may see, and in which rows of the cache a thread finds those that it copies.
struct Seeker {
  const int* table;
  int from, to;  // of the row's keys
  int kv_heads, kv_head;
  int rows[COPIES];
  INLINE void look_up(int index) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int key = index * KEYS + i * AT_ONCE + threadIdx.x / 8, block = key / BLOCK_SIZE;
      if (i * AT_ONCE % BLOCK_SIZE) {
        rows[i] = rows[i - 1] + AT_ONCE;
      } else {
        const bool there = block * BLOCK_SIZE < to && (block + 1) * BLOCK_SIZE > from;
        rows[i] = ((there ? load_int(table + block) : 0) * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
      }
    }
  }
  INLINE void copy(u32 to_shared, const Cache& cache, int index) const {
    const u32 place = to_shared + threadIdx.x / 8 * STRIDE + threadIdx.x % 8 * 16;
    const char* values = cache.values + threadIdx.x % 8 * 16;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int key = index * KEYS + i * AT_ONCE + threadIdx.x / 8;
      copy_row(place + i * AT_ONCE * STRIDE, values + (long)rows[i] * (HEAD * 2), key >= from && key < to);
    }
    close_copies();
  }
};
