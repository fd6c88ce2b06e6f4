// Rows of one token each. The copy engine brings states of a block's next heads, and takes away those before, while one
// head's is advanced in place: one warp asks for copies, four make what tokens bring, eight hold a state in registers.
// There a warp has 16 keys, of which a lane has four columns. What a ring keeps of the token is written here: its place
// is none that is read, since a ring has room for one token more than a convolution sees and may be replayed. Heads go
// through norm and gate, as halves in the order in which the next matmul reads them, or are left as they are.
// Defined around it, beside what tiles.cu has: LENGTH (of the convolution) RING WIDTH (of a ring: tokens, columns)
// SLOTS (states in shared memory).

constexpr int STATE = HEAD * HEAD, STATE_BYTES = STATE * 4;
constexpr int GATES = CHANNELS + VALUE_HEADS * HEAD;  // the first column of betas
constexpr int HOLDERS = 8, MAKERS = 4, KEYS = HEAD / HOLDERS;  // warps, and keys of one
constexpr int FIRST = 1, LAST = 2, KNOWN = 4, CERTAIN = 8, END = 16;

// Where heads go. output: float [tokens, stride], before norm and gate; used where there are no `halves`. Halves are of
// what is divided by `factor`, a power of two, and cut to what a half holds.
struct Outputs {
  float* output;
  u16* halves;
  float* factors;  // [tokens]
  const float* norm_weight;
  float eps, factor, scale;
  int stride, block_tokens;
};

struct Inputs {
  const float *partials, *bias, *kernel, *decay_bias, *rate;
  float* rings;
  int splits, split_stride, token_stride;
};

// What a token brings to a head. FIRST and LAST: of a row's tokens, of which all but the last are replayed. KNOWN: a
// state is there before the first. CERTAIN: the last one counts for the state that is kept. END: no more come.
struct __align__(16) Token {
  float q[HEAD], k[HEAD], v[HEAD];
  float gate[HEAD];  // times the norm's weight, of the last
  float beta, decay, qk;  // the last: q times k
  int flags, token, head;
};

// A block's heads of rows, one after the other.
struct Heads {
  const int* recurring;
  int index, total, head, slot, token, replay, certain, position;
  INLINE Heads(const int* table, int rows) : recurring(table), index(blockIdx.x), total(rows * VALUE_HEADS) {}
  INLINE bool next() {
    for (; index < total; index += gridDim.x) {
      const int* fields = recurring + index / VALUE_HEADS * FIELDS;
      slot = load_int(fields);
      if (slot < 0) continue;
      token = load_int(fields + 1); replay = load_int(fields + 3);
      certain = load_int(fields + 4); position = load_int(fields + 5);
      head = index % VALUE_HEADS;
      index += gridDim.x;
      return true;
    }
    return false;
  }
  INLINE long state() const { return ((long)slot * VALUE_HEADS + head) * STATE; }
};

