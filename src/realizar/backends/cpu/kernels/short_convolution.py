"""Gated short convolutions: gates, taps and state, for decodes and chunks by the same arithmetic in the same order."""

from __future__ import annotations

import numpy as np

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.attention_record import STEP_ROWS
from realizar.backends.cpu.kernels.quantize import offset_of, quantize_group
from realizar.backends.cpu.memory import clear, copy, inner, read_i64, view
from realizar.backends.cpu.records import Record
from realizar.backends.cpu.state.rows import FIRST, IS_NEW, REPLAYED, SLOT, STATE_ROW_FIELDS, TOKENS, UNCERTAIN

# `input` has b, c and x of each token after one another, `channels` each. `taps` is float32 [length, channels] and
# `bias` [channels] or 0. `rows` is of `state/rows.py`. `states` and `replays` are the layer's parts of slot 0 and of
# row 0: float32 [length - 1, channels], and [tokens, token_bytes / 4]. `out` gets the result, `records` where not 0.
SHORT_CONVOLUTION = Record(
    "step input input_stride channels length taps bias rows states slot_bytes replays replay_bytes token_bytes "
    "out out_stride records records_groups records_width"
)


@inner
def _begin(
    columns: int, state: int, state_stride: int, replay: int, token_bytes: int, row: int, taps: int, count: int
) -> None:
    """The `taps` - 1 columns before the step's first token, into the ring where column t has place t % taps.

    `columns` is the ring, `taps` columns of `count` float32; `state` and `replay` are at the thread's first channel.
    """
    replayed = read_i64(row, REPLAYED)
    for t in range(1 - taps, 0):
        target = columns + (t + taps) % taps * count * 4
        if read_i64(row, IS_NEW) != 0:
            clear(target, count)
        elif t >= -replayed:
            copy(replay + (replayed + t) * token_bytes, target, count)
        else:
            copy(state + (taps - 1 + replayed + t) * state_stride, target, count)


@inner
def _store(columns: int, end: int, state: int, state_stride: int, taps: int, count: int) -> None:
    for place in range(taps - 1):
        t = end - (taps - 1) + place
        copy(columns + (t + taps) % taps * count * 4, state + place * state_stride, count)


@inner
def _token(at: int, third: int, columns: int, t: int, weights: int, bias: int, out: int, taps: int, count: int) -> None:
    """Token t: its column into the ring, and its output.

    `at` is b's address; c and x, and each tap, are `third` bytes from one to the next.
    """
    b, x = view(at, count, np.float32), view(at + 2 * third, count, np.float32)
    own = view(columns + t % taps * count * 4, count, np.float32)
    result = view(out, count, np.float32)
    for i in range(count):
        own[i] = b[i] * x[i]
    for j in range(taps):
        column = view(columns + (t + 1 + j) % taps * count * 4, count, np.float32)
        weight = view(weights + j * third, count, np.float32)
        if j == 0:
            for i in range(count):
                result[i] = weight[i] * column[i]
        else:
            for i in range(count):
                result[i] += weight[i] * column[i]
    if bias != 0:
        added = view(bias, count, np.float32)
        for i in range(count):
            result[i] += added[i]
    c = view(at + third, count, np.float32)
    for i in range(count):
        result[i] *= c[i]


@kernel()
def short_convolution(address: int, thread: int, threads: int) -> None:
    """Groups of channels are divided among threads."""
    arguments = SHORT_CONVOLUTION(address)
    channels, taps = arguments.channels, arguments.length
    groups = (channels + GROUP - 1) // GROUP
    first_group, stop_group = groups * thread // threads, groups * (thread + 1) // threads
    if first_group == stop_group:
        return
    third, skipped = channels * 4, first_group * GROUP * 4
    count = min(channels, stop_group * GROUP) - first_group * GROUP
    ring = np.empty(taps * count, np.float32)
    columns = ring.ctypes.data
    weights = arguments.taps + skipped
    bias = arguments.bias
    if bias != 0:
        bias += skipped
    token_bytes = arguments.token_bytes
    records, record_groups, width = arguments.records, arguments.records_groups, arguments.records_width
    for index in range(read_i64(arguments.step, STEP_ROWS)):
        row = arguments.rows + index * STATE_ROW_FIELDS * 8
        tokens = read_i64(row, TOKENS)
        if tokens == 0:
            continue
        state = arguments.states + read_i64(row, SLOT) * arguments.slot_bytes + skipped
        replay = arguments.replays + read_i64(row, SLOT) * arguments.replay_bytes + skipped
        end = tokens - read_i64(row, UNCERTAIN)
        _begin(columns, state, third, replay, token_bytes, row, taps, count)
        for t in range(tokens):
            if t == end:
                _store(columns, t, state, third, taps, count)
            token = read_i64(row, FIRST) + t
            at = arguments.input + token * arguments.input_stride + skipped
            out = arguments.out + token * arguments.out_stride + skipped
            _token(at, third, columns, t, weights, bias, out, taps, count)
            if t >= end:
                copy(columns + t % taps * count * 4, replay + (t - end) * token_bytes, count)
            padding = view(out + count * 4, (stop_group - first_group) * GROUP - count, np.float32)
            for i in range(padding.size):
                padding[i] = np.float32(0.0)
            if records != 0:
                for group in range(first_group, stop_group):
                    values = out + (group - first_group) * GROUP * 4
                    quantize_group(values, records + offset_of(token, group, record_groups, width))
        if end == tokens:
            _store(columns, tokens, state, third, taps, count)
