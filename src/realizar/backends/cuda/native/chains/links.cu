// Dense matmuls of few tokens that follow each other in one launch: one block a multiprocessor. One of its warps asks
// for weights ahead of everything that the others wait for; WARPS multiply; FINISHERS add up what these leave of a
// unit, and end it, so that nobody else waits for memory meanwhile.
// Defined around it: TOKENS (1-7) WARPS FINISHERS DEPTH (slots of a warp's ring) SLOT_CHUNKS (chunks of a tile in
// a slot) SLOT_BYTES; ACTIVATION where a segment is a gated feed-forward's first. Before it: bulk.cu, codes.cu. After
// it, a namespace for each weight format: weights.cu, format.cu; then the entry.

constexpr int SUMS = 0, RESIDUAL_ADD = 1, GATED = 2;  // what a segment ends with
constexpr int INPUT_BYTES = 96;                       // of a token's chunk: 64 codes and four terms

// How the copy engine finds boxes of a matrix's words: a row is a block of 64 output features and 64 columns.
struct __align__(64) TensorMap { char bytes[128]; };
INLINE void copy_box(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
               "[%4];" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

// One matrix. Units are tiles of 16 outputs, or a tile of gate and the same of up; they go to blocks in turn, from
// block `start` on.
struct Segment {
  Matrix matrix;
  int chunks, units, start;
  const char* codes;
  const float2* terms;
  Norm norm;
  ResidualStream stream;
  int token_stride, awaited;  // units of the launch that must be done before its input is there
  const TensorMap *low, *high, *scales;  // of a tile's planes
};
INLINE int first_unit(const Segment& s) {
  const int behind = (int)blockIdx.x - s.start;
  return behind < 0 ? behind + (int)gridDim.x : behind;
}
INLINE int slots_of(const Segment& s) { return (s.chunks + SLOT_CHUNKS - 1) / SLOT_CHUNKS; }
// The same tile of a strip of gate, or of the strip of up behind it.
INLINE int gated_tile(int unit, int half) { return (unit / 4 * 2 + half) * 4 + unit % 4; }

INLINE int load_acquire(const int* at) {
  int r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(at) : "memory");
  return r;
}
// What other blocks have written in this launch: past the first-level cache.
INLINE float load_others_float(const void* at) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(at) : "memory");
  return r;
}
INLINE uint4 load_others16(const void* at) {
  uint4 r;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at) : "memory");
  return r;
}
// One unit more is done, and what the warp wrote is there for all blocks.
INLINE void count_unit(int* done) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(done) : "memory");
}

