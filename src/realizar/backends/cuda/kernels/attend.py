"""Causal attention over paged KV blocks: its steps, and the kernel for chunks; `attend_decode` has single tokens.

Keys and values lie as [blocks, KV heads, block size, head size], int8 ones with float16 scales [..., head size / 32],
and those of e4m3, whose bytes are uint8, with one of a layer.
Queries that share a KV head go through one tile. Key blocks start at fixed positions and a row's arithmetic does not
depend on the other rows of its tile, so a query's bits depend on its own context and on its parts alone.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.heads import GROUP
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.store_inputs import fp8_value, half_places


@triton.jit
def load_tile(cache, scales, at, live, dims, HEAD: tl.constexpr, INT8: tl.constexpr, COMPUTE: tl.constexpr):
    """Rows `at` of a cache as COMPUTE [keys, padded head size]; dead keys and padding are 0."""
    inside = live[:, None] & (dims < HEAD)[None, :]
    tile = tl.load(cache + at[:, None] * HEAD + dims[None, :], mask=inside, other=0)
    if INT8:
        groups: tl.constexpr = (HEAD + GROUP - 1) // GROUP
        scale = tl.load(scales + at[:, None] * groups + (dims // GROUP)[None, :], mask=inside, other=0.0)
        return (tile.to(tl.float32) * scale.to(tl.float32)).to(COMPUTE)
    if cache.dtype.element_ty == tl.uint8:
        return (fp8_value(tile) * tl.load(scales)).to(COMPUTE)
    return tile.to(COMPUTE)


@triton.jit
def cap_scores(scores, soft_cap):
    return soft_cap - 2.0 * soft_cap / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)


@triton.jit
def absorb(
    q, k, v, seen, top, total, sums, scale, soft_cap, SOFT_CAP: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Take a block of keys into the running softmax: new largest score, sum of weights, weighted sum of values."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFT_CAP:
        scores = cap_scores(scores, soft_cap)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp(top - reference)
    weights = tl.exp(scores - reference[:, None])
    total = total * kept + tl.sum(weights, axis=1)
    sums = sums * kept[:, None] + tl.dot(weights.to(COMPUTE), v, input_precision="ieee")
    return higher, total, sums


@triton.jit
def cut_context(length, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """First visible key, where key blocks start, how many there are, and how many a part has: at least two."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    low = first // KEYS * KEYS
    blocks = (length - low + KEYS - 1) // KEYS
    return first, low, blocks, tl.maximum((blocks + SPLITS - 1) // SPLITS, 2)


@triton.jit
def absorb_blocks(
    q, keys, values, key_scales, value_scales, table, kv_head, position, sees, start, first, last, top, total, sums,
    scale, soft_cap, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PADDED_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, INT8: tl.constexpr, COMPUTE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Take the keys from `start` to `last`, of which those from `first` on are visible, into the running softmax.

    q [queries, padded head size] at int `position` [queries], and each `sees` keys up to a position, most its own;
    `start` is a multiple of KEYS, `table` the row's blocks.
    """
    dims = tl.arange(0, PADDED_HEAD)
    for i in tl.range(0, (last - start + KEYS - 1) // KEYS):
        places = start + i * KEYS + tl.arange(0, KEYS)
        live = (places < last) & (places >= first)
        block = tl.load(table + places // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        at = (block * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
        k = load_tile(keys, key_scales, at, live, dims, HEAD, INT8, COMPUTE)
        v = load_tile(values, value_scales, at, live, dims, HEAD, INT8, COMPUTE)
        seen = places[None, :] <= sees[:, None]
        if WINDOW > 0:
            seen = seen & (places[None, :] > position[:, None] - WINDOW)
        top, total, sums = absorb(q, k, v, seen, top, total, sums, scale, soft_cap, SOFT_CAP, COMPUTE)
    return top, total, sums


@triton.jit
def join_part(top, total, sums, part_top, part_total, part_sums):
    """Take a part of the context into the softmax of those before it: [queries], [queries], [queries, dims].

    Fused multiply-adds are spelled out, so that every kernel which joins parts gives the same bits.
    """
    higher = tl.maximum(top, part_top)
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp(top - reference), tl.exp(part_top - reference)
    total = tl.fma(total, kept, part_total * added)
    sums = tl.fma(sums, tl.broadcast_to(kept[:, None], sums.shape), part_sums * added[:, None])
    return higher, total, sums


@triton.jit
def before_parts(sinks, head, own, SINKS: tl.constexpr, QUERIES: tl.constexpr, PADDED_HEAD: tl.constexpr):
    """The softmax of some queries before the first part of their context: of their heads' sinks, or of nothing."""
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=own, other=0.0)
        total += 1.0
    return top, total, tl.zeros([QUERIES, PADDED_HEAD], tl.float32)


@triton.jit
def write_result(
    total, sums, token, head, own, out, out_stride, values, value_scale, block_tokens, chunks, HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Divide, and write the queries that are `own`, each a head of a token: [queries], sums [queries, head size].

    To float32 out [tokens, heads * head size]; or HALVES, for which the head size is a power of two: to `values` in the
    order that matmuls read, as they are. They are means of the cache's values, and are cut to what a half can hold in
    place of becoming infinite.
    """
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    dims = tl.arange(0, PADDED_HEAD)
    inside = own[:, None] & (dims < HEAD)[None, :]
    if HALVES:
        result = tl.where(result > 65504.0, 65504.0, tl.where(result < -65504.0, -65504.0, result))  # a NaN stays one
        at = half_places(token, head * HEAD, dims, block_tokens, chunks)
        tl.store(values + at, result.to(tl.float16), mask=inside)
        tl.store(value_scale + token, 1.0, mask=own & (head == 0))
    else:
        tl.store(
            out + token.to(tl.int64)[:, None] * out_stride + head[:, None] * HEAD + dims[None, :], result, mask=inside
        )


@launched
def attend_chunk(
    query, keys, values, key_scales, value_scales, sinks, out, tile_rows, tile_firsts, starts, counts, contexts,
    tables, table_stride, seen, scale, soft_cap, query_stride, out_stride, values_out, value_scale, block_tokens,
    chunks, TABLE_ROWS: tl.constexpr, CACHE_GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, PADDED_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, INT8: tl.constexpr, COMPUTE: tl.constexpr, KEYS: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile of a row's tokens, each with all heads of one KV head. Grid: tiles, KV heads, shares of a tile.

    A share holds TOKENS tokens, TOKENS * group queries padded to QUERIES; `tile_rows` is -1 for a dead tile. The last
    share may hold some of the next tile's tokens, whose results are the same there. A token sees keys up to its own;
    WHOLE: up to `seen`, int32 [tokens of the step], those after it in its image, which the cache has by then.
    Writes the result as `write_result`. PART: keys of a part of the context, as in `attend_parts`; 0: the context is
    one.
    """
    begin(DEPENDENT)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.load(tile_rows + tile)
    if row >= 0:
        offset = tl.load(tile_firsts + tile) + tl.program_id(2) * TOKENS
        length, count = tl.load(contexts + row), tl.load(counts + row)
        token = tl.load(starts + row) + offset
        stride = tl.load(table_stride)
        index, dims = tl.arange(0, QUERIES), tl.arange(0, PADDED_HEAD)
        step, head = index // group, kv_head * group + index % group
        own = (step < TOKENS) & (offset + step < count)
        inside = own[:, None] & (dims < HEAD)[None, :]
        position = length - count + offset + step
        earliest = length - count + offset
        last = tl.minimum(earliest + TOKENS, length)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(earliest - WINDOW + 1, 0)
        low = first // KEYS * KEYS
        tokens = (token + step).to(tl.int64)
        sees = position
        if WHOLE:
            sees = tl.load(seen + tokens, mask=own, other=0)
            last = tl.minimum(tl.maximum(last, tl.max(sees, axis=0) + 1), length)
        q = tl.load(query + tokens[:, None] * query_stride + head[:, None] * HEAD + dims[None, :], mask=inside, other=0)
        q = q.to(COMPUTE)
        table = tables + (CACHE_GROUP * TABLE_ROWS + row) * stride
        if PART > 0:
            top, total, sums = before_parts(sinks, head, own, SINKS, QUERIES, PADDED_HEAD)
            for i in tl.range(0, (last + PART - 1) // PART - first // PART):
                begins = (first // PART + i) * PART
                part_top, part_total, part_sums = absorb_blocks(
                    q, keys, values, key_scales, value_scales, table, kv_head, position, sees,
                    tl.maximum(begins, low),
                    first, tl.minimum(begins + PART, last), tl.full([QUERIES], float("-inf"), tl.float32),
                    tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, PADDED_HEAD], tl.float32), scale, soft_cap,
                    KV_HEADS, HEAD, PADDED_HEAD, BLOCK_SIZE, WINDOW, SOFT_CAP, INT8, COMPUTE, KEYS,
                )  # fmt: skip
                top, total, sums = join_part(top, total, sums, part_top, part_total, part_sums)
        else:
            top, total, sums = before_parts(sinks, head, own, False, QUERIES, PADDED_HEAD)
            top, total, sums = absorb_blocks(
                q, keys, values, key_scales, value_scales, table, kv_head, position, sees, low, first, last,
                top, total, sums, scale, soft_cap, KV_HEADS, HEAD, PADDED_HEAD, BLOCK_SIZE, WINDOW, SOFT_CAP, INT8,
                COMPUTE, KEYS,
            )  # fmt: skip
            if SINKS:
                sink = tl.load(sinks + head, mask=own, other=0.0)
                higher = tl.maximum(top, sink)
                kept = tl.exp(top - higher)
                total = total * kept + tl.exp(sink - higher)
                sums = sums * kept[:, None]
        write_result(
            total, sums, tokens, head, own, out, out_stride, values_out, value_scale, block_tokens, chunks, HEAD,
            PADDED_HEAD, HALVES,
        )  # fmt: skip
