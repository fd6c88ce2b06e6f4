"""Inputs of a gated delta net: its convolution over the tokens of a step and those before, norms, gates, decays.

A sequence's last inputs lie in a ring: float32 [slots, RING, WIDTH], the token at position p at place p % RING, with
its queries, keys and values before the convolution, then betas, then decays. Inputs of tokens in the step are read
from the sums of the matmuls, those of earlier tokens from the ring, and tokens before the first count as zeros.

Programs have the features of a head padded to a power of two: those beyond the head are zeros, in states too, and are
not stored.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.reduce import load_sum


@triton.constexpr_function
def padded(size):
    """Features of a head as its programs have them: a power of two, and as many as a matrix unit takes."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def own(mask, features, SIZE: tl.constexpr):
    """A mask without the features beyond a head's SIZE."""
    if SIZE != padded(SIZE):
        mask = mask & (features < SIZE)
    return mask


@triton.jit
def store_state(at, state, keys, values, KEY: tl.constexpr, VALUE: tl.constexpr):
    """Write a head's state [keys, values], or some columns of it."""
    if (KEY == padded(KEY)) & (VALUE == padded(VALUE)):
        tl.store(at, state)
    else:
        tl.store(at, state, mask=(keys < KEY)[:, None] & (values < VALUE)[None, :])


@triton.jit
def stepped(
    partials, splits_stride, token_stride, bias, rings, slot, start, position, offset, columns, ring_columns, mask,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """float32: a row's inputs `offset` tokens after its first of the step; negative ones come from the ring.

    offset, columns, ring_columns, mask: of shapes that broadcast. start: the row's first token in the step; position:
    that token's in the sequence.
    """
    place = position + offset
    is_new = offset >= 0
    token_at = (start + offset).to(tl.int64) * token_stride
    new = load_sum(partials, bias, token_at, columns, mask & is_new, splits_stride, SPLITS, BIAS)
    ring_at = (slot.to(tl.int64) * RING + (place % RING)) * WIDTH
    old = tl.load(rings + ring_at + ring_columns, mask=mask & (offset < 0) & (place >= 0), other=0.0)
    return tl.where(is_new, new, old)


@triton.jit
def convolved(
    partials, splits_stride, token_stride, bias, rings, kernel, slot, start, position, offset, columns, mask,
    LENGTH: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """float32: silu of the convolution of some channels; arguments as of `stepped`. kernel: [channels, LENGTH]."""
    total = tl.zeros_like(columns + offset).to(tl.float32)
    for tap in tl.static_range(LENGTH):
        x = stepped(
            partials, splits_stride, token_stride, bias, rings, slot, start, position, offset + (tap - LENGTH + 1),
            columns, columns, mask, SPLITS, BIAS, RING, WIDTH,
        )  # fmt: skip
        total += x * tl.load(kernel + columns * LENGTH + tap, mask=mask, other=0.0)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def unit(x, axis: tl.constexpr):
    """Vectors along an axis over their length, as models of gated delta nets do it."""
    return x / tl.expand_dims(tl.sqrt(tl.sum(x * x, axis=axis) + 1e-6), axis)


@triton.jit
def log_decay(x, rate):
    """rate * softplus(x), exact also where softplus is small."""
    e = tl.exp(tl.minimum(x, 30.0))
    u = 1.0 + e
    correction = tl.where(u > 1.0, e / tl.where(u > 1.0, u - 1.0, 1.0), 1.0)
    small = tl.where(u > 1.0, tl.log(u) * correction, e)
    return rate * tl.where(x > 30.0, x, small)


@triton.jit
def key_head_of(head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, TILED: tl.constexpr):
    if TILED:
        return head % KEY_HEADS
    return head // (VALUE_HEADS // KEY_HEADS)