// Barriers: a slot has its bytes, and is read; a unit's sums are there, and are taken; an input is there.
constexpr int UNITS = 4;  // whose sums have room
struct Shared {
  u64 full[WARPS][DEPTH], empty[WARPS][DEPTH], summed[UNITS], taken[UNITS], opened;
  float sums[UNITS][WARPS][TOKENS][32];
};
INLINE void init_barriers(Shared& shared) {
  for (int i = 0; i < WARPS * DEPTH; i++) {
    barrier_init(shared_address(&shared.full[0][i]), 1);
    barrier_init(shared_address(&shared.empty[0][i]), 1);
  }
  for (int i = 0; i < UNITS; i++) {
    barrier_init(shared_address(&shared.summed[i]), WARPS);
    barrier_init(shared_address(&shared.taken[i]), 1);
  }
  barrier_init(shared_address(&shared.opened), 1 + FINISHERS);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A place in a warp's ring.
struct Ring {
  u32 full, empty, slots;
  int slot, parity;
  INLINE Ring(Shared& shared, int warp)
      : full(shared_address(shared.full[warp])), empty(shared_address(shared.empty[warp])),
        slots(shared_address(ring) + warp * (DEPTH * SLOT_BYTES)), slot(0), parity(0) {}
  INLINE void advance() {
    if (++slot == DEPTH) { slot = 0; parity ^= 1; }
  }
};

// How many units a block has done, as one of its warps counts them, and inputs; what was awaited for the one it has.
struct Place {
  int warp, lane, done, opened, awaited;
  INLINE u32 barrier(u64 (&of)[UNITS]) const { return shared_address(&of[done % UNITS]); }
  INLINE int parity() const { return done / UNITS & 1; }
};

// A warp that multiplies.
struct Multiplier {
  Place place;
  Ring own;
  char *slots, *input;
};

// All warps but that which asks for weights come here before a block's first unit of a segment with another input than
// that before, and the first of them looks for all. The count is the launch's own once the kernel before has ended.
INLINE void await_input(const Segment& s, const int* done, Place& place, Shared& shared) {
  const u32 opened = shared_address(&shared.opened);
  wait_for_previous();
  if (threadIdx.x == 0)
    while (load_acquire(done) < s.awaited) {}
  // Those that may have no unit of an input are counted, so that none misses one.
  if (threadIdx.x == 0 || (place.warp >= WARPS && place.lane == 0)) barrier_arrive(opened);
  barrier_wait(opened, place.opened & 1);
  place.opened++;
  place.awaited = s.awaited;
}

// Codes and terms of the chunks that the warp multiplies; of a last slot's chunks beyond the columns zeros.
INLINE void copy_input(const Segment& s, const Multiplier& own) {
  constexpr int AT_ONCE = 6;
  const int count = (slots_of(s) - own.place.warp + WARPS - 1) / WARPS * SLOT_CHUNKS * TOKENS * 6;
#pragma unroll 1
  for (int i0 = own.place.lane; i0 < count; i0 += 32 * AT_ONCE) {
    uint4 values[AT_ONCE];
    int to[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = i0 + j * 32, part = i % 6, m = i / 6 % TOKENS, k = i / 6 / TOKENS;
      const int chunk = (own.place.warp + k / SLOT_CHUNKS * WARPS) * SLOT_CHUNKS + k % SLOT_CHUNKS;
      const long at = (long)m * s.chunks + chunk;
      const char *codes = s.codes + at * 64, *terms = (const char*)(s.terms + at * 4) - 64;
      to[j] = (chunk * TOKENS + m) * INPUT_BYTES + part * 16;
      values[j] = make_uint4(0, 0, 0, 0);
      if (i < count && chunk < s.chunks) values[j] = load_others16((part < 4 ? codes : terms) + part * 16);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (i0 + j * 32 < count) *(uint4*)(own.input + to[j]) = values[j];
  }
}

// Factors of a norm that the segment applies, of all lanes.
INLINE void read_factors(float (&factors)[TOKENS], const Norm& norm, int lane) {
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    float sum = 0.f;
#pragma unroll 8
    for (int p = lane; p < norm.parts; p += 32) sum += load_others_float(norm.square_sums + (long)m * norm.parts + p);
#pragma unroll
    for (int o = 1; o < 32; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
    factors[m] = norm.parts ? norm.factor(sum) : 1.f;
  }
}

// A token's sum of the unit's column `lane % 16`, in a fixed order: of all lanes.
INLINE float add_shares(const float (&sums)[WARPS][TOKENS][32], int m, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS / 2; w++) sum += sums[lane / 16 * (WARPS / 2) + w][m][lane % 16];
  return sum + __shfl_xor_sync(~0u, sum, 16);
}

template <int KIND>
INLINE void finish(
    const Segment& s, int unit, int lane, const float (&sums)[WARPS][TOKENS][32], const float (&factors)[TOKENS],
    const float (&before)[TOKENS], float norm_weight) {
  const int column = lane % 16, out = unit * 16 + column;
#pragma unroll
  for (int m = 0; m < TOKENS; m++) {
    if constexpr (KIND == GATED) {
#ifdef ACTIVATION
      float own = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) own += sums[w][m][lane];
      own *= factors[m];
      const float other = __shfl_xor_sync(~0u, own, 16);
      const Code code = code_of(lane < 16 ? gated(own, other) : gated(other, own));
      const long group = (long)m * s.units + unit;
      if (lane < 16) code.store((char*)s.matrix.partials, (float2*)s.matrix.out_scales, group, column);
#endif
    } else {
      float sum = add_shares(sums, m, lane);
      if constexpr (KIND == SUMS) {
        const bool inside = lane < 16 && out < s.matrix.out_features;
        if (inside) s.matrix.partials[(long)m * s.token_stride + out] = sum * factors[m];
      } else {
        if (s.stream.bias) sum += __ldg(s.stream.bias + out);
        const float x = before[m] + s.stream.scale * sum;
        if (lane < 16) s.matrix.partials[(long)m * s.matrix.out_features + out] = x;
        if (!s.stream.norm_weight) continue;
        const Code code = code_of(x * norm_weight);
        float square = x * x;
#pragma unroll
        for (int o = 8; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
        const long group = (long)m * ((s.matrix.out_features + 63) / 64 * 4) + unit;
        if (lane < 16) code.store(s.stream.codes, s.stream.terms, group, column);
        if (lane == 0) s.stream.square_sums[(long)m * s.stream.parts + unit] = square;
      }
    }
  }
}

// The units of a segment that a warp ends. `last`: nobody waits for them, and the launch's last unit leaves the count
// as the next launch needs it.
template <int KIND>
INLINE void finish_segment(
    const Segment& s, bool last, int all_units, int* done, Place& place, float (&factors)[TOKENS], Shared& shared) {
#pragma unroll 1
  for (int unit = first_unit(s); unit < s.units; unit += gridDim.x, place.done++) {
    if (place.awaited != s.awaited) {
      await_input(s, done, place, shared);
      read_factors(factors, s.norm, place.lane);
    }
    if (place.done % FINISHERS != place.warp - WARPS) continue;
    float before[TOKENS], norm_weight = 0.f;
    if constexpr (KIND == RESIDUAL_ADD) {
      const int out = unit * 16 + place.lane % 16;
#pragma unroll
      for (int m = 0; m < TOKENS; m++)
        before[m] = load_others_float(s.matrix.partials + (long)m * s.matrix.out_features + out);
      if (s.stream.norm_weight) norm_weight = __ldg(s.stream.norm_weight + out);
    }
    barrier_wait(place.barrier(shared.summed), place.parity());
    finish<KIND>(s, unit, place.lane, shared.sums[place.done % UNITS], factors, before, norm_weight);
    __syncwarp();
    if (place.lane == 0) {
      barrier_arrive(place.barrier(shared.taken));
      if (!last) count_unit(done);
      else if (atomicAdd(done, 1) == all_units - 1) *done = 0;
    }
  }
}
