"""Quantised weights out of `weights.plain`'s layout: embedding rows, and the matmul for GPUs without CUDA C++."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin


@triton.jit
def load_codes(plane, at, columns, mask, WIDTH: tl.constexpr):
    """Codes of WIDTH bits, packed into bytes from the lowest bit on; `at` are the byte offsets of the rows."""
    place = at + (columns * WIDTH // 8)[None, :]
    byte = tl.load(plane + place, mask=mask, other=0).to(tl.int32)
    return (byte >> (columns * WIDTH % 8)[None, :]) & ((1 << WIDTH) - 1)


@triton.jit
def load_weights(
    low, high, small, small_minima, supers, super_minima, codebook, signs, rows, columns, cols, row_mask,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    MINIMA: tl.constexpr, VECTOR: tl.constexpr, CODEBOOK: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """float32 [rows, columns] of a matrix of `cols` columns; 0 beyond its edges.

    VECTOR above 1: `low` has uint16 indices of codebook entries of so many weights.
    """
    mask = row_mask[:, None] & (columns < cols)[None, :]
    rows = rows.to(tl.int64)[:, None]
    if VECTOR > 1:
        index = tl.load(low + rows * (cols // VECTOR) + (columns // VECTOR)[None, :], mask=mask, other=0).to(tl.int32)
        values = tl.load(codebook + index * VECTOR + (columns % VECTOR)[None, :], mask=mask, other=0).to(tl.float32)
    else:
        code = load_codes(low, rows * (cols * LOW // 8), columns, mask, LOW)
        if HIGH > 0:
            code += load_codes(high, rows * (cols * HIGH // 8), columns, mask, HIGH) << LOW
        if CODEBOOK:
            values = tl.load(codebook + code, mask=mask, other=0).to(tl.float32)
        else:
            values = (code - OFFSET).to(tl.float32)
    if SIGNS:
        negative = load_codes(signs, rows * (cols // 8), columns, mask, 1)
        values = tl.where(negative == 1, -values, values)
    group = rows * (cols // GROUP) + (columns // GROUP)[None, :]
    scale = tl.load(small + group, mask=mask, other=0).to(tl.float32)
    if SUPER > 0:
        larger = rows * (cols // SUPER) + (columns // SUPER)[None, :]
        scale *= tl.load(supers + larger, mask=mask, other=0.0).to(tl.float32)
    values *= scale
    if MINIMA:
        minimum = tl.load(small_minima + group, mask=mask, other=0).to(tl.float32)
        if SUPER > 0:
            minimum *= tl.load(super_minima + larger, mask=mask, other=0.0).to(tl.float32)
        values += minimum
    return values


@triton.jit
def resolve_tokens(ids, token_rows, last, at, mask):
    """Token ids; -1 stands for the choice of the row's step before."""
    token = tl.load(ids + at, mask=mask, other=0)
    row = tl.load(token_rows + at, mask=mask, other=0)
    return tl.where(token < 0, tl.load(last + row, mask=mask & (token < 0), other=0), token)


@triton.jit
def embed_quantized(
    ids, token_rows, last, out, out_stride, scale, low, high, small, small_minima, supers, super_minima, codebook,
    signs, cols,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    MINIMA: tl.constexpr, VECTOR: tl.constexpr, CODEBOOK: tl.constexpr, SIGNS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [tokens, cols] = scale * rows of the embedding. Grid: tokens, blocks of columns."""
    begin(DEPENDENT)
    at = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = resolve_tokens(ids, token_rows, last, at, at >= 0)
    values = load_weights(
        low, high, small, small_minima, supers, super_minima, codebook, signs, row, columns, cols, row >= 0,
        LOW, HIGH, OFFSET, GROUP, SUPER, MINIMA, VECTOR, CODEBOOK, SIGNS,
    )  # fmt: skip
    place = at.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out + place, values * scale, mask=(columns < cols)[None, :])


@triton.jit
def embed_floats(
    ids, token_rows, last, out, out_stride, scale, weights, cols, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [tokens, cols] = scale * rows of an embedding of floats. Grid: tokens, blocks of columns."""
    begin(DEPENDENT)
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < cols
    row = resolve_tokens(ids, token_rows, last, token, token >= 0).to(tl.int64)
    values = tl.load(weights + row * cols + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * out_stride + columns, values * scale, mask=inside)


@triton.jit
def multiply(
    x, x_stride, x_scale, out, out_split, out_token, out_features, cols, num_tokens, low, high, small, small_minima,
    supers, super_minima, codebook, signs,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    MINIMA: tl.constexpr, VECTOR: tl.constexpr, CODEBOOK: tl.constexpr, SIGNS: tl.constexpr, SPLITS: tl.constexpr,
    COMPUTE: tl.constexpr, TOKENS: tl.constexpr, OUT_FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [splits, tokens, out_features] = x [tokens, cols] @ matrix.T. Grid: blocks of both, splits.

    `x_scale` [tokens] is the divisor of each token.
    """
    row = tl.program_id(0) * OUT_FEATURES + tl.arange(0, OUT_FEATURES)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    blocks = (cols + COLUMNS - 1) // COLUMNS
    each = (blocks + SPLITS - 1) // SPLITS
    count = tl.maximum(tl.minimum(blocks - split * each, each), 0)
    sums = tl.zeros([TOKENS, OUT_FEATURES], tl.float32)
    here = (token < num_tokens)[:, None]
    for i in tl.range(0, count):
        column = (split * each + i) * COLUMNS + tl.arange(0, COLUMNS)
        w = load_weights(
            low, high, small, small_minima, supers, super_minima, codebook, signs, row, column, cols,
            row < out_features, LOW, HIGH, OFFSET, GROUP, SUPER, MINIMA, VECTOR, CODEBOOK, SIGNS,
        )  # fmt: skip
        at = token.to(tl.int64)[:, None] * x_stride + column[None, :]
        a = tl.load(x + at, mask=here & (column < cols)[None, :], other=0.0)
        sums += tl.dot(a.to(COMPUTE), tl.trans(w).to(COMPUTE), input_precision="ieee")
    sums *= tl.load(x_scale + token, mask=token < num_tokens, other=0.0)[:, None]
    place = out + split * out_split + token.to(tl.int64)[:, None] * out_token + row[None, :]
    tl.store(place, sums, mask=here & (row < out_features)[None, :])
