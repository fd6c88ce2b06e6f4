"""The recurrence of gated delta nets, token by token: for decodes, drafts and short chunks, and all with fixed order.

A row of the table `recurring`, int32 [rows, 8]: slot, first token in the step, tokens, tokens to replay before them,
tokens of the step that are certain, position of the first, whether the row is scanned, and its first tile then. A slot
of -1 is no row. States are float32 [slots, value heads, key size, value size].

A state is kept as it is after the replayed and the certain tokens; the others go on from there in registers.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
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
def advance(
    state, partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, slot, start, position, offset,
    head, key_head, keys, values, output, output_stride, scale,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The state [keys, values] after one more token, whose output is written if it is in the step."""
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
    q, k = unit(q, 0) * scale, unit(k, 0)
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
    beta = 1.0 / (1.0 + tl.exp(-beta))
    decay = tl.exp(log_decay(decay + tl.load(decay_bias + gates), tl.load(rate + gates)))
    known = tl.sum(k[:, None] * state, axis=0)
    asked = tl.sum(q[:, None] * state, axis=0)
    lacking = beta * (v - decay * known)
    result = decay * asked + tl.sum(q * k, axis=0) * lacking
    at = output + (start + offset).to(tl.int64) * output_stride + head * VALUE + values
    tl.store(at, result, mask=inside & (offset >= 0))
    return decay[:, None] * state + k[:, None] * lacking[None, :]


@triton.jit
def recur(
    partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, states, recurring, output,
    output_stride, scale,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
    TILED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rows that are not scanned, BLOCK columns of a head's state each. Grid: rows, value heads, blocks of columns.

    output: float32 [tokens, value heads * VALUE], of tokens in the step; before norm and output gate.
    """
    begin(DEPENDENT)
    slot, start, count, replay, certain, position, is_scanned = load_row(recurring, tl.program_id(0))
    if (slot < 0) | (is_scanned != 0):
        return
    head = tl.program_id(1)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
    keys = tl.arange(0, padded(KEY))
    values = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at = states + (slot.to(tl.int64) * VALUE_HEADS + head) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    mask = own(own((position > replay) & (keys[:, None] >= 0), keys[:, None], KEY), values[None, :], VALUE)
    state = tl.load(at, mask=mask, other=0.0)
    for offset in tl.range(-replay, certain):
        state = advance(
            state, partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, slot, start, position,
            offset, head, key_head, keys, values, output, output_stride, scale, SPLITS, BIAS, KEY_HEADS, VALUE_HEADS,
            KEY, VALUE, LENGTH, RING, WIDTH,
        )  # fmt: skip
    store_state(at, state, keys, values, KEY, VALUE)
    for offset in tl.range(certain, count):
        state = advance(
            state, partials, splits_stride, token_stride, bias, rings, kernel, decay_bias, rate, slot, start, position,
            offset, head, key_head, keys, values, output, output_stride, scale, SPLITS, BIAS, KEY_HEADS, VALUE_HEADS,
            KEY, VALUE, LENGTH, RING, WIDTH,
        )  # fmt: skip
