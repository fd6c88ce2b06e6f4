"""Gated short convolutions: their output as the input of the output projection, and what a ring keeps of a token."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.reduce import load_sum
from realizar.backends.cuda.kernels.store_inputs import store_block, store_values


@triton.jit
def gated_input(
    partials, splits_stride, token_at, bias, channels, columns, mask, SPLITS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """float32 [columns]: b * x of a token, the first and the last third of its inputs."""
    b = load_sum(partials, bias, token_at, columns, mask, splits_stride, SPLITS, BIAS)
    return b * load_sum(partials, bias, token_at, 2 * channels + columns, mask, splits_stride, SPLITS, BIAS)


@triton.jit
def mixed(
    partials, splits_stride, token_stride, bias, rings, slot, offset, position, kernel, kernel_bias, channels, token,
    first,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KERNEL_BIAS: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK]: the gated convolution of a token's channels from `first` on; 0 beyond `channels`."""
    columns = first + tl.arange(0, BLOCK)
    inside = columns < channels
    total = tl.zeros([BLOCK], tl.float32)
    if KERNEL_BIAS:
        total += tl.load(kernel_bias + columns, mask=inside, other=0.0)
    for tap in tl.static_range(LENGTH):
        back = LENGTH - 1 - tap
        is_new = offset >= back
        at = (token - back) * token_stride
        new = gated_input(partials, splits_stride, at, bias, channels, columns, inside & is_new, SPLITS, BIAS)
        place = position - back
        ring_at = (slot.to(tl.int64) * RING + (place % RING)) * channels
        old = tl.load(rings + ring_at + columns, mask=inside & (offset < back) & (place >= 0), other=0.0)
        total += tl.where(is_new, new, old) * tl.load(kernel + columns * LENGTH + tap, mask=inside, other=0.0)
    gate_at = token * token_stride
    gate = load_sum(partials, bias, gate_at, channels + columns, inside, splits_stride, SPLITS, BIAS)
    return tl.where(inside, gate * total, 0.0)


@launched
def convolve(
    partials, splits_stride, token_stride, bias, rings, slots, offsets, positions, kernel, kernel_bias, channels,
    values, value_stride, value_scale, codes, terms, token_tops, token_arrivals,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KERNEL_BIAS: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's gated convolution, in a matmul's format. Grid: tokens, blocks of columns.

    slots, offsets, positions: int32 [tokens], a token's slot, its place among its row's tokens of the step, and that in
    its sequence. rings: float32 [slots, RING, channels] of b * x. kernel: [channels, LENGTH].
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    slot, offset, position = tl.load(slots + token), tl.load(offsets + token), tl.load(positions + token)
    slot = tl.maximum(slot, 0)  # what a padded token gives is never read
    x = mixed(
        partials, splits_stride, token_stride, bias, rings, slot, offset, position, kernel, kernel_bias, channels,
        token, first, SPLITS, BIAS, KERNEL_BIAS, LENGTH, RING, BLOCK,
    )  # fmt: skip
    factor = store_block(
        x, token, first, channels, values, value_stride, value_scale, codes, terms, token_tops, token_arrivals, FORMAT,
        BLOCK_TOKENS, CHUNKS, BLOCK,
    )  # fmt: skip
    if factor != 1.0:
        for block in tl.range(0, tl.num_programs(1)):
            first = block * BLOCK
            x = mixed(
                partials, splits_stride, token_stride, bias, rings, slot, offset, position, kernel, kernel_bias,
                channels, token, first, SPLITS, BIAS, KERNEL_BIAS, LENGTH, RING, BLOCK,
            )  # fmt: skip
            x = x / factor
            store_values(
                x, token, first, channels, values, value_stride, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK
            )


@launched
def keep_gated(
    partials, splits_stride, token_stride, bias, ring_slots, rings, channels,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write tokens' b * x to their rings. Grid: tokens / TOKENS, blocks of columns. ring_slots: as of `keep_inputs`."""
    begin(DEPENDENT)
    first = tl.program_id(0) * TOKENS
    if tl.max(tl.load(ring_slots + first + tl.arange(0, TOKENS)), axis=0) < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    for i in tl.static_range(TOKENS):
        token = first + i
        slot = tl.load(ring_slots + token)
        if slot >= 0:
            at = token.to(tl.int64) * token_stride
            x = gated_input(partials, splits_stride, at, bias, channels, columns, inside, SPLITS, BIAS)
            tl.store(rings + slot.to(tl.int64) * channels + columns, x, mask=inside)
