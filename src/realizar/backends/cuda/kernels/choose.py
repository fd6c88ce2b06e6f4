"""Logits of the selected tokens, and the largest of each: all that greedy sampling needs."""

import triton.language as tl

from realizar.backends.cuda.kernels.attend import cap_scores
from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.exchange import load_rank_sum
from realizar.backends.cuda.kernels.launched import launched


@launched
def finish_logits(
    partials, splits_stride, token_stride, bias, logits, logits_stride, scale, soft_cap, block_tops, block_ids, blocks,
    width,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, SOFT_CAP: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
    exchange=None, RANKS: tl.constexpr = 0,
):  # fmt: skip
    """Sum, bias, scale and cap; largest value of each block and its first id. Grid: selected tokens, blocks of columns.

    A block with a NaN reports +inf. `exchange`, RANKS: see `exchange.load_rank_sum`.
    """
    begin(DEPENDENT)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = scale * load_rank_sum(
        partials, bias, token * token_stride, columns, inside, splits_stride, token * width + columns, exchange,
        SPLITS, BIAS, RANKS, False,
    )  # fmt: skip
    if SOFT_CAP:
        x = cap_scores(x, soft_cap)
    tl.store(logits + token * logits_stride + columns, x, mask=inside)
    x = tl.where(inside, x, float("-inf"))
    broken = tl.max((x != x).to(tl.int32), axis=0) > 0
    top = tl.max(x, axis=0)
    first = tl.min(tl.where(x == top, columns, 2147483647), axis=0)
    tl.store(block_tops + token * blocks + block, tl.where(broken, float("inf"), top))
    tl.store(block_ids + token * blocks + block, first)


@launched
def choose(
    block_tops, block_ids, blocks, sampled, rows, last, head_ids, DEPENDENT: tl.constexpr, BLOCKS: tl.constexpr,
    NAMED: tl.constexpr,
):  # fmt: skip
    """The id of the largest logit, the lowest among equals; -1 where logits are not finite. Grid: selected tokens.

    Also `last[rows[i]]`, where rows[i] is not -1: the token with which the next step of that sequence starts. NAMED: a
    row of the head stands for its entry of `head_ids`.
    """
    begin(DEPENDENT)
    index = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    tops = tl.load(block_tops + index * blocks + block, mask=inside, other=float("-inf"))
    ids = tl.load(block_ids + index * blocks + block, mask=inside, other=2147483647)
    top = tl.max(tops, axis=0)
    best = tl.min(tl.where(tops == top, ids, 2147483647), axis=0)
    is_finite = tl.abs(top) < float("inf")
    if NAMED:
        best = tl.load(head_ids + best, mask=is_finite, other=-1)
    best = tl.where(is_finite, best, -1)
    tl.store(sampled + index, best)
    row = tl.load(rows + index)
    tl.store(last + row, tl.maximum(best, 0), mask=row >= 0)
