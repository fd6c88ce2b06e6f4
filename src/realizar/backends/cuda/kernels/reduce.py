"""Sums of a matmul's splits, always in the same order."""

import triton
import triton.language as tl

HALF_FACTOR = tl.constexpr(16.0)
"""What sums in float16 were divided by: they reach 1e6, and what they lose is at most 2^-21."""
BOUNDS = tl.constexpr(2)
"""A BIAS that is none: in its place are the least and the largest that numbers may be, float32 [places, 2]."""


@triton.jit
def load_bounds(bounds, place):
    """The least and the largest of a place: before what they bound is loaded, as both are waited for together then."""
    return tl.load(bounds + 2 * place), tl.load(bounds + 2 * place + 1)


@triton.jit
def bounded(x, low, high, mask):
    """x within bounds, and 0 where it is masked; NaN stays."""
    return tl.where(mask, tl.where(x < low, low, tl.where(x > high, high, x)), 0.0)


@triton.jit
def load_sum(
    partials, bias, token_at, columns, mask, splits_stride, SPLITS: tl.constexpr, BIAS: tl.constexpr, place=0
):  # fmt: skip
    """float32 of one token, in the shape of `columns`: the sum of a matmul's splits, plus the bias; or with a BIAS of
    BOUNDS within those of a place.
    """
    if BIAS == BOUNDS:
        low, high = load_bounds(bias, place)
    at = partials + token_at + columns
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * splits_stride, mask=mask, other=0.0).to(tl.float32)
    if partials.dtype.element_ty == tl.float16:
        total *= HALF_FACTOR
    if BIAS == BOUNDS:
        total = bounded(total, low, high, mask)
    elif BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0)
    return total
