// One weight format of a chain: where a tile lies in a slot, and the products of a segment.
// Defined around it: what links.cu and weights.cu have.

static_assert(!VECTOR && SMALL == SMALL_F16 && (BITS == 4 || BITS == 5 || BITS == 6 || BITS == 8), "a slot's planes");
constexpr int LOW_BYTES = BITS == 8 ? 1024 : 512, HIGH_BYTES = BITS == 6 ? 256 : BITS == 5 ? 128 : 0;  // of a tile
constexpr int HIGH_AT = SLOT_CHUNKS * LOW_BYTES, SCALES_AT = HIGH_AT + SLOT_CHUNKS * HIGH_BYTES;  // in a slot
constexpr int FILLED_BYTES = SCALES_AT + SLOT_CHUNKS * TILE_SCALE_BYTES;
static_assert(FILLED_BYTES <= SLOT_BYTES, "a slot has a tile's chunks");

// A chunk of a tile in a slot, as read_codes asks for it.
struct TileCodes {
  const char *low, *high;
  INLINE uint4 read16(int at) const { return *(const uint4*)(low + at); }
  INLINE uint2 read8(int at) const { return *(const uint2*)(high + at - 2048); }
  INLINE u32 read4(int at) const { return *(const u32*)(high + at - 2048); }
};

// Of the warp that asks, each lane fills the ring of one that multiplies.
INLINE void request_tile(const Segment& s, int tile, int warp, Ring& to) {
  const int slots = slots_of(s), block = tile / 4 * s.chunks;
#pragma unroll 1
  for (int j0 = 0; j0 < slots; j0 += WARPS) {
    const int j = j0 + warp;
    if (warp >= WARPS || j >= slots) continue;
    const u32 full = to.full + to.slot * 8, at = to.slots + to.slot * SLOT_BYTES;
    barrier_wait(to.empty + to.slot * 8, to.parity ^ 1);
    barrier_expect(full, FILLED_BYTES);
    const int row = block + j * SLOT_CHUNKS;
    copy_box(at, s.low, tile % 4 * (LOW_BYTES / 4), row, full);
    if constexpr (HIGH_BYTES > 0) copy_box(at + HIGH_AT, s.high, 512 + tile % 4 * (HIGH_BYTES / 4), row, full);
    copy_box(at + SCALES_AT, s.scales, (CODES_BYTES + tile % 4 * TILE_SCALE_BYTES) / 4, row, full);
    to.advance();
  }
}

template <int KIND>
INLINE void request_segment(const Segment& s, int warp, Ring& to) {
#pragma unroll 1
  for (int unit = first_unit(s); unit < s.units; unit += gridDim.x) {
    if constexpr (KIND == GATED) {
#pragma unroll 1
      for (int half = 0; half < 2; half++) request_tile(s, gated_tile(unit, half), warp, to);
    } else request_tile(s, unit, warp, to);
  }
}

// Codes of a lane's sixteen columns of half R as bytes, four to a word.
template <int R>
INLINE void tile_codes(u32 (&words)[4], const Raw& raw) {
  words[0] = code_bytes<R, 0>(raw, nullptr);
  words[1] = code_bytes<R, 1>(raw, nullptr);
  words[2] = code_bytes<R, 2>(raw, nullptr);
  words[3] = code_bytes<R, 3>(raw, nullptr);
}

