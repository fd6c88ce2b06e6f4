// Reading weights in fragment order; a namespace for each format of a launch. The layout and the constants' meaning
// stand in fragments.py; defined around it, from a FragmentFormat:
//   BITS VECTOR HIGH_BITS SIGNS CODEBOOK E2M1 E4M3 SETS MINIMA SMALL (index into SMALL_*) OFFSET (float)
//   POSITION0 POSITION1 CODES_BYTES TILE_SCALE_BYTES BLOCK_BYTES SUPER_BYTES

#if VECTOR
constexpr int VECTORS = 32 / VECTOR;           // of a lane
constexpr int LOW_WORDS = VECTORS / 4;         // eight low bits of each index
constexpr int SIGN_AT = 128 * 4 * LOW_WORDS;   // offsets of planes in a block
constexpr int HIGH_AT = SIGN_AT + (SIGNS ? 512 : 0);
constexpr int HIGH_LANE_BITS = HIGH_BITS * VECTORS;
constexpr int CODE_WORDS = LOW_WORDS + 2;
#else
constexpr int CODE_WORDS = BITS;
#endif
constexpr int SCALE_WORDS = (SMALL == SMALL_F16 && MINIMA) ? 2 : 1;
constexpr bool TWO_LEVEL = SMALL != SMALL_F16 && SMALL != SMALL_F16_HIGH && BITS != 16;

// A lane's part of a tile and a chunk, as it lies in memory.
struct Raw {
  u32 codes[CODE_WORDS];
  u32 scales[SCALE_WORDS];
  u32 supers[2];
};

template <class Memory>
INLINE void read_codes(Raw& raw, const Memory& block, int tile, int lane) {
#if VECTOR
  if constexpr (LOW_WORDS == 2) {
    const uint2 low = block.read8((tile * 32 + lane) * 8);
    raw.codes[0] = low.x; raw.codes[1] = low.y;
  } else raw.codes[0] = block.read4((tile * 32 + lane) * 4);
  if constexpr (SIGNS) raw.codes[LOW_WORDS] = block.read4(SIGN_AT + (tile * 32 + lane) * 4);
  if constexpr (HIGH_LANE_BITS == 16) raw.codes[LOW_WORDS + 1] = block.read2(HIGH_AT + (tile * 32 + lane) * 2);
  if constexpr (HIGH_LANE_BITS == 8) raw.codes[LOW_WORDS + 1] = block.read1(HIGH_AT + tile * 32 + lane);
  if constexpr (HIGH_LANE_BITS == 4) raw.codes[LOW_WORDS + 1] = block.read1(HIGH_AT + tile * 16 + lane / 2) >> (lane % 2 * 4);
#else
  auto take16 = [&](int word, int at) {
    const uint4 v = block.read16(at);
    raw.codes[word] = v.x; raw.codes[word + 1] = v.y; raw.codes[word + 2] = v.z; raw.codes[word + 3] = v.w;
  };
  auto take8 = [&](int word, int at) { const uint2 v = block.read8(at); raw.codes[word] = v.x; raw.codes[word + 1] = v.y; };
  if constexpr (BITS == 16)
    for (int j = 0; j < 4; j++) take16(j * 4, tile * 2048 + j * 512 + lane * 16);
  if constexpr (BITS == 8) { take16(0, tile * 1024 + lane * 16); take16(4, tile * 1024 + 512 + lane * 16); }
  if constexpr (BITS == 4 || BITS == 5 || BITS == 6) take16(0, (tile * 32 + lane) * 16);
  if constexpr (BITS == 6) take8(4, 2048 + (tile * 32 + lane) * 8);
  if constexpr (BITS == 5) raw.codes[4] = block.read4(2048 + (tile * 32 + lane) * 4);
  if constexpr (BITS == 2 || BITS == 3) take8(0, (tile * 32 + lane) * 8);
  if constexpr (BITS == 3) raw.codes[2] = block.read4(1024 + (tile * 32 + lane) * 4);
  if constexpr (BITS == 1) raw.codes[0] = block.read4((tile * 32 + lane) * 4);
#endif
}

