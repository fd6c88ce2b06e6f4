"""The embedding of a step's tokens, quantised or of floats.

A token with a given embedding has the id -2 - id: where GIVEN, its place in the output is left as it is.

Of a rank's PART the table has `count` rows from `first` on, and what another rank has is zeros here: 1 is the first
rank's, and 2 any other's, where given embeddings are zeros as well.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.plain_weights import load_weights


@triton.jit
def resolve_tokens(ids, token_rows, last, at, mask):
    """Token ids, and where an embedding is given; -1 stands for what the row's step before sampled."""
    token = tl.load(ids + at, mask=mask, other=0)
    is_given = token < -1
    token = tl.where(is_given, -2 - token, token)
    row = tl.load(token_rows + at, mask=mask, other=0)
    return tl.where(token < 0, tl.load(last + row, mask=mask & (token < 0), other=0), token), is_given


@triton.jit
def own_row(row, is_given, first, count, PART: tl.constexpr):
    """The row of a rank's table, and whether it has one."""
    if PART == 0:
        return row, row >= 0
    row = row - first
    is_own = (row >= 0) & (row < count)
    if PART == 2:
        is_own = is_own & (is_given == 0)
    return tl.where(is_own, row, 0), is_own


@launched
def embed_quantized(
    ids, token_rows, last, out, out_stride, scale, low, high, small, small_minima, supers, super_minima, codebook,
    signs, cols, first, count,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    MINIMA: tl.constexpr, VECTOR: tl.constexpr, CODEBOOK: tl.constexpr, SIGNS: tl.constexpr, GIVEN: tl.constexpr,
    DEPENDENT: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """out [tokens, cols] = scale * rows of the embedding. Grid: tokens, blocks of columns."""
    begin(DEPENDENT)
    at = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, is_given = resolve_tokens(ids, token_rows, last, at, at >= 0)
    row, is_own = own_row(row, is_given, first, count, PART)
    values = load_weights(
        low, high, small, small_minima, supers, super_minima, codebook, signs, row, columns, cols, is_own,
        LOW, HIGH, OFFSET, GROUP, SUPER, MINIMA, VECTOR, CODEBOOK, SIGNS,
    )  # fmt: skip
    place = at.to(tl.int64)[:, None] * out_stride + columns[None, :]
    mask = (columns < cols)[None, :]
    if PART != 0:
        values = tl.where(is_own[:, None], values, 0.0)
    if GIVEN and PART != 2:
        mask = mask & ~is_given[:, None]
    tl.store(out + place, values * scale, mask=mask)


@launched
def embed_floats(
    ids, token_rows, last, out, out_stride, scale, weights, cols, first, count, GIVEN: tl.constexpr,
    DEPENDENT: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """out [tokens, cols] = scale * rows of an embedding of floats. Grid: tokens, blocks of columns."""
    begin(DEPENDENT)
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < cols
    row, is_given = resolve_tokens(ids, token_rows, last, token, token >= 0)
    row, is_own = own_row(row, is_given, first, count, PART)
    is_read = inside if PART == 0 else inside & is_own
    values = tl.load(weights + row.to(tl.int64) * cols + columns, mask=is_read, other=0.0).to(tl.float32)
    if GIVEN and PART != 2:
        inside = inside & ~is_given
    tl.store(out + token.to(tl.int64) * out_stride + columns, values * scale, mask=inside)
