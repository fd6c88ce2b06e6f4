"""Kernels between two matmuls on the residual stream: sum, bias, norm, residual add, norm, and the next input."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.exchange import load_rank_sum
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.reduce import BOUNDS, bounded, load_bounds, load_sum
from realizar.backends.cuda.kernels.store_inputs import HALF, NOTHING, store_token, store_values

RMS_NORM, LAYER_NORM, SCALE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def norm_vectors(weight, bias, columns, inside, KIND: tl.constexpr, BIAS: tl.constexpr):
    """A norm's weight and bias of some columns, for `norm_by`; zeros in place of what it does not have.

    No kernel of a step writes them, so one may load them before it waits for the kernel before it.
    """
    own_weight, own_bias = columns * 0.0, columns * 0.0
    if KIND > 0:
        own_weight = tl.load(weight + columns, mask=inside, other=0.0)
        if BIAS:
            own_bias = tl.load(bias + columns, mask=inside, other=0.0)
    return own_weight, own_bias


@triton.jit
def norm_by(x, inside, width, weight, bias, eps, KIND: tl.constexpr, BIAS: tl.constexpr):
    """(x - mean or 0) / deviation * weight + bias over `width` columns, of `norm_vectors`; KIND 0 is x itself.

    SCALE divides by nothing, and takes no mean away.
    """
    if KIND > 0:
        if KIND == LAYER_NORM:
            x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
        if KIND != SCALE:
            x = x / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
        x = x * weight
        if BIAS:
            x += bias
    return x


@triton.jit
def norm_token(x, inside, width, weight, bias, columns, eps, KIND: tl.constexpr, BIAS: tl.constexpr):
    """`norm_by` of the vectors at these addresses."""
    own_weight, own_bias = norm_vectors(weight, bias, columns, inside, KIND, BIAS)
    return norm_by(x, inside, width, own_weight, own_bias, eps, KIND, BIAS)


@launched
def normalize(
    partials, splits_stride, token_stride, matmul_bias, selected, branch_weight, branch_bias, branch_eps,
    add_scale, output_scale, hidden, weight, bias, eps, values, value_stride, value_scale, codes, terms, width,
    square_sums,
    SPLITS: tl.constexpr, MATMUL_BIAS: tl.constexpr, BRANCH_NORM: tl.constexpr,
    BRANCH_BIAS: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr, GATHER: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, exchange=None, RANKS: tl.constexpr = 0, HALVES: tl.constexpr = False,
):  # fmt: skip
    """hidden = (hidden + add_scale * branch_norm(sum of partials)) * output_scale; out = norm(hidden). Grid: tokens.

    hidden: [tokens, width]. SPLITS of 0: there is no branch. GATHER: program i reads token selected[i] of hidden.
    FORMAT: see `activation.store_token`. `exchange`, RANKS, HALVES: see `exchange.load_rank_sum`. BOUNDS are those of
    the sums, and of what is stored.
    PARTS: of `square_sums`, for a `normalize_block` that comes next; 0 where none does.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    own_weight, own_bias = norm_vectors(weight, bias, columns, inside, NORM, NORM_BIAS)
    added_weight, added_bias = norm_vectors(branch_weight, branch_bias, columns, inside, BRANCH_NORM, BRANCH_BIAS)
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = token
    if GATHER:
        at = tl.load(selected + token).to(tl.int64)
    stream = hidden + at * width + columns
    x = tl.load(stream, mask=inside, other=0.0)
    if MATMUL_BIAS == BOUNDS:
        low, high = load_bounds(matmul_bias, 1)
    if SPLITS > 0:
        branch = load_rank_sum(
            partials, matmul_bias, token * token_stride, columns, inside, splits_stride, token * width + columns,
            exchange, SPLITS, MATMUL_BIAS, RANKS, HALVES,
        )  # fmt: skip
        branch = norm_by(branch, inside, width, added_weight, added_bias, branch_eps, BRANCH_NORM, BRANCH_BIAS)
        x = (x + add_scale * branch) * output_scale
        tl.store(stream, x, mask=inside)
    if PARTS > 0:
        part = tl.arange(0, PARTS)
        tl.store(square_sums + token * PARTS + part, tl.where(part == 0, tl.sum(x * x, axis=0), 0.0))
    x = norm_by(x, inside, width, own_weight, own_bias, eps, NORM, NORM_BIAS)
    if MATMUL_BIAS == BOUNDS:
        x = bounded(x, low, high, inside)
    store_token(x, token, width, values, value_stride, value_scale, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK)