template <class Memory>
INLINE void read_scales(Raw& raw, const Memory& block, const Memory& supers, int tile, int lane) {
  const int g = lane >> 2, set = (lane & 3) * SETS / 4, at = CODES_BYTES + tile * TILE_SCALE_BYTES, entry = set * 8 + g;
  if constexpr (SMALL == SMALL_F16 && MINIMA) {
    const uint2 v = block.read8(at + entry * 8);
    raw.scales[0] = v.x; raw.scales[1] = v.y;
  }
  if constexpr (SMALL == SMALL_F16 && !MINIMA) raw.scales[0] = block.read4(at + entry * 4);
  if constexpr (SMALL == SMALL_U4_PAIR || SMALL == SMALL_I8 || SMALL == SMALL_F16_HIGH)
    raw.scales[0] = block.read2(at + entry * 2);
  if constexpr (SMALL == SMALL_U4_ODD) raw.scales[0] = block.read1(at + entry);
  if constexpr (TWO_LEVEL && MINIMA) {
    const uint2 v = supers.read8((tile * 8 + g) * 8);
    raw.supers[0] = v.x; raw.supers[1] = v.y;
  }
  if constexpr (TWO_LEVEL && !MINIMA) raw.supers[0] = supers.read4((tile * 8 + g) * 4);
}

// Final scales as pairs of halves: with minima pair[r] = (scale, minimum) of half r; without, pair[0] = (scale of half
// 0, scale of half 1). 0x64xx is 1024 + xx as a half.
struct Pairs { u32 pair[2]; };
INLINE Pairs scale_pairs(const Raw& raw) {
  Pairs p; p.pair[1] = 0;
  const u32 word = raw.scales[0];
  if constexpr (SMALL == SMALL_F16) { p.pair[0] = word; if constexpr (MINIMA) p.pair[1] = raw.scales[SCALE_WORDS - 1]; }
  if constexpr (SMALL == SMALL_F16_HIGH) p.pair[0] = permute(word, 0, 0x1404);
  if constexpr (SMALL == SMALL_NONE) p.pair[0] = raw.supers[0];
  if constexpr (SMALL == SMALL_U4_PAIR) {
    const u32 first = 0x64006400u | (word & 15) | ((word & 0xf0) << 12);
    const u32 second = 0x64006400u | ((word >> 8) & 15) | ((word & 0xf000) << 4);
    p.pair[0] = mul2(add2(first, 0xe400e400u), raw.supers[0]);
    p.pair[1] = mul2(add2(second, 0xe400e400u), raw.supers[1]);
  }
  if constexpr (SMALL == SMALL_I8) p.pair[0] = mul2(add2(permute(word ^ 0x8080u, 0x64646464u, 0x4140), 0xe480e480u), raw.supers[0]);
  if constexpr (SMALL == SMALL_U4_ODD) p.pair[0] = mul2(add2(0x64016401u | ((word & 15) << 1) | ((word & 0xf0) << 13), 0xe400e400u), raw.supers[0]);
  return p;
}

