"""The recurrence of gated delta nets where each row of a step has one token: all of a layer between its two matmuls.

States, the inputs of earlier tokens and vectors were written before the step began, so they are asked for while the
matmul before still runs. What a ring keeps of the token is written here: its place is none that is read, since a ring
has room for one token more than a convolution sees and may be replayed. Rows of the table are those of `delta_net`.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.activate import SIGMOID
from realizar.backends.cuda.kernels.dependent import let_next_start, wait_for_previous
from realizar.backends.cuda.kernels.gate_heads import gated
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.recurrences.delta_inputs import key_head_of, log_decay, own, padded, store_state
from realizar.backends.cuda.kernels.recurrences.delta_net import load_row
from realizar.backends.cuda.kernels.reduce import load_sum
from realizar.backends.cuda.kernels.store_inputs import HALF, SCALED, store_block, store_values


@triton.jit
def earlier(
    rings, kernel, slot, position, columns, mask, LENGTH: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """float32 [columns]: what the tokens before `position` add to the convolution of some channels."""
    total = tl.zeros_like(columns).to(tl.float32)
    for tap in tl.static_range(LENGTH - 1):
        place = position + (tap - LENGTH + 1)
        at = (slot.to(tl.int64) * RING + place % RING) * WIDTH
        x = tl.load(rings + at + columns, mask=mask & (place >= 0), other=0.0)
        total += x * tl.load(kernel + columns * LENGTH + tap, mask=mask, other=0.0)
    return total


@triton.jit
def load_own(at, mask, SIZE: tl.constexpr):
    """Numbers of a head's features; without a mask where the head has no others."""
    if SIZE == padded(SIZE):
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def advanced(state, qk, v, beta, decay, head_bias, head_rate, scale):
    """The state [keys, columns] after one more token, and its output [columns].

    qk: [keys, 2], sums of the convolution, of queries and keys side by side: a block of at least as many numbers as the
    program has threads, of which none loads or computes one twice. v: [columns]. beta, decay: as they come in.
    """
    qk, v = silu(qk), silu(v)
    q, k = tl.split(qk / tl.sqrt(tl.sum(qk * qk, axis=0) + 1e-6)[None, :])
    beta = 1.0 / (1.0 + tl.exp(-beta))
    decay = tl.exp(log_decay(decay + head_bias, head_rate))
    known = tl.sum(k[:, None] * state, axis=0)
    asked = tl.sum(q[:, None] * state, axis=0)
    lacking = beta * (v - decay * known)
    result = scale * (decay * asked + tl.sum(q * k, axis=0) * lacking)
    return decay * state + k[:, None] * lacking[None, :], result


