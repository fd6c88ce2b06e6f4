"""Attention of single tokens from the QKV matmul to the output projection's input, in one kernel.

A program has one token, one KV head and one part of the context. It norms and rotates the queries itself; the program
of the last part also makes the new key and value, and takes them from its registers, unless the cache has them. Where
a context is cut, the program that finishes last combines the parts, always in their order.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.attend import absorb, cap_scores, cut_context, load_tile
from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.heads import rotated_heads, store_heads
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.store_inputs import HALF, INT8, store_values

COMBINED_AT_ONCE = tl.constexpr(8192)  # values of parts, in registers


@triton.jit
def write_heads(
    x, token, kv_head, values, value_stride, value_scale, codes, terms, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, PADDED_HEAD: tl.constexpr, FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """x float32 [SIZE]: a KV head's queries, PADDED_HEAD values each, and whatever comes after them.

    INT8 and HALF: HEAD is PADDED_HEAD. A half row is not divided: its values are means of the cache's, and are cut to
    what a half can hold in place of becoming infinite.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    first = kv_head * group * HEAD
    if FORMAT == INT8 or FORMAT == HALF:
        if FORMAT == HALF:
            x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
            if kv_head == 0:
                tl.store(value_scale + token, 1.0)
        store_values(
            x,
            token,
            first,
            first + group * HEAD,
            values,
            value_stride,
            codes,
            terms,
            FORMAT,
            BLOCK_TOKENS,
            CHUNKS,
            SIZE,
        )
    else:
        place = tl.arange(0, SIZE)
        head, dim = place // PADDED_HEAD, place % PADDED_HEAD
        at = values + token * value_stride + first + head * HEAD + dim
        tl.store(at, x, mask=(head < group) & (dim < HEAD))


