"""The feed-forward's activation, and attention's results: both become the input of a matmul."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.reduce import BOUNDS, bounded, load_bounds, load_sum
from realizar.backends.cuda.kernels.store_inputs import store_block, store_values
from realizar.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT

SILU, GELU_TANH, GELU, NO_ACTIVATION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CLAMPED = tl.constexpr(4)  # of gate and up together: see `models.spec.Experts`
RELU_SQUARED = tl.constexpr(5)
SIGMOID = tl.constexpr(6)
ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def apply_activation(x, KIND: tl.constexpr):
    """silu, gelu's approximation by tanh, gelu, ReLU squared, sigmoid, or x itself."""
    if KIND == NO_ACTIVATION:
        return x
    if KIND == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-x))
    if KIND == SILU:
        return x / (1.0 + tl.exp(-x))
    if KIND == GELU_TANH:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if KIND == RELU_SQUARED:
        return tl.where(x < 0.0, 0.0, x * x)  # NaN stays
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def apply_gate(gate, up, KIND: tl.constexpr):
    """activation(gate) * up, or what CLAMPED makes of both."""
    if KIND == CLAMPED:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return apply_activation(gate, KIND) * up


@triton.jit
def activated(
    partials, splits_stride, token_at, bias, up_at, width, first, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The columns from `first` on of gate and up together, or activation(up); 0 beyond `width`.

    BOUNDS are those of gate, of up, and of what comes of them.
    """
    columns = first + tl.arange(0, BLOCK)
    inside = columns < width
    if INTERLEAVED:
        columns = columns // 64 * 128 + columns % 64
    if BIAS == BOUNDS:
        low, high = load_bounds(bias, 2 if GATED else 1)
    x = load_sum(partials, bias, token_at, up_at + columns, inside, splits_stride, SPLITS, BIAS, 1 if GATED else 0)
    if GATED:
        x = apply_gate(load_sum(partials, bias, token_at, columns, inside, splits_stride, SPLITS, BIAS), x, KIND)
    else:
        x = apply_activation(x, KIND)
    if BIAS == BOUNDS:
        x = bounded(x, low, high, inside)
    return tl.where(inside, x, 0.0)


@launched
def activate(
    partials, splits_stride, token_stride, bias, up_at, width, values, value_stride, value_scale, codes, terms,
    token_tops, token_arrivals,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up, or activation(up). Grid: tokens, blocks of columns.

    A token of `partials` holds the gate from column 0 and up from `up_at`; or INTERLEAVED, 64 columns of each
    alternately, with `up_at` 64.
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = token * token_stride
    x = activated(partials, splits_stride, at, bias, up_at, width, first, SPLITS, BIAS, KIND, GATED, INTERLEAVED, BLOCK)
    factor = store_block(
        x, token, first, width, values, value_stride, value_scale, codes, terms, token_tops, token_arrivals, FORMAT,
        BLOCK_TOKENS, CHUNKS, BLOCK,
    )  # fmt: skip
    if factor != 1.0:
        for block in tl.range(0, tl.num_programs(1)):
            first = block * BLOCK
            x = activated(
                partials, splits_stride, at, bias, up_at, width, first, SPLITS, BIAS, KIND, GATED, INTERLEAVED, BLOCK
            )
            x = x / factor
            store_values(
                x, token, first, width, values, value_stride, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK
            )


@launched
def convert(
    source, source_stride, width, values, value_stride, value_scale, codes, terms, token_tops, token_arrivals,
    FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 activations into a matmul's format. Grid: tokens, blocks of columns."""
    activate(
        source, 0, source_stride, source, 0, width, values, value_stride, value_scale, codes, terms, token_tops,
        token_arrivals, 1, False, NO_ACTIVATION, False, False, FORMAT, BLOCK_TOKENS, CHUNKS, DEPENDENT, BLOCK,
    )  # fmt: skip
