// Rows, sampled tokens and tables of the sampler, and what its kernels share: integer weights, the order of ids, sums
// of a block.
// Defined by the loader: SAMPLERS, the fields of `Row` that are samplers' parameters; CUTS, true for cut_ids alone.
// Mirrored by ../../sampling: native_rows.py (Row), native_step_sampler.py (Tables, Sampled).
//
// A weight is exp((logit - top) / temperature) * 2^40 as an integer of 64 bits, so that sums do not depend on their
// order: every split into blocks gives the same bits. Ids are ordered by (key, id): key grows as the logit falls.

typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__
#define TILE 4096        // logits whose largest finish_logits finds; the step of all sums
#define SPAN 16384       // logits of a block of weigh_ids and survey_ids
#define TILES (SPAN / TILE)
#define MOST_TILES 512   // of a vocabulary whose most probable ids are found by tiles
#define BINS 2048
#define ROOM 4096        // ids that can be sorted
#define BINS_PER_NAT 73.f
#define FARTHEST 700.f   // scaled distances from here on have no weight
#define LARGEST 3.4028234663852886e38
#define INF __int_as_float(0x7f800000)

#define ADJUST 1         // flags of a sampled token
#define DRAW 2
#define CUT 4
#define HISTOGRAM 8
#define DEVIATION 16
#define DRY 32
#define WHOLE 1          // extents of a list of ids: all that may stay
#define BIN 2            // those of the bin in which a sum is reached
#define RING 3           // those of the bins in which a sum by distance from the mean one is reached
#define UNUSABLE (~0ull) // in place of a sum with a logit that is not finite

#define NO_MASK -1
#define SHARED (1 << 24) // from this number of a mask on: a line of `shared_masks`
#define DEFERRED -2         // in place of a mask: the row samples nothing
#define NOT_REACHED -2
#define NONE_ALLOWED -3

struct Row {
  u64 seed;
  const int* bias_ids;
  const double* biases;
  const int* end_ids;
  const int* breakers;
  u32* counts;
  int* dry_tokens;
  int* dry_lengths;
  float* dry_values;
  SAMPLERS
  int choice, num_biases, num_ends, num_breakers, min_tokens, dry_start, dry_places, num_prompt, kinds;
};

// One place at which a token is sampled. Kernels pass one without flags.
struct Sampled { int index, row, place, position, num_output, mask, draft_token, flags; };
// A row of a step with drafts.
struct Drafted { int row, first, drafts, draft_token; };
// Log-probabilities wanted of the logits `slot`; target -1: of the id sampled there.
struct Query { int slot, target, top_n, padding; };  // slot -1: nothing is wanted
// Ids that stay: low <= (key, id) <= high, and (|distance - mean|, id) <= typical; `summed` where `sums` are theirs.
struct Cut { u64 low, high, typical; float mean; int summed; };
// Where a row's first truncation by mass or count ends. gather_ids lists the ids of the bins from `first` to before
// `end` that are not among the bins from `kept` to before `kept_end`, which all stay. `extent`: 0, WHOLE, BIN or RING.
// `size`: how many, of which no more than ROOM are kept. `arrivals`: spans that are in the histogram.
struct Near { int extent, size, first, end, kept, kept_end, arrivals; float mean; };

// `mask_indices`: the mask of each token of list_sampled, NO_MASK or DEFERRED. `shared_masks`: in the host's memory.
struct Tables {
  const float* logits; const float* tops; const int* top_ids;
  float* adjusted; float* adjusted_tops; int* adjusted_ids;
  const u32* masks; const int* token_ids; int* sampled; int* last;
  const Row* rows; double* mu; double* next_mu;
  u64* sums; u64* weights; u32* counts; double* moments; Cut* cuts;
  u64* query_sums; u32* query_ranks; u32* query_counts;
  const int* selected_rows; const int* contexts;
  u64* listed; Near* near;
  const int* mask_indices; const u32* shared_masks;
  int vocab, tiles, words, spans;
};

// A kernel may start while the one before it ends: nothing is read or left before this.
INLINE void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

INLINE bool finite(float x) { return fabsf(x) < INF; }
INLINE u32 key_of(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}
INLINE float logit_of(u32 key) { return __uint_as_float(key >> 31 ? key : ~key & 0x7fffffffu); }
INLINE u64 place_of(u32 key, int id) { return (u64)key << 32 | (u32)id; }
INLINE u64 place_of(float x, int id) { return place_of(key_of(x), id); }
INLINE int bin_of(float distance) { return min(BINS - 1, (int)(distance * BINS_PER_NAT)); }
INLINE float inverse_of(double temperature) { return fminf((float)(1.0 / temperature), 1e30f); }

// Never fused with what is around them: every kernel must get the same bits.
INLINE float distance_of(float top, float x, float inverse) { return __fmul_rn(__fsub_rn(top, x), inverse); }
INLINE float apart(float distance, float mean) { return fabsf(__fsub_rn(distance, mean)); }

