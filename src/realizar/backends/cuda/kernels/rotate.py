"""QK norm per head, rope, and keys and values into the cache, summing the products' splits on the way."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.activation import round_even
from realizar.backends.cuda.kernels.dependent import begin

LAYER_NORM = tl.constexpr(2)


@triton.jit
def load_heads(product, bias, at, columns, mask, splits_stride, SPLITS: tl.constexpr, BIAS: tl.constexpr):
    """float32 [heads, dims]: the splits summed, plus the bias."""
    total = tl.load(product + at + columns, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(product + at + columns + split * splits_stride, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0)
    return total


@triton.jit
def norm_vector(query_values, key_values, is_query, at, mask):
    """float32 [heads, dims] of the queries' vector or the keys'."""
    queries = tl.load(query_values + at, mask=mask & is_query, other=0.0)
    return queries + tl.load(key_values + at, mask=mask & ~is_query, other=0.0)


@triton.jit
def rotate(
    product, splits_stride, row_stride, bias, query, keys, values, key_scales, value_scales, slots, positions,
    cosine, sine, query_norm, key_norm, query_norm_bias, key_norm_bias, eps, key_at, value_at, query_stride,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr, INT8: tl.constexpr, DEPENDENT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """PARTS heads of one token: queries, then keys, then values. Grid: tokens, blocks of heads.

    `product` has a row's query, key and value side by side, at columns 0, `key_at` and `value_at`. A slot of -1 (a
    padded token) writes nothing to the cache.
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = (tl.program_id(1) * PARTS + tl.arange(0, PARTS))[:, None]
    dims = tl.arange(0, PADDED_HEAD)[None, :]
    is_query, is_value = part < HEADS, part >= HEADS + KV_HEADS
    head = part - tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    base = head * HEAD + tl.where(is_query, 0, tl.where(is_value, value_at, key_at))
    own = part < HEADS + 2 * KV_HEADS
    inside = own & (dims < HEAD)
    at = token * row_stride
    x = load_heads(product, bias, at, base + dims, inside, splits_stride, SPLITS, BIAS)
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner, angle = dims ^ 1, dims // 2
        sign = tl.where(dims % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(dims < half, dims + half, dims - half)
        angle = tl.where(dims < half, dims, dims - half)
        sign = tl.where(dims < half, -1.0, 1.0)
    turns = inside & (dims < ROTARY) & ~is_value
    y = x
    if ROTARY > 0:
        y = load_heads(product, bias, at, base + partner, turns, splits_stride, SPLITS, BIAS)
    if NORM > 0:
        mean = tl.zeros([PARTS, 1], tl.float32)
        if NORM == LAYER_NORM:
            mean += (tl.sum(x, axis=1) / HEAD)[:, None]
        centred = tl.where(inside, x - mean, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / HEAD + eps)[:, None]
        normed = inside & ~is_value
        weight = norm_vector(query_norm, key_norm, is_query, dims, normed)
        x = tl.where(is_value, x, centred * scale * weight)
        y = (y - mean) * scale * norm_vector(query_norm, key_norm, is_query, partner, turns)
        if NORM_BIAS:
            x += norm_vector(query_norm_bias, key_norm_bias, is_query, dims, normed)
            y += norm_vector(query_norm_bias, key_norm_bias, is_query, partner, turns)
    if ROTARY > 0:
        place = tl.load(positions + token).to(tl.int64) * half + angle
        c = tl.load(cosine + place, mask=turns, other=1.0)
        s = tl.load(sine + place, mask=turns, other=0.0)
        x = x * c + tl.where(turns, sign * y, 0.0) * s
    tl.store(query + token * query_stride + base + dims, x, mask=inside & is_query)
    slot = tl.load(slots + token)
    if slot >= 0:
        row = (slot // BLOCK_SIZE).to(tl.int64) * KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE + head * BLOCK_SIZE
        if INT8:
            groups: tl.constexpr = (HEAD + 31) // 32
            pieces = tl.reshape(tl.where(inside, x, 0.0), [PARTS, PADDED_HEAD // 32, 32])
            cache_scale = (tl.max(tl.abs(pieces), axis=2) / 127.0).to(tl.float16)
            wide = tl.where(cache_scale > 0.0, cache_scale, 1.0).to(tl.float32)
            codes = tl.minimum(tl.maximum(round_even(pieces / wide[:, :, None]), -127.0), 127.0)
            group = tl.arange(0, PADDED_HEAD // 32)[None, :]
            live = own & (group < groups)
            tl.store(key_scales + row * groups + group, cache_scale, mask=live & ~is_query & ~is_value)
            tl.store(value_scales + row * groups + group, cache_scale, mask=live & is_value)
            x = tl.reshape(codes, [PARTS, PADDED_HEAD])
        tl.store(keys + row * HEAD + dims, x.to(keys.dtype.element_ty), mask=inside & ~is_query & ~is_value)
        tl.store(values + row * HEAD + dims, x.to(values.dtype.element_ty), mask=inside & is_value)