@launched
def recur_once(
    partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, states, recurring, output,
    output_stride, scale, norm_weight, eps, values, value_stride, value_scale, codes, terms, token_tops, token_arrivals,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, TILED: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token of each row, BLOCK columns of a head's state each. Grid: rows, value heads, blocks of columns.

    GATED: a block is a whole head; its output goes through norm and gate, and into a matmul's format. Otherwise it is
    left in `output`, float32 [tokens, value heads * VALUE].
    """
    let_next_start(DEPENDENT)
    row_slot, start, _count, replay, certain, position, _is_scanned = load_row(recurring, tl.program_id(0))
    is_row, slot = row_slot >= 0, tl.maximum(row_slot, 0)
    head, part = tl.program_id(1), tl.program_id(2)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    keys, columns = tl.arange(0, padded(KEY)), part * BLOCK + tl.arange(0, BLOCK)
    at = states + (slot.to(tl.int64) * VALUE_HEADS + head) * (KEY * VALUE) + keys[:, None] * VALUE + columns[None, :]
    known = own(is_row & (position > replay) & (keys[:, None] >= 0), keys[:, None], KEY)
    state = tl.load(at, mask=own(known, columns[None, :], VALUE), other=0.0)
    of_qk = key_head * KEY + keys[:, None] + tl.arange(0, 2)[None, :] * (KEY_HEADS * KEY)
    of_v, of_beta = 2 * KEY_HEADS * KEY + head * VALUE + columns, channels + head
    live, inside = own(is_row & (of_qk >= 0), keys[:, None], KEY), own(is_row & (columns >= 0), columns, VALUE)
    past_qk = earlier(rings, kernel, slot, position, of_qk, live, LENGTH, RING, WIDTH)
    past_v = earlier(rings, kernel, slot, position, of_v, inside, LENGTH, RING, WIDTH)
    tap_qk = load_own(kernel + of_qk * LENGTH + (LENGTH - 1), live, KEY)
    tap_v = load_own(kernel + of_v * LENGTH + (LENGTH - 1), inside, VALUE)
    head_bias, head_rate = tl.load(decay_bias + head), tl.load(rate + head)
    weight = tl.load(norm_weight + columns, mask=inside & GATED, other=0.0)
    wait_for_previous(DEPENDENT)
    if row_slot < 0:
        return
    ring = rings + slot.to(tl.int64) * (RING * WIDTH)
    for offset in tl.range(-replay, 0):
        place = position + offset
        old = ring + place % RING * WIDTH
        qk = earlier(rings, kernel, slot, place, of_qk, live, LENGTH, RING, WIDTH)
        qk += tap_qk * load_own(old + of_qk, live, KEY)
        v = earlier(rings, kernel, slot, place, of_v, inside, LENGTH, RING, WIDTH)
        v += tap_v * load_own(old + of_v, inside, VALUE)
        beta, decay = tl.load(old + of_beta), tl.load(old + of_beta + VALUE_HEADS)
        state, _ = advanced(state, qk, v, beta, decay, head_bias, head_rate, scale)
    token_at, gate_at = start.to(tl.int64) * token_stride, channels + head * VALUE
    stored_beta = channels + VALUE_HEADS * VALUE + head
    new_qk = load_sum(partials, bias, token_at, of_qk, live, splits_stride, SPLITS, BIAS)
    new_v = load_sum(partials, bias, token_at, of_v, inside, splits_stride, SPLITS, BIAS)
    beta = load_sum(partials, bias, token_at, stored_beta, is_row, splits_stride, SPLITS, BIAS)
    decay = load_sum(partials, bias, token_at, stored_beta + VALUE_HEADS, is_row, splits_stride, SPLITS, BIAS)
    if GATED:
        gate = load_sum(partials, bias, token_at, gate_at + columns, inside, splits_stride, SPLITS, BIAS)
    qk, v = past_qk + new_qk * tap_qk, past_v + new_v * tap_v
    after, result = advanced(state, qk, v, beta, decay, head_bias, head_rate, scale)
    store_state(at, tl.where(certain > 0, after, state), keys, columns, KEY, VALUE)

    kept = ring + position % RING * WIDTH
    is_first = part == 0
    if TILED:
        owns_key = is_first & (head < KEY_HEADS)
    else:
        owns_key = is_first & (head % (VALUE_HEADS // KEY_HEADS) == 0)
    tl.store(kept + of_qk, new_qk, mask=live & owns_key)
    tl.store(kept + of_v, new_v, mask=inside)
    tl.store(kept + of_beta, beta, mask=is_first)
    tl.store(kept + of_beta + VALUE_HEADS, decay, mask=is_first)

    to = output + start.to(tl.int64) * output_stride
    if GATED:
        tl.static_assert(BLOCK == VALUE)
        first, width = head * VALUE, VALUE_HEADS * VALUE
        x = result / tl.sqrt(tl.sum(result * result, axis=0) / VALUE + eps) * weight * silu(gate)
        if (FORMAT == SCALED) or (FORMAT == HALF):  # the last head to be done may have to divide all of them
            tl.store(to + head * VALUE + columns, result)
        factor = store_block(
            x, start, first, width, values, value_stride, value_scale, codes, terms, token_tops, token_arrivals, FORMAT,
            BLOCK_TOKENS, CHUNKS, BLOCK,
        )  # fmt: skip
        if factor != 1.0:
            for other in tl.range(0, VALUE_HEADS):
                first = other * VALUE
                x = gated(
                    output, start.to(tl.int64) * output_stride, partials, splits_stride, token_at, bias, channels,
                    norm_weight, eps, width, first, SPLITS, BIAS, True, VALUE, SIGMOID, BLOCK,
                )  # fmt: skip
                store_values(
                    x / factor, start, first, width, values, value_stride, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS,
                    BLOCK,
                )  # fmt: skip
    elif VALUE == padded(VALUE):
        tl.store(to + head * VALUE + columns, result)
    else:
        tl.store(to + head * VALUE + columns, result, mask=columns < VALUE)
