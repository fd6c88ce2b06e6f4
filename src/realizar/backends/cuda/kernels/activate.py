"""The feed-forward's activation, and the join of an attention's parts: both make the input of a product."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.activation import store_row
from realizar.backends.cuda.kernels.reduce import load_sum

SILU, GELU_TANH, GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def apply_activation(x, KIND: tl.constexpr):
    """silu, gelu's approximation by tanh, or gelu."""
    if KIND == SILU:
        return x / (1.0 + tl.exp(-x))
    if KIND == GELU_TANH:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activate(
    product, splits_stride, row_stride, bias, up_at, width, values, value_stride,
    value_scale, codes, terms,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up, or activation(up). Grid: rows, blocks of columns.

    A row of `product` holds the gate from column 0 and up from `up_at`. Formats with a scale per row take one block.
    """
    row = tl.program_id(0).to(tl.int64)
    first_column = tl.program_id(1) * BLOCK
    columns = first_column + tl.arange(0, BLOCK)
    inside = columns < width
    x = load_sum(product, bias, row * row_stride, up_at + columns, inside, splits_stride, SPLITS, BIAS)
    if GATED:
        gate = load_sum(product, bias, row * row_stride, columns, inside, splits_stride, SPLITS, BIAS)
        x = apply_activation(gate, KIND) * x
    else:
        x = apply_activation(x, KIND)
    x = tl.where(inside, x, 0.0)
    store_row(
        x, row, first_column, width, values, value_stride, value_scale, codes, terms, FORMAT, BLOCK_ROWS, CHUNKS, BLOCK
    )


@triton.jit
def combine(
    partial, state, decodes, starts, sinks, width, values, value_stride, value_scale, codes, terms,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, SINKS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the parts of `attend_decode`, in their order, with the sinks. Grid: decodes, blocks of columns."""
    decode = tl.program_id(0).to(tl.int64)
    row = tl.load(decodes + decode)
    token = tl.load(starts + row, mask=row >= 0, other=0)
    first_column = tl.program_id(1) * BLOCK
    columns = first_column + tl.arange(0, BLOCK)
    inside = columns < width
    head = columns // HEAD
    first = decode * SPLITS * HEADS
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=inside, other=0.0)
    for split in tl.static_range(SPLITS):
        largest = tl.load(state + (first + split * HEADS + head) * 2, mask=inside, other=float("-inf"))
        top = tl.maximum(top, largest)
    reference = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK], tl.float32)
    if SINKS:
        total = tl.exp(tl.load(sinks + head, mask=inside, other=0.0) - reference)
    sums = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = first + split * HEADS
        largest = tl.load(state + (at + head) * 2, mask=inside, other=float("-inf"))
        live = inside & (largest > float("-inf"))
        weight = tl.exp(largest - reference)
        total += weight * tl.load(state + (at + head) * 2 + 1, mask=live, other=0.0)
        sums += weight * tl.load(partial + at * HEAD + columns, mask=live, other=0.0)
    x = tl.where(inside, sums / tl.where(total > 0.0, total, 1.0), 0.0)
    if row >= 0:
        store_row(
            x,
            token,
            first_column,
            width,
            values,
            value_stride,
            value_scale,
            codes,
            terms,
            FORMAT,
            BLOCK_ROWS,
            CHUNKS,
            BLOCK,
        )


@triton.jit
def convert(
    source, source_stride, width, values, value_stride, value_scale, codes, terms,
    FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 rows into a product's format. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    first_column = tl.program_id(1) * BLOCK
    columns = first_column + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(source + row * source_stride + columns, mask=inside, other=0.0)
    store_row(
        x, row, first_column, width, values, value_stride, value_scale, codes, terms, FORMAT, BLOCK_ROWS, CHUNKS, BLOCK
    )
