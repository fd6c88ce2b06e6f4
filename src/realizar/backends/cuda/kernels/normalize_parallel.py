"""Norms around experts parallel to a dense feed-forward: two of the stream, and one of each of their outputs."""

import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.exchange import load_rank_sum
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.normalize import norm_by, norm_vectors
from realizar.backends.cuda.kernels.store_inputs import NOTHING, store_token


@launched
def normalize_twice(
    partials, splits_stride, token_stride, matmul_bias, branch_weight, branch_bias, branch_eps, add_scale,
    output_scale, hidden, weight, bias, eps, values, value_stride, value_scale, codes, terms,
    second_weight, second_bias, second_eps, second_values, second_value_stride, second_value_scale, second_codes,
    second_terms, width,
    SPLITS: tl.constexpr, MATMUL_BIAS: tl.constexpr, BRANCH_NORM: tl.constexpr, BRANCH_BIAS: tl.constexpr,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    SECOND_NORM: tl.constexpr, SECOND_BIAS: tl.constexpr, SECOND_FORMAT: tl.constexpr,
    SECOND_BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
    exchange=None, RANKS: tl.constexpr = 0, HALVES: tl.constexpr = False,
):  # fmt: skip
    """hidden = (hidden + add_scale * branch_norm(sum of partials)) * output_scale; two norms of it. Grid: tokens.

    SPLITS of 0: there is no branch. hidden: [tokens, width]. A norm whose format is NOTHING is left out.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    added_by, added_bias = norm_vectors(branch_weight, branch_bias, columns, inside, BRANCH_NORM, BRANCH_BIAS)
    first_by, first_bias = norm_vectors(weight, bias, columns, inside, NORM, NORM_BIAS)
    second_by, own_second_bias = norm_vectors(second_weight, second_bias, columns, inside, SECOND_NORM, SECOND_BIAS)
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    stream = hidden + token * width + columns
    x = tl.load(stream, mask=inside, other=0.0)
    if SPLITS > 0:
        branch = load_rank_sum(
            partials, matmul_bias, token * token_stride, columns, inside, splits_stride, token * width + columns,
            exchange, SPLITS, MATMUL_BIAS, RANKS, HALVES,
        )  # fmt: skip
        branch = norm_by(branch, inside, width, added_by, added_bias, branch_eps, BRANCH_NORM, BRANCH_BIAS)
        x = (x + add_scale * branch) * output_scale
        tl.store(stream, x, mask=inside)
    if FORMAT != NOTHING:
        y = norm_by(x, inside, width, first_by, first_bias, eps, NORM, NORM_BIAS)
        store_token(
            y, token, width, values, value_stride, value_scale, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK
        )
    if SECOND_FORMAT != NOTHING:
        y = norm_by(x, inside, width, second_by, own_second_bias, second_eps, SECOND_NORM, SECOND_BIAS)
        store_token(
            y, token, width, second_values, second_value_stride, second_value_scale, second_codes, second_terms,
            SECOND_FORMAT, SECOND_BLOCK_TOKENS, CHUNKS, BLOCK,
        )  # fmt: skip


@launched
def normalize_parallel(
    partials, splits_stride, token_stride, matmul_bias, own_weight, own_bias, own_eps,
    dense, dense_splits_stride, dense_token_stride, dense_matmul_bias, dense_weight, dense_bias, dense_eps,
    branch_weight, branch_bias, branch_eps, add_scale, output_scale, hidden, weight, bias, eps, values, value_stride,
    value_scale, codes, terms, width, square_sums,
    SPLITS: tl.constexpr, MATMUL_BIAS: tl.constexpr, OWN_NORM: tl.constexpr, OWN_BIAS: tl.constexpr,
    DENSE_SPLITS: tl.constexpr, DENSE_MATMUL_BIAS: tl.constexpr, DENSE_NORM: tl.constexpr,
    DENSE_BIAS: tl.constexpr, BRANCH_NORM: tl.constexpr, BRANCH_BIAS: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, exchange=None, dense_exchange=None,
    RANKS: tl.constexpr = 0, HALVES: tl.constexpr = False,
):  # fmt: skip
    """As `normalize`, where the branch is own_norm(sum of partials) + dense_norm(sum of dense). Grid: tokens."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    own_by, own_norm_bias = norm_vectors(own_weight, own_bias, columns, inside, OWN_NORM, OWN_BIAS)
    dense_by, dense_norm_bias = norm_vectors(dense_weight, dense_bias, columns, inside, DENSE_NORM, DENSE_BIAS)
    added_by, added_bias = norm_vectors(branch_weight, branch_bias, columns, inside, BRANCH_NORM, BRANCH_BIAS)
    last_by, last_bias = norm_vectors(weight, bias, columns, inside, NORM, NORM_BIAS)
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    stream = hidden + token * width + columns
    x = tl.load(stream, mask=inside, other=0.0)
    at = token * width + columns
    own = load_rank_sum(
        partials, matmul_bias, token * token_stride, columns, inside, splits_stride, at, exchange, SPLITS, MATMUL_BIAS,
        RANKS, HALVES,
    )  # fmt: skip
    dense_output = load_rank_sum(
        dense, dense_matmul_bias, token * dense_token_stride, columns, inside, dense_splits_stride, at, dense_exchange,
        DENSE_SPLITS, DENSE_MATMUL_BIAS, RANKS, HALVES,
    )  # fmt: skip
    branch = norm_by(own, inside, width, own_by, own_norm_bias, own_eps, OWN_NORM, OWN_BIAS)
    branch += norm_by(dense_output, inside, width, dense_by, dense_norm_bias, dense_eps, DENSE_NORM, DENSE_BIAS)
    branch = norm_by(branch, inside, width, added_by, added_bias, branch_eps, BRANCH_NORM, BRANCH_BIAS)
    x = (x + add_scale * branch) * output_scale
    tl.store(stream, x, mask=inside)
    if PARTS > 0:
        part = tl.arange(0, PARTS)
        tl.store(square_sums + token * PARTS + part, tl.where(part == 0, tl.sum(x * x, axis=0), 0.0))
    x = norm_by(x, inside, width, last_by, last_bias, eps, NORM, NORM_BIAS)
    store_token(x, token, width, values, value_stride, value_scale, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK)
