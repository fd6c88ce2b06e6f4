// Walks the tiles of a row with 64 columns of a head's state, which a warpgroup keeps as sums of its products,
// transposed: columns of the state by keys. So the state, and what it gives, become operands where they are. With the
// state S before a tile, x[t] = v[t] - d[t] (k[t] S), n = (I + A)^-1 (beta x), outputs are d (q S) + scores n, and the
// state after it is decay * S + k^T (n * the decay to the end). A second warpgroup makes the outputs, from halves of S
// and of n in shared memory; all that comes from memory is copied ahead into a ring by a warp.
// Grid: value heads times HEAD / 64, rows.
// Defined around it, beside what tiles.cu has: SLOTS (of the ring), and TILE_ and STATE_, each with _LIST _INPUTS
// _OPERANDS, of the instructions.

constexpr int QUERIES_AT = 0, KEYS_AT = HEAD_BYTES, LINKS_AT = 2 * HEAD_BYTES, VALUES_AT = LINKS_AT + LINK_BYTES;
constexpr int FACTORS_AT = VALUES_AT + RUN, SLOT_BYTES = (FACTORS_AT + FACTOR_BYTES + 1023) / 1024 * 1024;
constexpr int STATE_AT = SLOTS * SLOT_BYTES, NEW_AT = STATE_AT + HEAD_BYTES, OUT_AT = NEW_AT + RUN;
constexpr int OUT_PITCH = 20;  // floats of a token that a warp transposes: other banks for each
// Barriers of the two warpgroups: halves of the state, and of n, are there, and are done with.
enum { STATE_THERE = 1, STATE_FREE, NEW_THERE, NEW_FREE };

