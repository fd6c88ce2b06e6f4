"""What lies between two products on the residual stream: sum, bias, norm, residual add, norm, and the next input."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.activation import store_row
from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.reduce import load_sum

RMS_NORM, LAYER_NORM = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def norm_row(x, inside, width, weight, bias, columns, eps, KIND: tl.constexpr, BIAS: tl.constexpr):
    """(x - mean or 0) / deviation * weight + bias over `width` columns; KIND 0 is x itself."""
    if KIND > 0:
        if KIND == LAYER_NORM:
            x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
        x = x / tl.sqrt(tl.sum(x * x, axis=0) / width + eps) * tl.load(weight + columns, mask=inside, other=0.0)
        if BIAS:
            x += tl.load(bias + columns, mask=inside, other=0.0)
    return x


@triton.jit
def normalize(
    product, splits_stride, row_stride, product_bias, branch_weight, branch_bias, branch_eps,
    add_scale, hidden, hidden_stride, rows, weight, bias, eps, values, value_stride, value_scale, codes, terms,
    width,
    SPLITS: tl.constexpr, PRODUCT_BIAS: tl.constexpr, BRANCH_NORM: tl.constexpr,
    BRANCH_BIAS: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr, GATHER: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden += add_scale * branch_norm(product); out = norm(hidden). Grid: rows.

    SPLITS of 0: there is no product. GATHER: row i reads row rows[i] of hidden. FORMAT: see `activation.store_row`.
    """
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row
    if GATHER:
        at = tl.load(rows + row).to(tl.int64)
    stream = hidden + at * hidden_stride + columns
    x = tl.load(stream, mask=inside, other=0.0)
    if SPLITS > 0:
        branch = load_sum(
            product, product_bias, row * row_stride, columns, inside, splits_stride, SPLITS,
            PRODUCT_BIAS,
        )  # fmt: skip
        branch = norm_row(
            branch, inside, width, branch_weight, branch_bias, columns, branch_eps, BRANCH_NORM, BRANCH_BIAS
        )
        x += add_scale * branch
        tl.store(stream, x, mask=inside)
    x = norm_row(x, inside, width, weight, bias, columns, eps, NORM, NORM_BIAS)
    store_row(x, row, width, values, value_stride, value_scale, codes, terms, FORMAT, BLOCK_ROWS, CHUNKS, BLOCK)


@triton.jit
def normalize_product(
    product, splits_stride, row_stride, product_bias, first, weight, bias, eps, width,
    SPLITS: tl.constexpr, PRODUCT_BIAS: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The columns from `first` on of a product, summed and normed over the row, into its first split. Grid: rows."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = load_sum(
        product, product_bias, row * row_stride, first + columns, inside, splits_stride, SPLITS,
        PRODUCT_BIAS,
    )  # fmt: skip
    x = norm_row(x, inside, width, weight, bias, columns, eps, NORM, NORM_BIAS)
    tl.store(product + row * row_stride + first + columns, x, mask=inside)
