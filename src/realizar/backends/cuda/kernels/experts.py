"""A mixture's choice of experts, and matmuls of pairs with experts that are not in fragment order.

A pair is a token and one expert that it goes through; its number is token * experts of a token + slot.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.plain_weights import load_weights


@triton.jit
def keep_groups(left, expert, size, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """Ranks, with -inf for those out of the KEPT groups whose two highest have the highest sums, of equal ones the
    first. A group has `size` experts."""
    sums = tl.full(left.shape, float("-inf"), tl.float32)  # of a group, at the place of its number
    for group in tl.static_range(GROUPS):
        own = tl.where(expert // size == group, left, float("-inf"))
        first = tl.max(own, axis=0)
        at = tl.min(tl.where(own == first, expert, 2147483647), axis=0)
        second = tl.max(tl.where(expert == at, float("-inf"), own), axis=0)
        sums = tl.where(expert == group, tl.where(size == 1, first, first + second), sums)
    kept = expert < 0
    for _ in tl.static_range(KEPT):
        best = tl.min(tl.where(sums == tl.max(sums, axis=0), expert, 2147483647), axis=0)
        kept |= expert // size == best
        sums = tl.where(expert == best, float("-inf"), sums)
    return tl.where(kept, left, float("-inf"))


_LOW = tl.constexpr(2048.0)


@launched
def score_experts(
    hidden, factor, eps, highs, lows, scores, experts, width, tokens,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """float32 scores [tokens, experts] of RMSNorm(hidden) by three products of halves. Grid: tiles of experts, tokens.

    hidden: float32 [tokens, width], of up to 65504 * factor, a power of two. highs, lows: float16 [experts, width],
    as of `routing.split_weights`. The sums of COLUMNS columns go to float32's by an addition of their own: matrix
    units cut what they add up.
    """
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    has_expert, has_token = expert < experts, token < tokens
    sums = tl.zeros([TOKENS, EXPERTS], tl.float32)
    square_sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for i in tl.range(0, (width + COLUMNS - 1) // COLUMNS):
        columns = i * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < width
        at = hidden + token[:, None] * width + columns[None, :]
        x = tl.load(at, mask=has_token[:, None] & inside[None, :], other=0.0)
        of_weights, mask = expert[:, None] * width + columns[None, :], has_expert[:, None] & inside[None, :]
        weight_high = tl.trans(tl.load(highs + of_weights, mask=mask, other=0.0))
        weight_low = tl.trans(tl.load(lows + of_weights, mask=mask, other=0.0))
        square_sums += x * x
        x = x / factor
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))  # a NaN stays one
        high = x.to(tl.float16)
        low = ((x - high.to(tl.float32)) * _LOW).to(tl.float16)
        part = tl.dot(low, weight_high)
        part = tl.dot(high, weight_low, part) / _LOW
        part = tl.dot(high, weight_high, part)
        sums += part * factor
    sums /= tl.sqrt(tl.sum(square_sums, axis=1) / width + eps)[:, None]
    at = scores + token[:, None] * experts + expert[None, :]
    tl.store(at, sums, mask=has_token[:, None] & has_expert[None, :])


@triton.jit
def weigh_shared(
    x, eps, gate, gate_bias, token, width, STREAM: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """sigmoid(gate . x[token] + gate_bias); STREAM: of x over its root of mean square, with `eps`."""
    sums = tl.zeros([COLUMNS], tl.float32)
    square_sums = tl.zeros([COLUMNS], tl.float32)
    for block in tl.range(0, (width + COLUMNS - 1) // COLUMNS):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        values = tl.load(x + token * width + column, mask=column < width, other=0.0)
        sums += values * tl.load(gate + column, mask=column < width, other=0.0)
        square_sums += values * values
    logit = tl.sum(sums, axis=0)
    if STREAM:
        logit /= tl.sqrt(tl.sum(square_sums, axis=0) / width + eps)
    if BIAS:
        logit += tl.load(gate_bias)
    power = tl.exp(-tl.abs(logit))
    return tl.where(logit < 0.0, power, 1.0) / (1.0 + power)


@launched
def choose_experts(
    scores, scores_stride, bias, selection, expert_scales, header, chosen, weights, scale, experts, x, eps, gate,
    gate_bias, width,
    PER_TOKEN: tl.constexpr, SHARED: tl.constexpr, STREAM: tl.constexpr, GATE_BIAS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    SELECTION: tl.constexpr, SCALED: tl.constexpr, NORMALIZED: tl.constexpr, DEPENDENT: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over all experts, or sigmoids, then the highest ranks, of equal ones the first. Grid: tokens.

    chosen int32, weights float32 [tokens, places], the highest rank first; a token of padding, from header[1] on,
    chooses -1. Scores that are NaN choose the first experts, with weights that are NaN.
    BIAS: `bias` [experts] is added to the scores. SELECTION: `selection` [experts] is added to ranks alone.
    SCALED: weights are multiplied by `expert_scales` [experts].
    GROUPS: experts are in so many runs, of which the GROUPS_PER_TOKEN with the highest sums of two ranks are left.
    SHARED: places are PER_TOKEN with 0, and else one more, for expert number `experts`. Its weight is 1 with 1, and
    with 2 that of `weigh_shared`, of float32 `gate` [width], `x` [tokens, width] and, where GATE_BIAS, `gate_bias` [1].
    """
    begin(DEPENDENT)
    token = tl.program_id(0)
    live = token < tl.load(header + 1)
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    score = tl.load(scores + token.to(tl.int64) * scores_stride + expert, mask=inside, other=float("-inf"))
    if BIAS:
        score += tl.load(bias + expert, mask=inside, other=0.0)
    if SIGMOID:
        power = tl.exp(-tl.abs(score))
        share = tl.where(score < 0.0, power, 1.0) / (1.0 + power)
    else:
        power = tl.where(inside, tl.exp(score - tl.max(score, axis=0)), 0.0)
        share = power / tl.sum(power, axis=0)
    rank = share
    if SELECTION:
        rank += tl.load(selection + expert, mask=inside, other=0.0)
    left = tl.where(inside, tl.where(rank == rank, rank, 0.0), float("-inf"))
    if GROUPS > 1:
        left = keep_groups(left, expert, experts // GROUPS, GROUPS, GROUPS_PER_TOKEN)
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros([SLOTS], tl.int32)
    parts = tl.zeros([SLOTS], tl.float32)
    total = 0.0
    for i in tl.static_range(PER_TOKEN):
        best = tl.min(tl.where(left == tl.max(left, axis=0), expert, 2147483647), axis=0)
        part = tl.sum(tl.where(expert == best, share, 0.0), axis=0)
        ids = tl.where(slot == i, best, ids)
        parts = tl.where(slot == i, part, parts)
        total += part
        left = tl.where(expert == best, float("-inf"), left)
    if NORMALIZED:
        parts = parts / (total + 1e-20)  # sigmoids may all be zero
    if SCALED:
        parts *= tl.load(expert_scales + ids, mask=slot < PER_TOKEN, other=0.0)
    parts *= scale
    places = PER_TOKEN + (1 if SHARED > 0 else 0)
    if SHARED > 0:
        shared = 1.0
        if SHARED == 2:
            shared = weigh_shared(x, eps, gate, gate_bias, token.to(tl.int64), width, STREAM, GATE_BIAS, COLUMNS)
        ids = tl.where(slot == PER_TOKEN, experts, ids)
        parts = tl.where(slot == PER_TOKEN, shared, parts)
    at = token * places + slot
    tl.store(chosen + at, tl.where(live, ids, -1), mask=slot < places)
    tl.store(weights + at, parts, mask=slot < places)


@triton.jit
def store_pair(
    sums, pair, feature, inside, factors, bias, out, out_stride, WEIGHED: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """out[pair, feature] = sums, with the expert's `bias` where BIAS, times the pair's factor where WEIGHED."""
    if BIAS:
        sums += tl.load(bias + feature, mask=inside, other=0.0)
    if WEIGHED:
        sums *= tl.load(factors + pair)
    tl.store(out + pair.to(tl.int64) * out_stride + feature, sums, mask=inside)


@launched
def multiply_float_pairs(
    x, x_stride, chosen, factors, bias, out, out_stride, weights, out_features, cols,
    PER_INPUT: tl.constexpr, WEIGHED: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
    OUT_FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [pairs, out_features] = x [pairs / PER_INPUT, cols] times the chosen experts of float matrices.

    BIAS: `bias` float32 [experts, out_features] is added. WEIGHED: then they are multiplied by their pairs' factors.
    Grid: pairs, blocks of out_features. Pairs of no expert are left as they are.
    """
    begin(DEPENDENT)
    pair = tl.program_id(0)
    expert = tl.load(chosen + pair).to(tl.int64)
    if expert >= 0:
        feature = tl.program_id(1) * OUT_FEATURES + tl.arange(0, OUT_FEATURES)
        inside = feature < out_features
        row = weights + (expert * out_features + feature)[:, None] * cols
        values = x + (pair // PER_INPUT).to(tl.int64) * x_stride
        sums = tl.zeros([OUT_FEATURES, COLUMNS], tl.float32)
        for block in tl.range(0, (cols + COLUMNS - 1) // COLUMNS):
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            w = tl.load(row + column[None, :], mask=inside[:, None] & (column < cols)[None, :], other=0.0)
            a = tl.load(values + column, mask=column < cols, other=0.0)
            sums += w.to(tl.float32) * a[None, :]
        own_bias = bias + expert * out_features
        store_pair(tl.sum(sums, axis=1), pair, feature, inside, factors, own_bias, out, out_stride, WEIGHED, BIAS)


@launched
def multiply_plain_pairs(
    x, x_stride, chosen, factors, bias, out, out_stride, out_features, cols, low, high, small, small_minima, supers,
    super_minima, codebook, signs,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    MINIMA: tl.constexpr, VECTOR: tl.constexpr, CODEBOOK: tl.constexpr, SIGNS: tl.constexpr, PER_INPUT: tl.constexpr,
    WEIGHED: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr, OUT_FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `multiply_float_pairs`, of quantised matrices row by row."""
    begin(DEPENDENT)
    pair = tl.program_id(0)
    expert = tl.load(chosen + pair).to(tl.int64)
    if expert >= 0:
        feature = tl.program_id(1) * OUT_FEATURES + tl.arange(0, OUT_FEATURES)
        inside = feature < out_features
        values = x + (pair // PER_INPUT).to(tl.int64) * x_stride
        sums = tl.zeros([OUT_FEATURES, COLUMNS], tl.float32)
        for block in tl.range(0, (cols + COLUMNS - 1) // COLUMNS):
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            w = load_weights(
                low, high, small, small_minima, supers, super_minima, codebook, signs,
                expert * out_features + feature, column, cols, inside, LOW, HIGH, OFFSET, GROUP, SUPER, MINIMA, VECTOR,
                CODEBOOK, SIGNS,
            )  # fmt: skip
            sums += w * tl.load(values + column, mask=column < cols, other=0.0)[None, :]
        own_bias = bias + expert * out_features
        store_pair(tl.sum(sums, axis=1), pair, feature, inside, factors, own_bias, out, out_stride, WEIGHED, BIAS)
