"""The recurrence of gated delta nets over chunks of prompts: in tiles of tokens, on matrix units.

Within a tile, with the decays' running product d, the tokens' shares of the state are linked by
A[t, s] = beta[t] * (k[t] . k[s]) * d[t] / d[s] for s < t, and T = (I + A)^-1 unlinks them. `scan_prepare` makes, for
all tiles side by side, of what `scan_inputs` left of their tokens,

    u = T (beta v),  w = T (beta d k),  p[t, s] = (q[t] . k[s]) d[t] / d[s] for s <= t,  d q,  and k * d[end] / d

and `scan_states` walks the tiles of a row: with the state S before a tile, its new values are n = u - w S, its outputs
(d q) S + p n, and the state after it d[end] S + (k d[end] / d)^T n. The end of a tile is its last certain token.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.recurrences.delta_inputs import (
    convolved,
    key_head_of,
    log_decay,
    own,
    padded,
    store_state,
    unit,
)
from realizar.backends.cuda.kernels.recurrences.delta_net import load_row

TILE = tl.constexpr(64)  # tokens
_PART = tl.constexpr(8)  # tokens of a part of a tile, whose links are undone first


@triton.jit
def unlinked(a, PRECISION: tl.constexpr):
    """(I + a)^-1 of a float32 [TILE, TILE] with nothing on and above the diagonal.

    The inverse of I + x with x^8 = 0 is (I - x)(I + x^2)(I + x^4). Links within parts of 8 tokens are such an x, and so
    are, once those are undone, the links between the 8 parts: no power beyond the seventh is made, and none grows far.
    """
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    is_near = rows // _PART == columns // _PART
    near = tl.where(is_near, a, 0.0)
    square = tl.dot(near, near, input_precision=PRECISION)
    own = tl.where(rows == columns, 1.0, 0.0) - near
    own += tl.dot(own, square, input_precision=PRECISION)
    own += tl.dot(own, tl.dot(square, square, input_precision=PRECISION), input_precision=PRECISION)
    far = tl.dot(own, tl.where(is_near, 0.0, a), input_precision=PRECISION)
    square = tl.dot(far, far, input_precision=PRECISION)
    own += tl.dot(tl.dot(square, square, input_precision=PRECISION), own, input_precision=PRECISION)
    own += tl.dot(square, own, input_precision=PRECISION)
    return own - tl.dot(far, own, input_precision=PRECISION)


@triton.jit
def times(a, b, PRECISION: tl.constexpr):
    """a @ b; a of float32, or of float16, which has as many digits as tf32."""
    return tl.dot(a.to(tl.float32), b, input_precision=PRECISION)


@launched
def scan_inputs(
    partials, splits_stride, token_stride, bias, rings, kernel, recurring, tile_rows, tile_firsts, mixed, scale,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile's queries, keys and values after the convolution, and after norms. Grid: tiles, heads, TILE / TOKENS.

    Heads are those of queries, keys, then values. mixed: float32 [tokens, channels].
    """
    begin(DEPENDENT)
    index, head = tl.load(tile_rows + tl.program_id(0)), tl.program_id(1)
    if index < 0:
        return
    slot, start, count, _replay, _certain, position, _ = load_row(recurring, index)
    offset = tl.load(tile_firsts + tl.program_id(0)) + tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    inside = (offset < count)[:, None]
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    to = mixed + (start + offset).to(tl.int64)[:, None] * channels
    if head < 2 * KEY_HEADS:
        keys = tl.arange(0, padded(KEY))[None, :]
        of_keys, live_keys = head * KEY + keys, own(inside, keys, KEY)
        k = convolved(
            partials, splits_stride, token_stride, bias, rings, kernel, slot, start, position, offset[:, None],
            of_keys, live_keys & (of_keys >= 0), LENGTH, SPLITS, BIAS, RING, WIDTH,
        )  # fmt: skip
        tl.store(to + of_keys, unit(k, 1) * tl.where(head < KEY_HEADS, scale, 1.0), mask=live_keys)
    else:
        values = tl.arange(0, padded(VALUE))[None, :]
        of_values = 2 * KEY_HEADS * KEY + (head - 2 * KEY_HEADS) * VALUE + values
        live_values = own(inside, values, VALUE)
        v = convolved(
            partials, splits_stride, token_stride, bias, rings, kernel, slot, start, position, offset[:, None],
            of_values, live_values & (of_values >= 0), LENGTH, SPLITS, BIAS, RING, WIDTH,
        )  # fmt: skip
        tl.store(to + of_values, v, mask=live_values)


