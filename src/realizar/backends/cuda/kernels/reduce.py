"""Sums of a matmul's splits, always in the same order."""

import triton
import triton.language as tl

HALF_FACTOR = tl.constexpr(16.0)
"""What sums in float16 were divided by: they reach 1e6, and what they lose is at most 2^-21."""


@triton.jit
def load_sum(
    partials, bias, token_at, columns, mask, splits_stride, SPLITS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """float32 of one token, in the shape of `columns`: the sum of a matmul's splits, plus the bias."""
    at = partials + token_at + columns
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * splits_stride, mask=mask, other=0.0).to(tl.float32)
    if partials.dtype.element_ty == tl.float16:
        total *= HALF_FACTOR
    if BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0)
    return total