@triton.jit
def two_to(power):
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def stream_power(mean_square):
    """The power of two that divides halves of a token not known yet: 2^6 to 2^7 times its last root mean square.

    What is of the root's size then lies near 2^-7: 4 million times smaller than the largest half, 128 times larger than
    where halves begin to lose bits. The stream's growth from norm to norm takes room there, or its shrinking, its
    largest channels, and the norm's weights. Roots below 2^-10 count as that: after a token of zeros there is room for
    values up to 8,000.
    """
    bits = tl.maximum(mean_square, 9.5367431640625e-07).to(tl.int32, bitcast=True)
    return (((bits >> 23) - 127) >> 1) + 7


@launched
def normalize_block(
    partials, splits_stride, token_stride, matmul_bias, add_scale, hidden, hidden_stride, weight, values, value_stride,
    value_scale, codes, terms, width, square_sums, square_sums_before,
    SPLITS: tl.constexpr, MATMUL_BIAS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    exchange=None, RANKS: tl.constexpr = 0, HALVES: tl.constexpr = False,
):  # fmt: skip
    """hidden += add_scale * sum of partials; out = hidden * weight, an unscaled RMSNorm. Grid: tokens, blocks.

    The matmul that reads `out` applies the scale, from `square_sums`: see `matmul.quantized`. NOTHING only adds.
    `exchange`, RANKS, HALVES: see `exchange.load_rank_sum`.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < width
    if FORMAT != NOTHING:
        norm_weight = tl.load(weight + columns, mask=inside, other=0.0)
    begin(DEPENDENT)
    stream = hidden + token * hidden_stride + columns
    x = tl.load(stream, mask=inside, other=0.0)
    if FORMAT == HALF:
        before = tl.load(square_sums_before + token * PARTS + tl.arange(0, PARTS))
    x += add_scale * load_rank_sum(
        partials, matmul_bias, token * token_stride, columns, inside, splits_stride, token * width + columns, exchange,
        SPLITS, MATMUL_BIAS, RANKS, HALVES,
    )  # fmt: skip
    tl.store(stream, x, mask=inside)
    if FORMAT != NOTHING:
        tl.store(square_sums + token * PARTS + tl.program_id(1), tl.sum(x * x, axis=0))
        y = x * norm_weight
        if FORMAT == HALF:
            power = stream_power(tl.sum(before, axis=0) / width)
            if tl.program_id(1) == 0:
                tl.store(value_scale + token, two_to(power))
            y = y * two_to(-power)
            y = tl.where(y > 65504.0, 65504.0, tl.where(y < -65504.0, -65504.0, y))  # a NaN stays one
        store_values(y, token, first, width, values, value_stride, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK)


@launched
def normalize_partials(
    partials, splits_stride, token_stride, matmul_bias, first, weight, bias, eps, width,
    SPLITS: tl.constexpr, MATMUL_BIAS: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the splits of columns `first` to `first + width`, norm them, and store them in split 0. Grid: tokens."""
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = load_sum(
        partials, matmul_bias, token * token_stride, first + columns, inside, splits_stride, SPLITS,
        MATMUL_BIAS,
    )  # fmt: skip
    x = norm_token(x, inside, width, weight, bias, columns, eps, NORM, NORM_BIAS)
    tl.store(partials + token * token_stride + first + columns, x, mask=inside)


@launched
def add_norm(
    partials, splits_stride, token_stride, weight, eps, out, width,
    SPLITS: tl.constexpr, NORM: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [tokens, width] += norm(sum of partials). Grid: tokens."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    own_weight, own_bias = norm_vectors(weight, weight, columns, inside, NORM, False)
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    x = load_sum(partials, partials, token * token_stride, columns, inside, splits_stride, SPLITS, False)
    at = out + token * width + columns
    x = norm_by(x, inside, width, own_weight, own_bias, eps, NORM, False) + tl.load(at, mask=inside, other=0.0)
    tl.store(at, x, mask=inside)