@launched
def scan_prepare(
    partials, splits_stride, token_stride, bias, decay_bias, rate, recurring, tile_rows, tile_firsts, mixed,
    new, linked, queries, kept, scores, ends,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What a tile's states need that its own tokens give. Grid: tiles, value heads.

    tile_rows, tile_firsts: int32 [tiles], row of `recurring` and first token in it; -1 is no tile. new: float32
    [tokens, value heads, VALUE]. linked, queries, kept: [tokens, value heads, KEY], scores: [tokens, value heads,
    TILE]: float32, or float16, which holds them since none is beyond one. ends: float32 [tokens, value heads], the
    logarithm of a tile's decay at its first token.
    """
    begin(DEPENDENT)
    index, head = tl.load(tile_rows + tl.program_id(0)), tl.program_id(1)
    if index < 0:
        return
    first = tl.load(tile_firsts + tl.program_id(0))
    _slot, start, count, _replay, certain, _position, _ = load_row(recurring, index)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
    tokens = tl.arange(0, TILE)
    offset = first + tokens
    inside = offset < count
    keys, values = tl.arange(0, padded(KEY))[None, :], tl.arange(0, padded(VALUE))[None, :]
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    token = (start + offset).to(tl.int64)
    at = token * VALUE_HEADS + head  # of a token and head in the results

    gates_at = partials + token * token_stride + channels + VALUE_HEADS * VALUE + head
    beta = tl.load(gates_at, mask=inside, other=0.0)
    decay = tl.load(gates_at + VALUE_HEADS, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        beta += tl.load(gates_at + split * splits_stride, mask=inside, other=0.0)
        decay += tl.load(gates_at + VALUE_HEADS + split * splits_stride, mask=inside, other=0.0)
    if BIAS:
        beta += tl.load(bias + channels + VALUE_HEADS * VALUE + head)
        decay += tl.load(bias + channels + VALUE_HEADS * (VALUE + 1) + head)
    decay = log_decay(decay + tl.load(decay_bias + head), tl.load(rate + head))
    summed = tl.cumsum(tl.where(inside, decay, 0.0), axis=0)
    beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    end = tl.sum(tl.where(offset == tl.minimum(first + TILE, certain) - 1, summed, 0.0), axis=0)
    tl.store(ends + (start + first).to(tl.int64) * VALUE_HEADS + head, end)

    of_key, of_value = own(inside[:, None], keys, KEY), own(inside[:, None], values, VALUE)
    k = tl.load(mixed + token[:, None] * channels + (KEY_HEADS + key_head) * KEY + keys, mask=of_key, other=0.0)
    is_kept = (offset < certain) & inside
    to_end = tl.where(is_kept, tl.exp(tl.where(is_kept, end - summed, 0.0)), 0.0)
    tl.store(kept + at[:, None] * KEY + keys, k * to_end[:, None], mask=of_key)
    later = tokens[:, None] >= tokens[None, :]
    ratio = tl.where(later, tl.exp(tl.where(later, summed[:, None] - summed[None, :], 0.0)), 0.0)
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    inverse = unlinked(tl.where(tokens[:, None] > tokens[None, :], alike * ratio * beta[:, None], 0.0), PRECISION)
    grown = tl.exp(summed)
    w = tl.dot(inverse, k * (beta * grown)[:, None], input_precision=PRECISION)
    tl.store(linked + at[:, None] * KEY + keys, w, mask=of_key)

    q = tl.load(mixed + token[:, None] * channels + key_head * KEY + keys, mask=of_key, other=0.0)
    tl.store(queries + at[:, None] * KEY + keys, q * grown[:, None], mask=of_key)
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * ratio
    tl.store(scores + at[:, None] * TILE + tokens[None, :], p, mask=inside[:, None])

    of_head = mixed + token[:, None] * channels + 2 * KEY_HEADS * KEY + head * VALUE + values
    v = tl.load(of_head, mask=of_value, other=0.0)
    u = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
    tl.store(new + at[:, None] * VALUE + values, u, mask=of_value)


@launched
def scan_states(
    recurring, scanned, new, linked, queries, kept, scores, ends, states, output, output_stride,
    VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Walk the tiles of a row, BLOCK columns of a head's state each. Grid: rows, value heads, blocks of columns.

    scanned: int32 [rows], a row of `recurring`, -1 for none. output: as of `recur`.
    """
    begin(DEPENDENT)
    index, head = tl.load(scanned + tl.program_id(0)), tl.program_id(1)
    if index < 0:
        return
    slot, start, count, _replay, _certain, position, _ = load_row(recurring, index)
    keys, tokens = tl.arange(0, padded(KEY)), tl.arange(0, TILE)
    values = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = states + (slot.to(tl.int64) * VALUE_HEADS + head) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    known = own(own((position > 0) & (keys[:, None] >= 0), keys[:, None], KEY), values[None, :], VALUE)
    state = tl.load(place, mask=known, other=0.0)
    for first in tl.range(0, count, TILE):
        offset = first + tokens
        live = offset < count
        of_key, of_value = own(live[:, None], keys[None, :], KEY), own(live[:, None], values[None, :], VALUE)
        at = (start + offset).to(tl.int64) * VALUE_HEADS + head
        # All of a tile is asked for before any of it is used: behind products each load would wait for itself.
        w = tl.load(linked + at[:, None] * KEY + keys[None, :], mask=of_key, other=0.0)
        u = tl.load(new + at[:, None] * VALUE + values[None, :], mask=of_value, other=0.0)
        q = tl.load(queries + at[:, None] * KEY + keys[None, :], mask=of_key, other=0.0)
        p = tl.load(scores + at[:, None] * TILE + tokens[None, :], mask=live[:, None], other=0.0)
        k = tl.load(kept + at[:, None] * KEY + keys[None, :], mask=of_key, other=0.0)
        decay = tl.exp(tl.load(ends + (start + first).to(tl.int64) * VALUE_HEADS + head))
        n = u - times(w, state, PRECISION)
        result = times(q, state, PRECISION) + times(p, n, PRECISION)
        to = output + (start + offset).to(tl.int64)[:, None] * output_stride + head * VALUE + values[None, :]
        tl.store(to, result, mask=of_value)
        state = state * decay + times(tl.trans(k), n, PRECISION)
    store_state(place, state, keys, values, KEY, VALUE)