// c = a * b, or c += a * b; a from registers, b in shared memory, rows of columns
template <int ADD> INLINE void multiply_rows(float (&c)[TILE / 2], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" TILE_LIST "}, " TILE_INPUTS ", 1, 1, 0;"
               : TILE_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
}
// c += a * b; a from registers, b in shared memory, rows of tokens
INLINE void multiply_tokens(float (&c)[HEAD / 2], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" STATE_LIST "}, " STATE_INPUTS ", 1, 1, 1;"
               : STATE_OPERANDS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));
}
// Operands that products in flight read: nothing takes their registers before here.
template <int N> INLINE void keep(const u32 (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
}
// Sums as the operand of the next product.
template <int N> INLINE void to_operand(u32 (&a)[N][4], const float (&c)[N * 8]) {
#pragma unroll
  for (int i = 0; i < N * 4; i++) a[i / 4][i % 4] = pair(c[i * 2], c[i * 2 + 1]);
}
// An operand to shared memory, where the other warpgroup's products read it: a warp's 16 rows.
template <int N> INLINE void store_operand(u32 at, const u32 (&a)[N][4], int warp, int lane) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const u32 to = at + i / 4 * RUN + interleaved(warp * 16 + lane % 16, i % 4 * 2 + lane / 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
INLINE void arrive_pair(int barrier) { arrive_some(barrier, 256); }
INLINE void sync_pair(int barrier) { sync_some(barrier, 256); }
// Factors of a thread's tokens: two of each eight.
INLINE void load_factors(float2 (&factors)[TILE / 8], u32 at, int lane) {
#pragma unroll
  for (int i = 0; i < TILE / 8; i++) {
    const u32 from = at + (i * 8 + lane % 4 * 2) * 4;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(factors[i].x), "=f"(factors[i].y) : "r"(from) : "memory");
  }
}
// Each sum [columns, tokens] times its token's factor.
INLINE void scale_tokens(float (&c)[TILE / 2], const float2 (&factors)[TILE / 8]) {
#pragma unroll
  for (int i = 0; i < TILE / 2; i++) c[i] *= i % 2 ? factors[i / 4].y : factors[i / 4].x;
}

struct Walk { int head, half, first_tile, tiles; };

INLINE void copy_tiles(const Walk& walk, const u16* mixed, const char* links, const float* factors, u32 full, u32 empty,
                       u32 ring_at) {
  Place<SLOTS> place;
  for (int i = 0; i < walk.tiles; i++, place.advance()) {
    const int tile = walk.first_tile + i;
    const long at = (long)tile * VALUE_HEADS + walk.head;
    const u32 to = ring_at + place.slot * SLOT_BYTES, barrier = full + place.slot * 8;
    barrier_wait(empty + place.slot * 8, place.parity ^ 1);
    barrier_expect(barrier, 2 * HEAD_BYTES + LINK_BYTES + RUN + FACTOR_BYTES);
    copy_bulk(to + KEYS_AT, mixed_head(mixed, tile, KEY_HEADS + key_head_of(walk.head)), HEAD_BYTES, barrier);
    copy_bulk(to + VALUES_AT, mixed_head(mixed, tile, 2 * KEY_HEADS + walk.head) + walk.half * (RUN / 2), RUN, barrier);
    copy_bulk(to + FACTORS_AT, factors + at * FACTORS, FACTOR_BYTES, barrier);
    copy_bulk(to + LINKS_AT, links + at * LINK_BYTES, LINK_BYTES, barrier);
    copy_bulk(to + QUERIES_AT, mixed_head(mixed, tile, key_head_of(walk.head)), HEAD_BYTES, barrier);
  }
}

INLINE void walk_states(const Walk& walk, float* state, bool known, u32 full, u32 empty, u32 ring_at) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float s[HEAD / 2], x[TILE / 2];
  // Sum c of a thread: key c / 4 * 8 + lane % 4 * 2 + c % 2, column lane / 4 + c / 2 % 2 * 8 of the warp's 16.
  float* own = state + (lane % 4 * 2) * HEAD + walk.half * 64 + warp * 16 + lane / 4;
#pragma unroll
  for (int c = 0; c < HEAD / 2; c++)
    s[c] = known ? own[(c / 4 * 8 + c % 2) * HEAD + c / 2 % 2 * 8] * VALUE_UNIT : 0.f;
  Place<SLOTS> place;
  for (int i = 0; i < walk.tiles; i++, place.advance()) {
    const u32 at = ring_at + place.slot * SLOT_BYTES;
    const u64 keys = descriptor(at + KEYS_AT, 0), key_tokens = descriptor(at + KEYS_AT, RUN);
    const u64 links = descriptor(at + LINKS_AT, 0);
    u32 a[HEAD / 16][4], b[TILE / 16][4], v[TILE / 16][4];
    float2 factors[TILE / 8];
    to_operand(a, s);
    barrier_wait(full + place.slot * 8, place.parity);
    begin_matmuls();
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) {
      const u64 step = k / 4 * (RUN / 16) + k % 4 * 2;
      if (k == 0) multiply_rows<0>(x, a[k], keys);
      else multiply_rows<1>(x, a[k], keys + step);
    }
    end_matmuls();
    if (i > 0) sync_pair(STATE_FREE);
    store_operand(ring_at + STATE_AT, a, warp, lane);
    arrive_pair(STATE_THERE);
    load_factors(factors, at + FACTORS_AT, lane);
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
      load_transposed(v[k], at + VALUES_AT + interleaved(k * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
    await_matmuls<0>();
    pin(x);
    keep(a);
#pragma unroll
    for (int c = 0; c < TILE / 2; c += 2) {
      const float2 d = factors[c / 4];
      const u32 own_v = v[c / 8][c / 2 % 4];
      x[c] = low_half(own_v) - d.x * x[c];
      x[c + 1] = high_half(own_v) - d.y * x[c + 1];
    }
    to_operand(b, x);
    begin_matmuls();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
      if (k == 0) multiply_rows<0>(x, b[k], links);
      else multiply_rows<1>(x, b[k], links + k * 2);
    }
    end_matmuls();
    load_factors(factors, at + FACTORS_AT + TILE * 4, lane);
    float decay;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(decay) : "r"(at + FACTORS_AT + 2 * TILE * 4) : "memory");
#pragma unroll
    for (int c = 0; c < HEAD / 2; c++) s[c] *= decay;
    await_matmuls<0>();
    pin(x);
    keep(b);
    u32 n[TILE / 16][4];
    to_operand(n, x);
    scale_tokens(x, factors);
    to_operand(b, x);
    begin_matmuls();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) multiply_tokens(s, b[k], key_tokens + k * 128);
    end_matmuls();
    if (i > 0) sync_pair(NEW_FREE);
    store_operand(ring_at + NEW_AT, n, warp, lane);
    arrive_pair(NEW_THERE);
    await_matmuls<0>();
    pin(s);
    keep(b);
    if (lane == 0) barrier_arrive(empty + place.slot * 8);
  }
