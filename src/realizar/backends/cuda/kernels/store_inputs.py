"""Writing a token's activations as the input of the next matmul, in each of the formats of `layouts.activations`."""

import triton
import triton.language as tl

PLAIN, SCALED, INT8, HALF, NOTHING, FP8 = (tl.constexpr(i) for i in range(6))


@triton.jit
def round_even(x):
    """The nearest integer, of two the even one, as float32; |x| below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def token_factor(largest):
    """The power of two that a token is divided by, its `token_scales` entry in `layouts.activations`."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 126
    low = tl.where((exponent < -8) & (exponent > -100), exponent + 4, 0)
    shift = tl.where(exponent > 14, exponent - 14, low)
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_code(x):
    """Bytes of the nearest e4m3, of two the even one, or of 448. By hand: the interpreter's are wrong."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    tiny = size < 0x3C800000  # below the least normal, 2^-6, steps are of 2^-9
    steps = round_even(tl.where(tiny, tl.abs(x), 0.0) * 512.0).to(tl.int32)
    code = tl.minimum(tl.where(tiny, steps, normal), 0x7E)
    code = tl.where(size > 0x7F800000, 0x7F, code)  # a NaN stays one
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fp8_value(code):
    """float32 of bytes of e4m3: in the places of a half they are 2^-8 of it, and bit 14 repeats the sign.

    A NaN has all ones behind its sign; one more in its last place carries into bit 14, as a half's NaN has it.
    """
    word = (code.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
    word = word | ((word + 0x80) & 0x4000)
    return word.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def store_int8(x, token, first, limit, codes, terms, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """x [BLOCK] as the columns from `first` to `limit`: codes, and per 16 their scale and scaled sum."""
    groups = tl.reshape(x, [BLOCK // 16, 16])
    scale = tl.max(tl.abs(groups), axis=1) / 127.0
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    rounded = round_even(groups * inverse[:, None])
    columns = first + tl.arange(0, BLOCK)
    code = tl.reshape(rounded, [BLOCK]).to(tl.int8)
    tl.store(codes + token * (CHUNKS * 64) + columns, code, mask=columns < limit)
    both = tl.reshape(tl.join(scale, tl.sum(rounded, axis=1) * scale), [BLOCK // 8])
    place = first // 8 + tl.arange(0, BLOCK // 8)
    tl.store(terms + token * (CHUNKS * 8) + place, both, mask=place < limit // 8)


@triton.jit
def store_half(
    x, token, first, limit, values, CHUNKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x [BLOCK] as the columns from `first` to `limit`, in the tensor cores' order: eight runs of eight a chunk."""
    split = tl.reshape(x, [BLOCK // 64, 4, 4, 2, 2])
    ordered = tl.reshape(tl.permute(split, (0, 2, 4, 1, 3)), [BLOCK])
    index = tl.arange(0, BLOCK)
    core, place = index % 64 // 8, index % 8
    column = first + index // 64 * 64 + place // 2 * 16 + core // 2 * 4 + place % 2 * 2 + core % 2
    chunk = token // BLOCK_TOKENS * CHUNKS + first // 64 + index // 64
    at = (chunk * 8 + core) * BLOCK_TOKENS + token % BLOCK_TOKENS
    tl.store(values + at * 8 + place, ordered.to(tl.float16), mask=column < limit)


@triton.jit
def store_fp8(
    x, token, first, limit, codes, scales, CHUNKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x [BLOCK] as the columns from `first` to `limit`, multiples of 128, in the order of `layouts.activations`."""
    groups = tl.reshape(x, [BLOCK // 128, 128])
    scale = tl.maximum(tl.max(tl.abs(groups), axis=1), 1e-30) / 448.0
    code = fp8_code(tl.reshape(groups / scale[:, None], [BLOCK]))
    index = tl.arange(0, BLOCK)
    row = token % BLOCK_TOKENS
    chunk = token // BLOCK_TOKENS * ((CHUNKS + 1) // 2 * 2) + first // 64 + index // 64
    at = (chunk * 4 + index % 64 // 16) * BLOCK_TOKENS + row
    tl.store(codes + at * 16 + index % 16, code, mask=first + index < limit)
    group = token // BLOCK_TOKENS * ((CHUNKS + 1) // 2) + first // 128 + tl.arange(0, BLOCK // 128)
    place = row // 16 * 16 + row % 8 // 2 * 4 + row % 16 // 8 * 2 + row % 2
    inside = first + tl.arange(0, BLOCK // 128) * 128 < limit
    tl.store(scales + group * BLOCK_TOKENS + place, scale, mask=inside)


@triton.jit
def half_places(token, column, dims, block_tokens, chunks):
    """Where the columns column + dims of tokens lie among halves in the tensor cores' order: int32 [tokens, dims].

    token, column: [tokens]; `column` and the number of dims are multiples of 64, or powers of two below.
    """
    token = token.to(tl.int32)
    first = (token // block_tokens * chunks + column // 64) * 8 * (block_tokens // 8) + token % block_tokens // 8
    first = first * 64 + token % 8 * 8 + column % 64 // 16 * 2
    core = dims // 64 * 8 + dims % 16 // 4 * 2 + dims % 2
    return first[:, None] + (core * (block_tokens // 8) * 64 + dims % 64 // 16 * 2 + dims % 4 // 2)[None, :]


@triton.jit
def store_values(
    x, token, first, width, values, value_stride, codes, terms, FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write float32 x [BLOCK] as the columns from `first` on of a token of `width` columns; x is 0 beyond.

    PLAIN, SCALED: in the type of `values`, token after token. INT8, HALF, FP8: the matmuls' own formats, of CHUNKS * 64
    columns, to the end of the chunk in which `width` lies. NOTHING writes nothing.
    """
    token = token.to(tl.int64)
    limit = (width + 63) // 64 * 64
    if FORMAT == INT8:
        store_int8(x, token, first, limit, codes, terms, CHUNKS, BLOCK)
    elif FORMAT == HALF:
        store_half(x, token, first, limit, values, CHUNKS, BLOCK_TOKENS, BLOCK)
    elif FORMAT == FP8:
        store_fp8(x, token, first, limit, codes, terms, CHUNKS, BLOCK_TOKENS, BLOCK)
    elif FORMAT != NOTHING:
        columns = first + tl.arange(0, BLOCK)
        tl.store(values + token * value_stride + columns, x, mask=columns < width)


@triton.jit
def store_token(
    x, token, width, values, value_stride, value_scale, codes, terms, FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a whole token by one program. SCALED and HALF divide it by a power of two, which `value_scale` gets."""
    if FORMAT == SCALED or FORMAT == HALF:
        factor = token_factor(tl.max(tl.abs(x), axis=0))
        tl.store(value_scale + token, factor)
        x = x / factor
    store_values(x, token, 0, width, values, value_stride, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK)


@triton.jit
def token_complete(x, token, value_scale, token_tops, token_arrivals, FORMAT: tl.constexpr):
    """Count a stored block of a token; returns the divisor that the token still needs, where this was its last block.

    Nearly always, and in all blocks but the last to arrive, that is 1 and nothing is left to do. `token_tops` and
    `token_arrivals` are int32 [tokens] of zeros, and are left so: the largest value so far, as bits, and blocks done.
    """
    factor = 1.0
    if FORMAT == SCALED or FORMAT == HALF:
        tl.atomic_max(token_tops + token, tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True))
        tl.debug_barrier()
        if tl.atomic_add(token_arrivals + token, 1) == tl.num_programs(1) - 1:
            top = tl.atomic_xchg(token_tops + token, 0).to(tl.float32, bitcast=True)
            tl.atomic_xchg(token_arrivals + token, 0)
            factor = token_factor(top)
            tl.store(value_scale + token, factor)
    return factor


@triton.jit
def store_block(
    x, token, first, width, values, value_stride, value_scale, codes, terms, token_tops, token_arrivals,
    FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block of a token; returns the divisor that it still needs, as `token_complete`."""
    store_values(x, token, first, width, values, value_stride, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK)
    return token_complete(x, token, value_scale, token_tops, token_arrivals, FORMAT)