// exp(-distance) * 2^40, at least 1 for what may be chosen at all: high * 2^20 + low.
struct Weight { u32 high, low; };
INLINE Weight weight_parts(float distance) {
  const float least = 9.094947017729282e-13f, unit = 1048576.f, ones = 8388608.f;  // 2^-40, 2^20, 2^23
  const float x = distance < FARTHEST ? fmaxf(expf(-distance), least) : 0.f;
  const float high = __fmaf_rz(x, unit, ones);  // above 2^23 the lowest bit is a one: a whole number, rounded down
  const float low = __fmaf_rz(__fmaf_rn(x, unit, ones - high), unit, ones);
  return {__float_as_uint(high) - 0x4b000000u, __float_as_uint(low) - 0x4b000000u};
}
INLINE u64 weight_of(float distance) {
  const Weight weight = weight_parts(distance);
  return (u64)weight.high << 20 | weight.low;
}

// Add to a sum in shared memory, which has no addition of 64 bits by itself.
INLINE void add_shared(u64* sum, u64 weight) {
  u32* words = (u32*)sum;
  const u32 added = (u32)weight, before = atomicAdd(words, added);
  const u32 carry = (u32)(weight >> 32) + (before + added < before);
  if (carry) atomicAdd(words + 1, carry);
}

// A share of a sum of weights, as one to be reached.
INLINE u64 share_of(double share, u64 mass) {
  const double x = ceil(share * (double)mass);
  return x < 1.0 ? 1 : (u64)x;
}

INLINE bool stays(const Cut& cut, float x, float distance, int id) {
  const u64 place = place_of(x, id);
  if (place < cut.low || place > cut.high) return false;
  return cut.typical == ~0ull || place_of(__float_as_uint(apart(distance, cut.mean)), id) <= cut.typical;
}

INLINE float bounded(double value, float before) {
  return finite(before) ? (float)fmin(fmax(value, -LARGEST), LARGEST) : before;
}

// Sums, minima and scans of a block of at most 1024 threads; `room` holds 33 numbers and is free again afterwards.
INLINE u64 warp_sum(u64 x) { for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o); return x; }
INLINE u64 warp_min(u64 x) { for (int o = 16; o; o >>= 1) x = min(x, __shfl_xor_sync(~0u, x, o)); return x; }

INLINE u64 block_sum(u64 x, u64* room) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : 0;
  return warp_sum(x);
}
INLINE u64 block_min(u64 x, u64* room) {
  x = warp_min(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : ~0ull;
  return warp_min(x);
}
// The sum of the threads before this one.
INLINE u64 block_scan(u64 x, u64* room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 through = x;
  for (int o = 1; o < 32; o <<= 1) {
    const u64 other = __shfl_up_sync(~0u, through, o);
    if (lane >= o) through += other;
  }
  __syncthreads();
  if (lane == 31) room[warp] = through;
  __syncthreads();
  const u64 before = warp_sum(lane < warp ? room[lane] : 0);
  return before + through - x;
}

// The logits that a token is sampled from.
struct View {
  const float* x;
  int vocab;
  float top, inverse;
  u64 best;  // place of the largest; UNUSABLE where logits are not finite
};

// The place of the largest logit, found in tiles; of a warp or of all warps of a block alike.
INLINE u64 best_of(const float* tops, const int* ids, int tiles) {
  u64 best = ~0ull;
  for (int i = threadIdx.x % 32; i < tiles; i += 32) best = min(best, place_of(tops[i], ids[i]));
  return warp_min(best);
}
INLINE View view_of(const Tables& t, const Sampled& c, double temperature) {
  const bool adjusted = c.flags & ADJUST;
  const float* tops = (adjusted ? t.adjusted_tops : t.tops) + (long)c.index * t.tiles;
  const int* ids = (adjusted ? t.adjusted_ids : t.top_ids) + (long)c.index * t.tiles;
  const u64 best = best_of(tops, ids, t.tiles);
  const float top = logit_of(best >> 32);
  return {(adjusted ? t.adjusted : t.logits) + (long)c.index * t.vocab, t.vocab, top, inverse_of(temperature), best};
}

// Philox4x32-10, as the CPU's uniform_of has it: draws 0 to 3 of a position, numbers of 24 bits.
INLINE u32 uniform24(u64 seed, int choice, int position, int draw) {
  u32 c0 = position, c1 = choice, c2 = draw >> 2, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 wide0 = (u64)0xD2511F53u * c0, wide1 = (u64)0xCD9E8D57u * c2;
    const u32 n0 = (u32)(wide1 >> 32) ^ c1 ^ k0, n2 = (u32)(wide0 >> 32) ^ c3 ^ k1;
    c1 = (u32)wide1, c3 = (u32)wide0, c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (draw % 4 == 0 ? c0 : draw % 4 == 1 ? c1 : draw % 4 == 2 ? c2 : c3) >> 8;
}