#if VECTOR
// Four columns of half R, as bytes of value + 128.
template <int R, int J>
INLINE u32 code_bytes(const Raw& raw, const void* table) {
  constexpr int vector = R * (VECTORS / 2) + J * 4 / VECTOR;
  u32 index = (raw.codes[vector / 4] >> (vector % 4 * 8)) & 0xff;
  if constexpr (HIGH_BITS > 0) index |= ((raw.codes[LOW_WORDS + 1] >> (vector * HIGH_BITS)) & ((1 << HIGH_BITS) - 1)) << 8;
  u32 word = __ldg((const u32*)table + (VECTOR == 8 ? index * 2 + J % 2 : index));
  if constexpr (SIGNS) {
    const u32 bits = (raw.codes[LOW_WORDS] >> (R * 16 + J * 4)) & 15, ones = (bits * 0x00204081u) & 0x01010101u;
    word = (word ^ (ones * 0xff)) + ones;
  }
  return word;
}
#elif E2M1
// Four columns of half R, times two, as bytes: those without a sign, or with NEGATIVE those with one; 0 for the others,
// as no byte of the magnitudes has its own sign bit set.
template <int R, int J, bool NEGATIVE = false>
INLINE u32 code_bytes(const Raw& raw, const void*) {
  const u32 nibbles = NEGATIVE ? raw.codes[J] ^ 0x88888888u : raw.codes[J];
  return permute_or_sign(0x03020100u, 0x0c080604u, R ? nibbles >> 16 : nibbles);
}
#else
// Codes of four columns of half R as unsigned bytes; those of affine four-bit codes of half 1 times 16.
template <int R, int J>
INLINE u32 code_bytes(const Raw& raw, const void* table) {
  if constexpr (CODEBOOK) {
    const uint4 t = __ldg((const uint4*)table);
    const u32 nibbles = R ? raw.codes[J] >> 16 : raw.codes[J], three = nibbles & 0x7777;
    return permute(permute(t.x, t.y, three), permute(t.z, t.w, three), masked_or(nibbles >> 1, 0x4444, 0x3210));
  } else if constexpr (BITS == 8) return raw.codes[R * 4 + J];
  else if constexpr (BITS == 4) return raw.codes[J] & (R ? 0xf0f0f0f0u : 0x0f0f0f0fu);
  else if constexpr (BITS == 6) return masked_or(shifted<4 - 2 * J>(raw.codes[4 + R]), 0x30303030u, shifted<-4 * R>(raw.codes[J]) & 0x0f0f0f0fu);
  else if constexpr (BITS == 5) return masked_or(shifted<4 - 4 * R - J>(raw.codes[4]), 0x10101010u, shifted<-4 * R>(raw.codes[J]) & 0x0f0f0f0fu);
  else if constexpr (BITS == 3) return masked_or(shifted<2 - 4 * R - J>(raw.codes[2]), 0x04040404u, shifted<-2 * J>(raw.codes[R]) & 0x03030303u);
  else if constexpr (BITS == 2) return shifted<-2 * J>(raw.codes[R]) & 0x03030303u;
  else return shifted<-4 * R - J>(raw.codes[0]) & 0x01010101u;
}
#endif
#define BYTES_TIMES_16 (!VECTOR && !CODEBOOK && BITS == 4)

#if E4M3
// Four bytes of e4m3 as two pairs of halves, times 2^E4M3_POWER: each pair of E4M3_NEIGHBOURS, or of bytes that are two
// apart. Cards before compute capability 8.9 have no instruction for it: bits in the places of a half are 2^-8 of the
// number.
#if __CUDA_ARCH__ >= 890
constexpr int E4M3_POWER = 0;
constexpr bool E4M3_NEIGHBOURS = true;
INLINE void e4m3_halves(u32 (&pairs)[2], u32 bytes) {
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(bytes));
}
#else
constexpr int E4M3_POWER = -8;
constexpr bool E4M3_NEIGHBOURS = false;
INLINE void e4m3_halves(u32 (&pairs)[2], u32 bytes) {
  pairs[0] = masked_or(bytes << 8, 0x80008000u, bytes << 7 & 0x3f803f80u);
  pairs[1] = masked_or(bytes, 0x80008000u, bytes >> 1 & 0x3f803f80u);
}
#endif
#endif

// Codes of columns 4 J + H and 4 J + 2 + H of half R in the two halves of a word, at bit POSITION of each.
template <int R, int J, int H>
INLINE u32 code_halves(const Raw& raw, u32 bytes) {
#if VECTOR
  return shifted<-8 * H>(bytes) & 0x00ff00ffu;
#else
  if constexpr (CODEBOOK || BITS == 8) return shifted<-8 * H>(bytes) & 0x00ff00ffu;
  else if constexpr (BITS == 4) return shifted<-8 * H>(raw.codes[J]) & (R ? 0x00f000f0u : 0x000f000fu);
  else if constexpr (BITS == 6)
    return masked_or(shifted<4 + 4 * R - 2 * J - 8 * H>(raw.codes[4 + R]), R ? 0x03000300u : 0x00300030u, shifted<-8 * H>(raw.codes[J]) & (R ? 0x00f000f0u : 0x000f000fu));
  else if constexpr (BITS == 5)
    return masked_or(shifted<4 - J - 8 * H>(raw.codes[4]), R ? 0x01000100u : 0x00100010u, shifted<-8 * H>(raw.codes[J]) & (R ? 0x00f000f0u : 0x000f000fu));
  else if constexpr (BITS == 3)
    return masked_or(shifted<2 - 4 * R - J - 8 * H>(raw.codes[2]), 0x00040004u, shifted<-2 * J - 8 * H>(raw.codes[R]) & 0x00030003u);
  else if constexpr (BITS == 2) return shifted<-2 * J - 8 * H>(raw.codes[R]) & 0x00030003u;
  else return shifted<1 - 4 * R - J - 8 * H>(raw.codes[0]) & 0x00020002u;
#endif
}