@triton.jit
def combined_heads(
    partial, state, sinks, decode, kv_head, parts, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """float32 [SIZE]: the parts of a KV head's queries combined, with their sinks; layout as in `write_heads`."""
    group: tl.constexpr = HEADS // KV_HEADS
    at_once: tl.constexpr = max(1, COMBINED_AT_ONCE // SIZE)
    place = tl.arange(0, SIZE)
    shared, dim = place // PADDED_HEAD, place % PADDED_HEAD
    inside = (shared < group) & (dim < HEAD)
    head = kv_head * group + shared
    top = tl.full([SIZE], float("-inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    sums = tl.zeros([SIZE], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=inside, other=0.0)
        total += 1.0
    for start in tl.range(0, (parts + at_once - 1) // at_once):
        part = start * at_once + tl.arange(0, at_once)
        live = (part < parts)[:, None] & inside[None, :]
        at = (decode * PARTS + part)[:, None] * HEADS + head[None, :]
        tops = tl.load(state + at * 2, mask=live, other=float("-inf"))
        totals = tl.load(state + at * 2 + 1, mask=live, other=0.0)
        found = tl.load(partial + at * HEAD + dim[None, :], mask=live, other=0.0)
        higher = tl.maximum(top, tl.max(tops, axis=0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(tops - reference[None, :])
        kept = tl.exp(top - reference)
        total = total * kept + tl.sum(weights * totals, axis=0)
        sums = sums * kept + tl.sum(weights * found, axis=0)
        top = higher
    return sums / tl.where(total > 0.0, total, 1.0)


@launched
def attend_decode(
    partials, splits_stride, token_stride, bias, positions, cosine, sine, query_scales, query_norm, key_norm,
    query_norm_bias, key_norm_bias, eps, value_eps, key_at, value_at, keys, values, key_scales, value_scales, slots,
    sinks, partial, state, arrivals, decodes, tables, table_stride, scale, soft_cap,
    out, out_stride, out_scale, codes, terms,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr,
    VALUE_NORM: tl.constexpr, GROWTH: tl.constexpr, STORED: tl.constexpr, PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, INT8_CACHE: tl.constexpr, TABLE_ROWS: tl.constexpr, CACHE_GROUP: tl.constexpr,
    SHARED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, COMPUTE: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, COMBINED: tl.constexpr, FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token of a row against one part of its context. Grid: decodes, KV heads, PARTS.

    `decodes` int32 [decodes, 4]: row (-1 is none), token, length of the context, position. SHARED: the queries of a KV
    head, the new key and value, padded. STORED: the cache has the new key and value, and there are queries alone. Parts
    beyond what the context fills do nothing. Through float32 `partial` [decodes, PARTS, heads, head size] (not divided)
    and `state` [decodes, PARTS, heads, 2] (largest score, sum of weights) go those of a context of several parts;
    `arrivals` int32 [decodes, KV heads] counts them, is 0 and left so.
    The result goes to the token's row of `out`.
    """
    begin(DEPENDENT)
    decode, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.load(decodes + decode * 4)
    length = tl.where(row >= 0, tl.load(decodes + decode * 4 + 2), 0)
    first, low, blocks, each = cut_context(length, WINDOW, KEYS, PARTS)
    parts = (blocks + each - 1) // each
    if part < parts:
        token, stride = tl.load(decodes + decode * 4 + 1).to(tl.int64), tl.load(table_stride)
        shared = tl.arange(0, SHARED)
        index, dims = shared[:, None], tl.arange(0, PADDED_HEAD)
        newest = (part == parts - 1) & (not STORED)  # the part that ends with the token itself
        is_key, is_value = newest & (index == group), newest & (index == group + 1)
        place = tl.where(index < group, kv_head * group + index, HEADS + (index - group) * KV_HEADS + kv_head)
        x, _ = rotated_heads(
            partials, splits_stride, token_stride, bias, positions, cosine, sine, query_scales, query_norm, key_norm,
            query_norm_bias, key_norm_bias, eps, value_eps, key_at, value_at, token, place,
            (index < group) | is_key | is_value, dims[None, :], SPLITS, BIAS, HEADS, KV_HEADS, HEAD, ROTARY,
            INTERLEAVED, NORM, NORM_BIAS, VALUE_NORM, GROWTH,
        )  # fmt: skip
        slot = tl.load(slots + token)
        held = store_heads(
            x, keys, values, key_scales, value_scales, slot, index * 0 + kv_head, is_key & (slot >= 0),
            is_value & (slot >= 0), dims[None, :], KV_HEADS, HEAD, PADDED_HEAD, BLOCK_SIZE, INT8_CACHE, SHARED,
        ).to(COMPUTE).to(tl.float32)  # fmt: skip
        q = tl.where(index < group, x, 0.0).to(COMPUTE)
        score = tl.sum(q.to(tl.float32) * tl.sum(tl.where(is_key, held, 0.0), axis=0)[None, :], axis=1) * scale
        if SOFT_CAP:
            score = cap_scores(score, soft_cap)
        top = tl.where(newest, score, float("-inf"))
        total = tl.where(newest, 1.0, 0.0) + tl.zeros([SHARED], tl.float32)
        sums = tl.sum(tl.where(is_value, held, 0.0), axis=0)[None, :] + tl.zeros([SHARED, PADDED_HEAD], tl.float32)
        table = tables + (CACHE_GROUP * TABLE_ROWS + row) * stride
        start = part * each
        for i in tl.range(0, tl.minimum(blocks - start, each)):
            places = low + (start + i) * KEYS + tl.arange(0, KEYS)
            live = (places < (length if STORED else length - 1)) & (places >= first)
            block = tl.load(table + places // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            at = (block * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
            k = load_tile(keys, key_scales, at, live, dims, HEAD, INT8_CACHE, COMPUTE)
            v = load_tile(values, value_scales, at, live, dims, HEAD, INT8_CACHE, COMPUTE)
            top, total, sums = absorb(q, k, v, live[None, :], top, total, sums, scale, soft_cap, SOFT_CAP, COMPUTE)
        if parts == 1:
            if SINKS:
                sink = tl.load(sinks + kv_head * group + shared, mask=shared < group, other=0.0)
                higher = tl.maximum(top, sink)
                kept = tl.exp(top - higher)
                total = total * kept + tl.exp(sink - higher)
                sums = sums * kept[:, None]
            whole = tl.reshape(sums / tl.where(total > 0.0, total, 1.0)[:, None], [SHARED * PADDED_HEAD])
            write_heads(
                whole, token, kv_head, out, out_stride, out_scale, codes, terms, HEADS, KV_HEADS, HEAD, PADDED_HEAD,
                FORMAT, BLOCK_TOKENS, CHUNKS, SHARED * PADDED_HEAD,
            )  # fmt: skip
        else:
            at = (decode * PARTS + part) * HEADS + kv_head * group + shared
            tl.store(state + at * 2, top, mask=shared < group)
            tl.store(state + at * 2 + 1, total, mask=shared < group)
            inside = (shared < group)[:, None] & (dims < HEAD)[None, :]
            tl.store(partial + at[:, None] * HEAD + dims[None, :], sums, mask=inside)
            tl.debug_barrier()
            arrived = arrivals + decode * KV_HEADS + kv_head
            if tl.atomic_add(arrived, 1) == parts - 1:
                tl.atomic_xchg(arrived, 0)
                whole = combined_heads(
                    partial, state, sinks, decode, kv_head, parts, HEADS, KV_HEADS, HEAD, PADDED_HEAD, SINKS, PARTS,
                    COMBINED,
                )  # fmt: skip
                write_heads(
                    whole, token, kv_head, out, out_stride, out_scale, codes, terms, HEADS, KV_HEADS, HEAD,
                    PADDED_HEAD, FORMAT, BLOCK_TOKENS, CHUNKS, COMBINED,
                )  # fmt: skip
