"""Attention of single tokens whose bits depend on their own context alone: contexts are cut at fixed places.

A part is PART keys from a multiple of PART on, in this kernel and in `attend_chunk` alike. Every part has a softmax of
its own, and parts are joined in ascending order by `join_part`, sinks before the first. So a token has the same bits as
in a chunk, however many programs share its context.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.attend import absorb_blocks, before_parts, join_part, write_result
from realizar.backends.cuda.kernels.dependent import let_next_start, wait_for_previous
from realizar.backends.cuda.kernels.launched import launched


@triton.jit
def join_parts(
    partial, state, sinks, at, head0, parts, group: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The softmax of a KV head's queries over all parts, the first of which lies at index `at`."""
    shared, dims = tl.arange(0, SHARED), tl.arange(0, PADDED_HEAD)
    own = shared < group
    inside = own[:, None] & (dims < HEAD)[None, :]
    top, total, sums = before_parts(sinks, head0 + shared, own, SINKS, SHARED, PADDED_HEAD)
    for part in tl.range(0, parts):
        place = at + part * HEADS + shared
        part_top = tl.load(state + place * 2, mask=own, other=float("-inf"))
        part_total = tl.load(state + place * 2 + 1, mask=own, other=0.0)
        part_sums = tl.load(partial + place[:, None] * HEAD + dims[None, :], mask=inside, other=0.0)
        top, total, sums = join_part(top, total, sums, part_top, part_total, part_sums)
    return total, sums


@launched
def attend_parts(
    query, keys, values, key_scales, value_scales, sinks, out, partial, state, arrivals, decodes, tables, table_stride,
    scale, soft_cap, query_stride, out_stride, values_out, value_scale, block_tokens, chunks,
    TABLE_ROWS: tl.constexpr, CACHE_GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, PADDED_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, INT8: tl.constexpr, COMPUTE: tl.constexpr, KEYS: tl.constexpr,
    QUERIES: tl.constexpr, SHARED: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, HALVES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token of a row, whose key and value the cache has. Grid: decodes, KV heads, programs that share a context.

    `decodes` int32 [decodes, 4]: row (-1 is none), token, length of the context, position. QUERIES: those of a KV head,
    padded as a matrix unit takes them; SHARED: to a power of two. Through float32 `partial` [decodes, PARTS, heads,
    head size] (not divided) and `state` [decodes, PARTS, heads, 2] (largest score, sum of weights) go the parts of a
    context that has several; `arrivals` int32 [decodes, KV heads] counts programs, is 0 and left so. Writes the result
    as `write_result`.
    """
    let_next_start(DEPENDENT)
    decode, kv_head, own_part, programs = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.load(decodes + decode * 4)
    length = tl.where(row >= 0, tl.load(decodes + decode * 4 + 2), 0)
    token, stride = tl.load(decodes + decode * 4 + 1), tl.load(table_stride)
    wait_for_previous(DEPENDENT)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    before = first // PART
    parts = (length + PART - 1) // PART - before
    if own_part < parts:
        index, dims, head0 = tl.arange(0, QUERIES), tl.arange(0, PADDED_HEAD), kv_head * group
        own = index < group
        inside = own[:, None] & (dims < HEAD)[None, :]
        position = index * 0 + length - 1
        q = tl.load(
            query + token.to(tl.int64) * query_stride + (head0 + index)[:, None] * HEAD + dims[None, :],
            mask=inside,
            other=0,
        )
        q = q.to(COMPUTE)
        table = tables + (CACHE_GROUP * TABLE_ROWS + row) * stride
        at = decode * PARTS * HEADS + head0
        for i in tl.range(0, (parts - own_part + programs - 1) // programs):
            part = own_part + i * programs
            begins = (before + part) * PART
            part_top, part_total, part_sums = absorb_blocks(
                q, keys, values, key_scales, value_scales, table, kv_head, position, position,
                tl.maximum(begins, first // KEYS * KEYS), first, tl.minimum(begins + PART, length),
                tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32),
                tl.zeros([QUERIES, PADDED_HEAD], tl.float32), scale, soft_cap, KV_HEADS, HEAD, PADDED_HEAD, BLOCK_SIZE,
                WINDOW, SOFT_CAP, INT8, COMPUTE, KEYS,
            )  # fmt: skip
            if parts == 1:
                top, total, sums = before_parts(sinks, head0 + index, own, SINKS, QUERIES, PADDED_HEAD)
                top, total, sums = join_part(top, total, sums, part_top, part_total, part_sums)
                write_result(
                    total, sums, index * 0 + token, head0 + index, own, out, out_stride, values_out, value_scale,
                    block_tokens, chunks, HEAD, PADDED_HEAD, HALVES,
                )  # fmt: skip
            else:
                place = at + part * HEADS + index
                tl.store(state + place * 2, part_top, mask=own)
                tl.store(state + place * 2 + 1, part_total, mask=own)
                tl.store(partial + place[:, None] * HEAD + dims[None, :], part_sums, mask=inside)
        if parts > 1:
            tl.debug_barrier()
            arrived = arrivals + decode * KV_HEADS + kv_head
            if tl.atomic_add(arrived, 1) == tl.minimum(parts, programs) - 1:
                tl.atomic_xchg(arrived, 0)
                total, sums = join_parts(
                    partial, state, sinks, at, head0, parts, group, HEADS, HEAD, PADDED_HEAD, SINKS, SHARED
                )
                shared = tl.arange(0, SHARED)
                write_result(
                    total, sums, shared * 0 + token, head0 + shared, shared < group, out, out_stride, values_out,
                    value_scale, block_tokens, chunks, HEAD, PADDED_HEAD, HALVES,
                )  # fmt: skip