// The A operand of the tensor cores: four K steps of 16 of a tile, as halves.
INLINE void decode(u32 (&a)[4][4], const Raw& raw, const void* table) {
#if BITS == 16
#pragma unroll
  for (int i = 0; i < 16; i++) a[i / 4][i % 4] = raw.codes[i];
#else
  const Pairs p = scale_pairs(raw);
  u32 s0 = permute(p.pair[0], 0, 0x1010), s1, m0, m1;
  if constexpr (MINIMA) { m0 = permute(p.pair[0], 0, 0x3232); s1 = permute(p.pair[1], 0, 0x1010); m1 = permute(p.pair[1], 0, 0x3232); }
  else {
    s1 = permute(p.pair[0], 0, 0x3232);
    m0 = m1 = 0;
    if constexpr (OFFSET != 0.f) {
      constexpr u32 sign = 0x80008000u;
      m0 = mul2(s0, half_power(log2_of(OFFSET) + POSITION0 - 24) | sign);
      m1 = mul2(s1, half_power(log2_of(OFFSET) + POSITION1 - 24) | sign);
    }
  }
#if E4M3
  if constexpr (E4M3_POWER != -8) { s0 = mul2(s0, half_power(-8)); s1 = mul2(s1, half_power(-8)); }
#endif
  auto step = [&](auto j) {
    constexpr int J = decltype(j)::value;
#if E2M1
    // The upper byte of a half: the sign, then the lowest two bits of the exponent and the highest of the mantissa.
    const u32 w = raw.codes[J];
    const u32 even = masked_or(w << 4, 0x80808080u, (w << 1) & 0x0e0e0e0eu);
    const u32 odd = masked_or(w, 0x80808080u, (w >> 3) & 0x0e0e0e0eu);
    a[J][0] = mul2(permute(even, 0, 0x1404), s0);
    a[J][1] = mul2(permute(even, 0, 0x3424), s1);
    a[J][2] = mul2(permute(odd, 0, 0x1404), s0);
    a[J][3] = mul2(permute(odd, 0, 0x3424), s1);
#elif E4M3
    constexpr u32 APART = E4M3_NEIGHBOURS ? 0x3120 : 0x3210;
    u32 own[2], other[2];  // columns that are two apart
    e4m3_halves(own, permute(raw.codes[J], 0, APART));
    e4m3_halves(other, permute(raw.codes[4 + J], 0, APART));
    a[J][0] = mul2(own[0], s0);
    a[J][1] = mul2(other[0], s1);
    a[J][2] = mul2(own[1], s0);
    a[J][3] = mul2(other[1], s1);
#else
    u32 low = 0, high = 0;
    if constexpr (VECTOR || CODEBOOK || BITS == 8) { low = code_bytes<0, J>(raw, table); high = code_bytes<1, J>(raw, table); }
    a[J][0] = fma2(code_halves<0, J, 0>(raw, low), s0, m0);
    a[J][1] = fma2(code_halves<1, J, 0>(raw, high), s1, m1);
    a[J][2] = fma2(code_halves<0, J, 1>(raw, low), s0, m0);
    a[J][3] = fma2(code_halves<1, J, 1>(raw, high), s1, m1);
#endif
  };
  step(Index<0>{}); step(Index<1>{}); step(Index<2>{}); step(Index<3>{});
#endif
}

// Byte offset of a chunk's block within 64 rows, and of its super-scales.
INLINE long block_at(int chunk) { return (long)chunk * BLOCK_BYTES + (TWO_LEVEL ? (long)(chunk >> 2) * SUPER_BYTES : 0); }
INLINE long supers_at(int chunk) { return (long)((chunk >> 2) + 1) * (4 * BLOCK_BYTES) + (long)(chunk >> 2) * SUPER_BYTES; }
INLINE long strip_bytes(int chunks) { return block_at(chunks); }