struct Sums {
  float scaled[2][TOKENS], beside[2][TOKENS];  // of scale * dot product, and of minima or scales * sum of x
  // Of one chunk of a slot, whose input begins at `input`.
  INLINE void add(const char* slot, int c, const char* input, int lane) {
    const int t = lane & 3;
    Raw raw;
    read_codes(raw, TileCodes{slot + c * LOW_BYTES, slot + HIGH_AT + c * HIGH_BYTES}, 0, lane);
    const Staged scales{slot + SCALES_AT + c * TILE_SCALE_BYTES - CODES_BYTES};
    read_scales(raw, scales, scales, 0, lane);
    u32 q0[4], q1[4];
    tile_codes<0>(q0, raw);
    tile_codes<1>(q1, raw);
    const Pairs p = scale_pairs(raw);
    const float s0 = low_half(p.pair[0]), s1 = MINIMA ? low_half(p.pair[1]) : high_half(p.pair[0]);
    const float m0 = MINIMA ? high_half(p.pair[0]) : s0, m1 = MINIMA ? high_half(p.pair[1]) : s1;
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
      const char* own = input + (c * TOKENS + m) * INPUT_BYTES;
      const uint4 x = *(const uint4*)(own + t * 16);
      const float2 term = *(const float2*)(own + 64 + t * 8);
      auto dots = [&](const u32(&q)[4]) {
        return dot4(q[3], x.w, dot4(q[2], x.z, dot4(q[1], x.y, dot4(q[0], x.x, 0))));
      };
      scaled[0][m] += s0 * term.x * (float)dots(q0);
      scaled[1][m] += s1 * term.x * (float)dots(q1);
      if constexpr (MINIMA || OFFSET != 0.f) {
        beside[0][m] += m0 * term.y;
        beside[1][m] += m1 * term.y;
      }
    }
  }
};

// Sums of a tile over a warp's chunks.
INLINE void multiply_tile(const Segment& s, int tile, Multiplier& of, float (*to)[32]) {
  const int lane = of.place.lane, g = lane >> 2, t = lane & 3, slots = slots_of(s);
  const float block_scale = __ldg(s.matrix.block_scales + tile / 4);
  Sums sums{};
#pragma unroll 1
  for (int j = of.place.warp; j < slots; j += WARPS) {
    const int at = of.own.slot;
    const char *slot = of.slots + at * SLOT_BYTES, *input = of.input + j * (SLOT_CHUNKS * TOKENS * INPUT_BYTES);
    barrier_wait(of.own.full + at * 8, of.own.parity);
#pragma unroll
    for (int c = 0; c < SLOT_CHUNKS; c++) sums.add(slot, c, input, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(of.own.empty + at * 8);
    of.own.advance();
  }
  constexpr float scale0 = power(POSITION0 - 24), scale1 = power(POSITION1 - 24 - (BYTES_TIMES_16 ? 4 : 0));
  constexpr float shift0 = MINIMA ? 1.f : -OFFSET * power(POSITION0 - 24);
  constexpr float shift1 = MINIMA ? 1.f : -OFFSET * power(POSITION1 - 24);
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    float low = sums.scaled[0][m] * scale0 + sums.beside[0][m] * shift0;
    float high = sums.scaled[1][m] * scale1 + sums.beside[1][m] * shift1;
    low += __shfl_xor_sync(~0u, low, 1);
    high += __shfl_xor_sync(~0u, high, 1);
    low += __shfl_xor_sync(~0u, low, 2);
    high += __shfl_xor_sync(~0u, high, 2);
    if (t == 0) { to[m][g] = low * block_scale; to[m][g + 8] = high * block_scale; }
  }
}

// A warp's sums of a block's units of a segment.
template <int KIND>
INLINE void multiply_segment(const Segment& s, const int* done, Multiplier& of, Shared& shared) {
  Place& place = of.place;
#pragma unroll 1
  for (int unit = first_unit(s); unit < s.units; unit += gridDim.x, place.done++) {
    if (place.awaited != s.awaited) {
      await_input(s, done, place, shared);
      copy_input(s, of);
      __syncwarp();
    }
    barrier_wait(place.barrier(shared.taken), place.parity() ^ 1);
    float(*sums)[32] = shared.sums[place.done % UNITS][place.warp];
    if constexpr (KIND == GATED) {
#pragma unroll 1
      for (int half = 0; half < 2; half++)
        multiply_tile(s, gated_tile(unit, half), of, (float(*)[32])(&sums[0][0] + half * 16));
    } else multiply_tile(s, unit, of, sums);
    __syncwarp();
    if (place.lane == 0) barrier_arrive(place.barrier(shared.summed));
  }
}