#pragma unroll
  for (int c = 0; c < HEAD / 2; c++) own[(c / 4 * 8 + c % 2) * HEAD + c / 2 % 2 * 8] = s[c] * (1.f / VALUE_UNIT);
  // The last turn's, which nobody waited for.
  sync_pair(STATE_FREE);
  sync_pair(NEW_FREE);
}

// A warp's outputs, [16 columns, 64 tokens], transposed in its own shared memory.
INLINE void write_outputs(const float (&o)[TILE / 2], float* transposed, float* out, int out_stride, int own,
                          int lane) {
#pragma unroll
  for (int c = 0; c < TILE / 2; c++)
    transposed[(c / 4 * 8 + lane % 4 * 2 + c % 2) * OUT_PITCH + lane / 4 + c / 2 % 2 * 8] = o[c];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int token = i * 8 + lane / 4;
    const float4 x = *(const float4*)(transposed + token * OUT_PITCH + lane % 4 * 4);
    if (token < own) *(float4*)(out + (long)token * out_stride + lane % 4 * 4) = x;
  }
  __syncwarp();
}

INLINE void make_outputs(const Walk& walk, int count, float* out, int out_stride, u32 full, u32 empty, u32 ring_at) {
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  float* transposed = (float*)(ring + OUT_AT) + warp * (TILE * OUT_PITCH);
  const u64 state = descriptor(ring_at + STATE_AT, 0), fresh = descriptor(ring_at + NEW_AT, 0);
  out += walk.head * HEAD + walk.half * 64 + warp * 16;
  Place<SLOTS> place;
  for (int i = 0; i < walk.tiles; i++, place.advance()) {
    const u32 at = ring_at + place.slot * SLOT_BYTES;
    const u64 queries = descriptor(at + QUERIES_AT, 0), scores = descriptor(at + LINKS_AT + RUN, 0);
    float o[TILE / 2];
    float2 factors[TILE / 8];
    barrier_wait(full + place.slot * 8, place.parity);
    load_factors(factors, at + FACTORS_AT, lane);
    sync_pair(STATE_THERE);
    begin_matmuls();
    multiply_heads(o, state, queries);
    end_matmuls();
    await_matmuls<0>();
    pin(o);
    arrive_pair(STATE_FREE);
    scale_tokens(o, factors);
    sync_pair(NEW_THERE);
    begin_matmuls();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) multiply_shared<1>(o, fresh + k * 2, scores + k * 2);
    end_matmuls();
    await_matmuls<0>();
    pin(o);
    arrive_pair(NEW_FREE);
    if (lane == 0) barrier_arrive(empty + place.slot * 8);
    write_outputs(o, transposed, out + (long)i * TILE * out_stride, out_stride, count - i * TILE, lane);
  }
}

extern "C" __global__ void __launch_bounds__(384)
NAME(const int* recurring, const int* scanned, const u16* mixed, const char* links, const float* factors, float* states,
     float* out, int out_stride) {
  __shared__ __align__(8) u64 barriers[2 * SLOTS];
  const u32 full = shared_address(barriers), empty = full + SLOTS * 8, ring_at = shared_address(ring);
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  const int index = load_int(scanned + blockIdx.y);
  if (index < 0) return;
  const int* row = recurring + index * FIELDS;
  const int slot = load_int(row), start = load_int(row + 1), count = load_int(row + 2), position = load_int(row + 5);
  const int head = blockIdx.x / (HEAD / 64), half = blockIdx.x % (HEAD / 64);
  const Walk walk{head, half, load_int(row + 7), (count + TILE - 1) / TILE};
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    float* state = states + ((long)slot * VALUE_HEADS + head) * (HEAD * HEAD);
    walk_states(walk, state, position > 0, full, empty, ring_at);
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 152;");
    make_outputs(walk, count, out + (long)start * out_stride, out_stride, full, empty, ring_at);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) copy_tiles(walk, mixed, links, factors, full, empty, ring_at);
  }
}
