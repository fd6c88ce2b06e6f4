"""The recurrence of gated delta nets, token by token: for decodes, drafts and short chunks, and all with fixed order.

A row of the table `recurring`, int32 [rows, 8]: slot, first token in the step, tokens, tokens to replay before them,
tokens of the step that are certain, position of the first, whether the row is scanned, and its first tile then. A slot
of -1 is no row. States are float32 [slots, value heads, key size, value size].

A state is kept as it is after the replayed and the certain tokens; the others go on from there in registers.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import let_next_start, wait_for_previous
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.recurrences.delta_inputs import (
    convolved,
    key_head_of,
    log_decay,
    own,
    padded,
    stepped,
    store_state,
    unit,
)

ROW_FIELDS = tl.constexpr(8)


@triton.jit
def load_row(recurring, index):
    """Slot, start, count, replay, certain, position and whether scanned, of a row of the table."""
    at = recurring + index * ROW_FIELDS
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6),
    )  # fmt: skip


@triton.jit
def inputs_of(
    partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, slot, start, position, offset, head,
    key_head, keys, values, scale,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Query and key [keys], value [values], beta and decay of a token, as `advance` takes them."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    of_head, inside = own(keys >= 0, keys, KEY), own(values >= 0, values, VALUE)
    q = convolved(
        partials, splits_stride, token_stride, bias, rings, kernel, slot, start, position, offset,
        key_head * KEY + keys, of_head, LENGTH, SPLITS, BIAS, RING, WIDTH,
    )  # fmt: skip
    k = convolved(
        partials, splits_stride, token_stride, bias, rings, kernel, slot, start, position, offset,
        (KEY_HEADS + key_head) * KEY + keys, of_head, LENGTH, SPLITS, BIAS, RING, WIDTH,
    )  # fmt: skip
    v = convolved(
        partials, splits_stride, token_stride, bias, rings, kernel, slot, start, position, offset,
        2 * KEY_HEADS * KEY + head * VALUE + values, inside, LENGTH, SPLITS, BIAS, RING, WIDTH,
    )  # fmt: skip
    gates = head + tl.arange(0, 1)
    always = gates >= 0
    beta = stepped(
        partials, splits_stride, token_stride, bias, rings, slot, start, position, offset,
        channels + VALUE_HEADS * VALUE + gates, channels + gates, always, SPLITS, BIAS, RING, WIDTH,
    )  # fmt: skip
    decay = stepped(
        partials, splits_stride, token_stride, bias, rings, slot, start, position, offset,
        channels + VALUE_HEADS * (VALUE + 1) + gates, channels + VALUE_HEADS + gates, always, SPLITS, BIAS, RING, WIDTH,
    )  # fmt: skip
    decay = tl.exp(log_decay(decay + tl.load(decay_bias + gates), tl.load(rate + gates)))
    return unit(q, 0) * scale, unit(k, 0), v, 1.0 / (1.0 + tl.exp(-beta)), decay


@triton.jit
def advance(state, q, k, v, beta, decay):
    """The state [keys, values] after one more token, and the token's output [values]."""
    known = tl.sum(k[:, None] * state, axis=0)
    asked = tl.sum(q[:, None] * state, axis=0)
    lacking = beta * (v - decay * known)
    result = decay * asked + tl.sum(q * k, axis=0) * lacking
    return decay[:, None] * state + k[:, None] * lacking[None, :], result


@launched
def recur(
    partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, states, recurring, output,
    output_stride, scale,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
    TILED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rows that are not scanned, BLOCK columns of a head's state each. Grid: value heads, blocks of columns, rows.

    output: float32 [tokens, value heads * VALUE], of tokens in the step; before norm and output gate. What is replayed
    was written before the step began, so it is while the matmul before still runs; and a token's inputs are asked for
    before the one before it is done. Rows of padding come last: their programs wait too, in the place of others.
    """
    let_next_start(DEPENDENT)
    row_slot, start, count, replay, certain, position, is_scanned = load_row(recurring, tl.program_id(2))
    is_row, slot = (row_slot >= 0) & (is_scanned == 0), tl.maximum(row_slot, 0)
    head = tl.program_id(0)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
    keys = tl.arange(0, padded(KEY))
    values = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = states + (slot.to(tl.int64) * VALUE_HEADS + head) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    known = own(is_row & (position > replay) & (keys[:, None] >= 0), keys[:, None], KEY)
    state = tl.load(at, mask=own(known, values[None, :], VALUE), other=0.0)
    for offset in tl.range(tl.where(is_row, -replay, 0), 0):
        q, k, v, beta, decay = inputs_of(
            partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, slot, start, position, offset,
            head, key_head, keys, values, scale, SPLITS, BIAS, KEY_HEADS, VALUE_HEADS, KEY, VALUE, LENGTH, RING, WIDTH,
        )  # fmt: skip
        state, _ = advance(state, q, k, v, beta, decay)
    wait_for_previous(DEPENDENT)
    if not is_row:
        return
    q, k, v, beta, decay = inputs_of(
        partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, slot, start, position, 0, head,
        key_head, keys, values, scale, SPLITS, BIAS, KEY_HEADS, VALUE_HEADS, KEY, VALUE, LENGTH, RING, WIDTH,
    )  # fmt: skip
    if certain == 0:
        store_state(at, state, keys, values, KEY, VALUE)
    for offset in tl.range(0, count):
        following = tl.minimum(offset + 1, count - 1)
        next_q, next_k, next_v, next_beta, next_decay = inputs_of(
            partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, slot, start, position,
            following, head, key_head, keys, values, scale, SPLITS, BIAS, KEY_HEADS, VALUE_HEADS, KEY, VALUE, LENGTH,
            RING, WIDTH,
        )  # fmt: skip
        state, result = advance(state, q, k, v, beta, decay)
        to = output + (start + offset).to(tl.int64) * output_stride + head * VALUE + values
        tl.store(to, result, mask=own(values >= 0, values, VALUE))
        if offset == certain - 1:
            store_state(at, state, keys, values, KEY, VALUE)
        q, k, v, beta, decay = next_q, next_k, next_v, next_beta, next_decay