INLINE void copy_states(float* states, Heads heads, u32 full, u32 done, u32 base) {
  Heads ahead = heads;
  int loaded = 0, slot = 0, parity = 0;
  auto load = [&]() {
    if (!ahead.next()) return;
    const int to = loaded++ % SLOTS;
    barrier_expect(full + to * 8, STATE_BYTES);
    copy_bulk_once(base + to * STATE_BYTES, states + ahead.state(), STATE_BYTES, full + to * 8);
  };
  for (int s = 0; s < SLOTS; s++) load();
  wait_for_previous();
  for (bool is_first = true; heads.next(); is_first = false) {
    barrier_wait(done + slot * 8, parity);
    store_bulk(states + heads.state(), base + slot * STATE_BYTES, STATE_BYTES);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (!is_first) {  // the state before has left its slot
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      load();
    }
    if (++slot == SLOTS) { slot = 0; parity ^= 1; }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Sums of the matmul's parts of one number.
INLINE float summed(const Inputs& in, int token, int column) {
  const float* at = in.partials + (long)token * in.token_stride + column;
  float x = load_float(at);
#pragma unroll 1
  for (int s = 1; s < in.splits; s++) x += load_float(at + (long)s * in.split_stride);
  return in.bias ? x + in.bias[column] : x;
}
INLINE float silu(float x) { return x / (1.f + __expf(-x)); }
INLINE float sum_of_lanes(float x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

// Four warps, a feature a thread. Tokens go to two places in turn.
INLINE void make_tokens(const Inputs& in, const Outputs& out, Heads heads, Token* tokens, float (*sums)[MAKERS][4],
                        u32 ready, u32 free, int t) {
  int place = 0, parity = 1;
  auto hand_on = [&]() {
    __syncwarp();
    if (t % 32 == 0) barrier_arrive(ready + place * 8);
    place ^= 1;
    parity ^= place == 0;
  };
  while (heads.next()) {
    const int key_head = key_head_of(heads.head);
    const int columns[3] = {key_head * HEAD + t, (KEY_HEADS + key_head) * HEAD + t,
                            (2 * KEY_HEADS + heads.head) * HEAD + t};
    float* ring = in.rings + (long)heads.slot * (RING * WIDTH);
    const float head_bias = in.decay_bias[heads.head], head_rate = in.rate[heads.head];
    for (int offset = -heads.replay; offset <= 0; offset++) {
      const int position = heads.position + offset;
      const float* old = ring + position % RING * WIDTH;
      float newest[3], y[3] = {0.f, 0.f, 0.f}, beta, decay, gate = 0.f;
#pragma unroll
      for (int i = 0; i < 3; i++)
        newest[i] = offset < 0 ? load_float(old + columns[i]) : summed(in, heads.token, columns[i]);
      if (offset == 0 && out.halves) gate = summed(in, heads.token, CHANNELS + heads.head * HEAD + t);
      if (offset < 0) {
        beta = load_float(old + CHANNELS + heads.head);
        decay = load_float(old + CHANNELS + VALUE_HEADS + heads.head);
      } else {
        beta = summed(in, heads.token, GATES + heads.head);
        decay = summed(in, heads.token, GATES + VALUE_HEADS + heads.head);
      }
#pragma unroll
      for (int tap = 0; tap < LENGTH; tap++) {
        const int seen = position + tap - (LENGTH - 1);
#pragma unroll
        for (int i = 0; i < 3; i++) {
          float x = newest[i];
          if (tap < LENGTH - 1) x = seen >= 0 ? load_float(ring + seen % RING * WIDTH + columns[i]) : 0.f;
          y[i] += x * in.kernel[columns[i] * LENGTH + tap];
        }
      }
      const float q = silu(y[0]), k = silu(y[1]), v = silu(y[2]);
      const float parts[3] = {sum_of_lanes(q * q), sum_of_lanes(k * k), sum_of_lanes(q * k)};
      if (t % 32 == 0) *(float4*)sums[place][t / 32] = make_float4(parts[0], parts[1], parts[2], 0.f);
      asm volatile("bar.sync 1, %0;" ::"n"(MAKERS * 32) : "memory");
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < MAKERS; w++) {
        const float4 part = *(const float4*)sums[place][w];
        sum.x += part.x; sum.y += part.y; sum.z += part.z;
      }
      const float q_factor = 1.f / sqrtf(sum.x + 1e-6f), k_factor = 1.f / sqrtf(sum.y + 1e-6f);
      barrier_wait(free + place * 8, parity);
      Token& to = tokens[place];
      to.q[t] = q * q_factor;
      to.k[t] = k * k_factor;
      to.v[t] = v;
      if (out.halves) to.gate[t] = silu(gate) * out.norm_weight[t];
      if (t == 0) {
        const float x = decay + head_bias;
        to.beta = 1.f / (1.f + expf(-beta));
        to.decay = expf(head_rate * (x > 30.f ? x : log1pf(expf(x))));
        to.qk = sum.z * q_factor * k_factor;
        to.flags = (offset == -heads.replay ? FIRST : 0) | (offset == 0 ? LAST : 0) |
                   (heads.position > heads.replay ? KNOWN : 0) | (heads.certain > 0 ? CERTAIN : 0);
        to.token = heads.token;
        to.head = heads.head;
      }
      hand_on();
      if (offset < 0) continue;
      float* kept = ring + position % RING * WIDTH;
#if TILED
      const bool owns_key = heads.head < KEY_HEADS;
#else
      const bool owns_key = heads.head % (VALUE_HEADS / KEY_HEADS) == 0;
#endif
#pragma unroll
      for (int i = 0; i < 3; i++)
        if (i == 2 || owns_key) kept[columns[i]] = newest[i];
      if (t == 0) {
        kept[CHANNELS + heads.head] = beta;
        kept[CHANNELS + VALUE_HEADS + heads.head] = decay;
      }
    }
  }
  barrier_wait(free + place * 8, parity);
  if (t == 0) tokens[place].flags = END;
  hand_on();
}

INLINE void add_scaled(float4& to, float by, const float4& x) {
  to.x += by * x.x; to.y += by * x.y; to.z += by * x.z; to.w += by * x.w;
}
INLINE float4 sum_of_warps(const float4 (*parts)[32], int lane) {
  float4 sum = parts[0][lane];
#pragma unroll
  for (int w = 1; w < HOLDERS; w++) add_scaled(sum, 1.f, parts[w][lane]);
  return sum;
}

// Four neighbours of a token's head, from its column `d` on, over the head's root mean square and times the gate.
INLINE void store_gated(float4 x, const Token& token, const Outputs& out, int lane) {
  constexpr int CHUNKS = VALUE_HEADS * HEAD / 64;
  const float square_sum = sum_of_lanes(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
  const float by = 1.f / (sqrtf(square_sum / HEAD + out.eps) * out.factor);
  const float4 gate = ((const float4*)token.gate)[lane];
  auto half = [&](float value, float times) {
    const float y = value * by * times;  // NaN stays NaN
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(y > 65504.f ? 65504.f : y < -65504.f ? -65504.f : y));
    return (u32)r;
  };
  const int d = lane * 4 % 64, rows = out.block_tokens, row = token.token % rows;
  const long chunk = (long)(token.token / rows) * CHUNKS + token.head * (HEAD / 64) + lane / 16;
  u16* to = out.halves + (chunk * 8 + d % 16 / 4 * 2) * (rows * 8) + row * 8 + d / 16 * 2;
  *(u32*)to = half(x.x, gate.x) | half(x.z, gate.z) << 16;
  *(u32*)(to + rows * 8) = half(x.y, gate.y) | half(x.w, gate.w) << 16;
  if (token.head == 0 && lane == 0) out.factors[token.token] = out.factor;
}

// Eight warps. `parts`: sums of each warp's keys, known and asked, in two places in turn.
INLINE void advance(const Outputs& out, const Token* tokens, float4 (*parts)[2][HOLDERS][32], u32 full, u32 done,
                    u32 ready, u32 free, int warp, int lane) {
  float4 state[KEYS];
  int place = 0, parity = 0, slot = 0, slot_parity = 0;
  for (;; place ^= 1, parity ^= place == 0) {
    barrier_wait(ready + place * 8, parity);
    const Token& token = tokens[place];
    const int flags = token.flags;
    if (flags & END) return;
    float4* own = (float4*)(ring + slot * STATE_BYTES) + warp * KEYS * 32 + lane;
    if (flags & FIRST) {
      barrier_wait(full + slot * 8, slot_parity);
#pragma unroll
      for (int i = 0; i < KEYS; i++) state[i] = flags & KNOWN ? own[i * 32] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float4 known = make_float4(0.f, 0.f, 0.f, 0.f), asked = known;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      add_scaled(known, token.k[warp * KEYS + i], state[i]);
      add_scaled(asked, token.q[warp * KEYS + i], state[i]);
    }
    parts[place][0][warp][lane] = known;
    parts[place][1][warp][lane] = asked;
    asm volatile("bar.sync 2, %0;" ::"n"(HOLDERS * 32) : "memory");
    const float beta = token.beta, decay = token.decay;
    const float4 v = ((const float4*)token.v)[lane], sum = sum_of_warps(parts[place][0], lane);
    const float4 lacking = make_float4(beta * (v.x - decay * sum.x), beta * (v.y - decay * sum.y),
                                       beta * (v.z - decay * sum.z), beta * (v.w - decay * sum.w));
    if ((flags & LAST) && warp == 0) {
      const float4 all = sum_of_warps(parts[place][1], lane);
      const float by = out.scale * decay, of = out.scale * token.qk;
      const float4 x = make_float4(by * all.x + of * lacking.x, by * all.y + of * lacking.y,
                                   by * all.z + of * lacking.z, by * all.w + of * lacking.w);
      if (out.halves) store_gated(x, token, out, lane);
      else *((float4*)(out.output + (long)token.token * out.stride + token.head * HEAD) + lane) = x;
    }
    if (!(flags & LAST) || (flags & CERTAIN)) {
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        const float k = token.k[warp * KEYS + i];
        state[i] = make_float4(decay * state[i].x + k * lacking.x, decay * state[i].y + k * lacking.y,
                               decay * state[i].z + k * lacking.z, decay * state[i].w + k * lacking.w);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(free + place * 8);
    if (flags & LAST) {
#pragma unroll
      for (int i = 0; i < KEYS; i++) own[i * 32] = state[i];
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(done + slot * 8);
      if (++slot == SLOTS) { slot = 0; slot_parity ^= 1; }
    }
  }
}

extern "C" __global__ void __launch_bounds__((HOLDERS + MAKERS + 1) * 32, 1)
NAME(const float* partials, const float* bias, float* rings, const float* kernel, const float* decay_bias,
     const float* rate, float* states, const int* recurring, const float* norm_weight, float* output, u16* halves,
     float* factors, float scale, float eps, float factor, int stride, int block_tokens, int rows, int splits,
     int split_stride, int token_stride) {
  __shared__ __align__(16) Token tokens[2];
  __shared__ __align__(16) float sums[2][MAKERS][4];
  __shared__ __align__(16) float4 parts[2][2][HOLDERS][32];
  __shared__ __align__(8) u64 barriers[2 * SLOTS + 4];  // states that are there, and done; tokens that are, and read
  const u32 full = shared_address(barriers), done = full + SLOTS * 8, ready = done + SLOTS * 8, free = ready + 16;
  const u32 base = shared_address(ring);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  let_next_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; s++) { barrier_init(full + s * 8, 1); barrier_init(done + s * 8, HOLDERS); }
    for (int s = 0; s < 2; s++) { barrier_init(ready + s * 8, MAKERS); barrier_init(free + s * 8, HOLDERS); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == HOLDERS + MAKERS) {
    if (lane == 0) copy_states(states, Heads(recurring, rows), full, done, base);
    return;
  }
  wait_for_previous();
  const Outputs out{output, halves, factors, norm_weight, eps, factor, scale, stride, block_tokens};
  if (warp < HOLDERS) {
    advance(out, tokens, parts, full, done, ready, free, warp, lane);
  } else {
    const Inputs in{partials, bias, kernel, decay_bias, rate, rings, splits, split_stride, token_stride};
    make_tokens(in, out, Heads(recurring, rows), tokens, sums, ready, free, threadIdx.x - HOLDERS * 32);
  }
}
