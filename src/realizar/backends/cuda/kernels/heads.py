"""Heads of a token's query, key and value: summed from the matmul's splits, normed, rotated by rope, rounded."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.reduce import load_sum
from realizar.backends.cuda.kernels.store_inputs import fp8_code, fp8_value, round_even

LAYER_NORM = tl.constexpr(2)
GROUP = tl.constexpr(32)  # values of a cache in int8 that share a scale


@triton.jit
def norm_vector(query_values, key_values, is_query, at, mask):
    """float32 [heads, dims] of the queries' vector or the keys'."""
    queries = tl.load(query_values + at, mask=mask & is_query, other=0.0)
    return queries + tl.load(key_values + at, mask=mask & ~is_query, other=0.0)


@triton.jit
def rotated_heads(
    partials, splits_stride, token_stride, bias, positions, cosine, sine, query_scales, query_norm, key_norm,
    query_norm_bias, key_norm_bias, eps, value_eps, key_at, value_at, token, part, own, dims,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr,
    VALUE_NORM: tl.constexpr, GROWTH: tl.constexpr,
):  # fmt: skip
    """float32 [parts, dims]: some of a token's heads as attention takes them; and their columns.

    Values are as they are, or with VALUE_NORM divided by their root mean square. With GROWTH queries are multiplied by
    the factor of their position in `query_scales`, float32 [context length].
    `part` int [parts, 1] counts queries, then keys, then values; of those that are not `own` all is 0. A row of
    `partials` has query, key and value side by side, at columns 0, `key_at` and `value_at`, and the places of bounds
    are theirs. dims: int [1, dims].
    """
    is_query, is_value = part < HEADS, part >= HEADS + KV_HEADS
    head = part - tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    base = head * HEAD + tl.where(is_query, 0, tl.where(is_value, value_at, key_at))
    inside = own & (dims < HEAD)
    at = token * token_stride
    matrix = tl.where(is_query, 0, tl.where(is_value, 2, 1))
    x = load_sum(partials, bias, at, base + dims, inside, splits_stride, SPLITS, BIAS, matrix)
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner, angle = dims ^ 1, dims // 2
        sign = tl.where(dims % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(dims < half, dims + half, dims - half)
        angle = tl.where(dims < half, dims, dims - half)
        sign = tl.where(dims < half, -1.0, 1.0)
    rotates = inside & (dims < ROTARY) & ~is_value
    if VALUE_NORM:
        value_scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD + value_eps)[:, None]
    y = x
    if ROTARY > 0:
        y = load_sum(partials, bias, at, base + partner, rotates, splits_stride, SPLITS, BIAS, matrix)
    if NORM > 0:
        mean = tl.sum(x, axis=1)[:, None] * (1.0 / HEAD if NORM == LAYER_NORM else 0.0)
        centred = tl.where(inside, x - mean, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / HEAD + eps)[:, None]
        normed = inside & ~is_value
        weight = norm_vector(query_norm, key_norm, is_query, dims, normed)
        x = tl.where(is_value, x, centred * scale * weight)
        y = (y - mean) * scale * norm_vector(query_norm, key_norm, is_query, partner, rotates)
        if NORM_BIAS:
            x += norm_vector(query_norm_bias, key_norm_bias, is_query, dims, normed)
            y += norm_vector(query_norm_bias, key_norm_bias, is_query, partner, rotates)
    if VALUE_NORM:
        x = tl.where(is_value, x * value_scale, x)
    if ROTARY > 0:
        place = tl.load(positions + token).to(tl.int64) * half + angle
        c = tl.load(cosine + place, mask=rotates, other=1.0)
        s = tl.load(sine + place, mask=rotates, other=0.0)
        x = x * c + tl.where(rotates, sign * y, 0.0) * s
    if GROWTH:
        x = tl.where(is_query, x * tl.load(query_scales + tl.load(positions + token)), x)
    return x, base + dims


@triton.jit
def store_heads(
    x, keys, values, key_scales, value_scales, slot, head, is_key, is_value, dims,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PADDED_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    INT8: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the keys and values among heads [PARTS, dims] into a slot of the cache; float32 of what it then holds."""
    row = (slot // BLOCK_SIZE).to(tl.int64) * KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE + head * BLOCK_SIZE
    inside = dims < HEAD
    if INT8:
        groups: tl.constexpr = (HEAD + GROUP - 1) // GROUP
        blocks = tl.reshape(tl.where(inside, x, 0.0), [PARTS, PADDED_HEAD // GROUP, GROUP])
        broken = tl.max((blocks != blocks).to(tl.int32), axis=2) > 0
        blocks = tl.where(broken[:, :, None], 0.0, blocks)
        scale = (tl.max(tl.abs(blocks), axis=2) / 127.0).to(tl.float16)
        scale = tl.where(broken, float("nan"), scale)  # so that it is seen
        wide = tl.where(scale > 0.0, scale, 1.0).to(tl.float32)
        codes = tl.minimum(tl.maximum(round_even(blocks / wide[:, :, None]), -127.0), 127.0)
        group = tl.arange(0, PADDED_HEAD // GROUP)[None, :]
        tl.store(key_scales + row * groups + group, scale, mask=is_key & (group < groups))
        tl.store(value_scales + row * groups + group, scale, mask=is_value & (group < groups))
        stored = tl.reshape(codes, [PARTS, PADDED_HEAD])
        held = tl.reshape(codes * scale.to(tl.float32)[:, :, None], [PARTS, PADDED_HEAD])
    elif keys.dtype.element_ty == tl.uint8:
        scale = tl.where(is_value, tl.load(value_scales), tl.load(key_scales))
        stored = fp8_code(x / scale)
        held = fp8_value(stored) * scale
    else:
        stored = x.to(keys.dtype.element_ty)
        held = stored.to(tl.float32)
    tl.store(keys + row * HEAD + dims, stored.to(keys.dtype.element_ty), mask=inside & is_key)
    tl.store(values + row * HEAD + dims, stored.to(values.dtype.element_ty), mask=inside & is_value)
    return held
