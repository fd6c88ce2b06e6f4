"""QK norm per head, rope, and keys and values into the cache, summing the products' splits on the way."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.reduce import load_sum

LAYER_NORM = tl.constexpr(2)


@triton.jit
def rotate(
    product, splits_stride, row_stride, bias, query, keys, values, key_scales, value_scales,
    slots, positions, cosine, sine, query_norm, key_norm, query_norm_bias, key_norm_bias, eps, key_at, value_at,
    query_stride,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, PADDED_HEAD: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr, BLOCK_SIZE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """One head of one token. Grid: tokens, heads + 2 * KV heads.

    `product` has a row's query, key and value side by side, at columns 0, `key_at` and `value_at`. A slot of -1 (a
    padded token) writes nothing to the cache.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query, is_value = part < HEADS, part >= HEADS + KV_HEADS
    head = part if is_query else (part - HEADS - KV_HEADS if is_value else part - HEADS)
    base = head * HEAD + (0 if is_query else (value_at if is_value else key_at))
    dims = tl.arange(0, PADDED_HEAD)
    inside = dims < HEAD
    x = load_sum(product, bias, token * row_stride, base + dims, inside, splits_stride, SPLITS, BIAS)
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner, angle = dims ^ 1, dims // 2
        sign = tl.where(dims % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(dims < half, dims + half, dims - half)
        angle = tl.where(dims < half, dims, dims - half)
        sign = tl.where(dims < half, -1.0, 1.0)
    turns = inside & (dims < ROTARY)
    if not is_value:
        y = x
        if ROTARY > 0:
            y = load_sum(product, bias, token * row_stride, base + partner, turns, splits_stride, SPLITS, BIAS)
        if NORM > 0:
            weights = query_norm if is_query else key_norm
            mean = 0.0
            if NORM == LAYER_NORM:
                mean = tl.sum(x, axis=0) / HEAD
            centred = tl.where(inside, x - mean, 0.0)
            scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / HEAD + eps)
            x = centred * scale * tl.load(weights + dims, mask=inside, other=0.0)
            y = (y - mean) * scale * tl.load(weights + partner, mask=turns, other=0.0)
            if NORM_BIAS:
                biases = query_norm_bias if is_query else key_norm_bias
                x += tl.load(biases + dims, mask=inside, other=0.0)
                y += tl.load(biases + partner, mask=turns, other=0.0)
        if ROTARY > 0:
            place = tl.load(positions + token).to(tl.int64) * half + angle
            c = tl.load(cosine + place, mask=turns, other=1.0)
            s = tl.load(sine + place, mask=turns, other=0.0)
            x = x * c + tl.where(turns, sign * y, 0.0) * s
    if is_query:
        tl.store(query + token * query_stride + base + dims, x, mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            at = (slot // BLOCK_SIZE).to(tl.int64) * KV_HEADS * BLOCK_SIZE + head * BLOCK_SIZE + slot % BLOCK_SIZE
            cache = values if is_value else keys
            if INT8:
                groups: tl.constexpr = (HEAD + 31) // 32
                pieces = tl.reshape(tl.where(inside, x, 0.0), [PADDED_HEAD // 32, 32])
                scale = (tl.max(tl.abs(pieces), axis=1) / 127.0).to(tl.float16)
                wide = tl.where(scale > 0.0, scale, 1.0).to(tl.float32)
                codes = tl.minimum(tl.maximum(tl.floor(pieces / wide[:, None] + 0.5), -127.0), 127.0)
                scales = value_scales if is_value else key_scales
                group = tl.arange(0, PADDED_HEAD // 32)
                tl.store(scales + at * groups + group, scale, mask=group < groups)
                tl.store(cache + at * HEAD + dims, tl.reshape(codes, [PADDED_HEAD]).to(tl.int8), mask=inside)
            else:
                tl.store(cache + at * HEAD + dims, x, mask=inside)
