"""The gated delta net: what its matmuls give, through convolution and recurrence, to its gated heads.

`mix` makes the convolved and normed heads of each token, `recur` reads and updates the states of the value heads after
a barrier. The tokens of a row are those to be replayed and those of the step (`state/memory.py`). Both kernels compute
each token by itself, in order, and sum in an order of their own: bits depend neither on chunks nor on the batch, the
thread, or which tokens were uncertain.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import literally

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.recurrence import convolve, dot, gate_head, pass_over, scale
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.kernels.attention_record import STEP_ROWS
from realizar.backends.cpu.kernels.quantize import offset_of, quantize_group
from realizar.backends.cpu.memory import clear, copy, inner, read_f32, read_i64, write_f32
from realizar.backends.cpu.records import Record
from realizar.backends.cpu.state.rows import FIRST, IS_NEW, REPLAYED, SLOT, STATE_ROW_FIELDS, TOKENS, UNCERTAIN

# inputs float32 [tokens, ...]: q, k, v, then from these columns on the gate, beta and decay. `rows` is of
# `state/rows.py`. `states`, `matrices` and `replays` are the layer's parts of slot 0 and of row 0: the last inputs of
# the convolution, float32 [length - 1, channels]; runs of the state of each value head (`codegen/recurrence.py`); and
# of each uncertain token, `token_bytes` apart, q, k, v, beta and decay. taps float32 [length, channels]. mixed float32
# [tokens replayed and of the step, channels + 2 * value heads + key heads]: q, k, v, beta, decay, q @ k. zeros float32
# [channels]. scratch of each thread: `delta_scratch_bytes`. rate is below zero.
DELTA_NET = Record(
    "step rows inputs inputs_stride gate_column beta_column decay_column key_heads value_heads key_size value_size "
    "length tiled taps decay_bias rate states slot_bytes matrices replays replay_bytes token_bytes mixed mixed_stride "
    "zeros weight eps=f32 scratch scratch_bytes out out_stride records records_groups records_width"
)

_L2_EPS = np.float32(1e-6)
_LINEAR_FROM = 30.0  # where softplus(x) is x


def delta_scratch_bytes(key_size: int, columns: int) -> int:
    """Scratch of a thread: a run of a state, what a token lacks, and an output that nobody reads."""
    return 4 * columns * (key_size + 2)


@inner
def tokens_of(row: int) -> int:
    """Tokens of a row, those that are replayed before the step's among them; none where the step has none."""
    tokens = read_i64(row, TOKENS)
    return read_i64(row, REPLAYED) + tokens if tokens > 0 else 0


@inner
def all_tokens(rows: int, num_rows: int) -> int:
    total = 0
    for index in range(num_rows):
        total += tokens_of(rows + index * STATE_ROW_FIELDS * 8)
    return total


@inner
def channels_of(arguments: Any) -> int:
    keys = arguments.key_heads * arguments.key_size
    return 2 * keys + arguments.value_heads * arguments.value_size


@inner
def source_of(arguments: Any, row: int, token: int) -> int:
    """Address of the q, k and v of a row's `token` of the step; those of earlier ones are replayed, kept, or zeros."""
    slot, replayed = read_i64(row, SLOT), read_i64(row, REPLAYED)
    if token >= 0:
        return arguments.inputs + (read_i64(row, FIRST) + token) * arguments.inputs_stride
    if read_i64(row, IS_NEW) != 0:
        return arguments.zeros
    if token >= -replayed:
        kept = arguments.replays + slot * arguments.replay_bytes
        return kept + (replayed + token) * arguments.token_bytes
    place = arguments.length - 1 + replayed + token
    return arguments.states + slot * arguments.slot_bytes + place * channels_of(arguments) * 4


@inner
def mix_key_head(lanes: int, arguments: Any, sources: int, head: int, mixed: int) -> None:
    """The convolved q and k of a key head, divided by their lengths, and their product."""
    _ = literally(lanes)
    heads, size, channels = arguments.key_heads, arguments.key_size, channels_of(arguments)
    length, taps, count = arguments.length, arguments.taps, size // lanes
    query, key = mixed + head * size * 4, mixed + (heads + head) * size * 4
    convolve(lanes, sources, length, head * size, count, taps, channels * 4, query)
    convolve(lanes, sources, length, (heads + head) * size, count, taps, channels * 4, key)
    one = np.float32(1.0)
    root = np.sqrt(np.float32(size))
    scale(lanes, query, count, one / (np.sqrt(dot(lanes, query, query, count) + _L2_EPS) * root))
    scale(lanes, key, count, one / np.sqrt(dot(lanes, key, key, count) + _L2_EPS))
    write_f32(mixed, channels + 2 * arguments.value_heads + head, dot(lanes, query, key, count))


@inner
def mix_value_head(lanes: int, arguments: Any, sources: int, beta: int, decay: int, head: int, mixed: int) -> None:
    """The convolved v of a value head, its beta and its decay, what these two are made of being at addresses."""
    _ = literally(lanes)
    heads, size, channels = arguments.value_heads, arguments.value_size, channels_of(arguments)
    column = channels - (heads - head) * size
    target = mixed + column * 4
    convolve(lanes, sources, arguments.length, column, size // lanes, arguments.taps, channels * 4, target)
    write_f32(mixed, channels + head, np.float32(1.0 / (1.0 + math.exp(-np.float64(read_f32(beta, head))))))
    shifted = np.float64(read_f32(decay, head)) + read_f32(arguments.decay_bias, head)
    softplus = shifted if shifted > _LINEAR_FROM else math.log1p(math.exp(shifted))
    kept = math.exp(read_f32(arguments.rate, head) * softplus)
    write_f32(mixed, channels + heads + head, np.float32(kept))


def make_mix(lanes: int) -> Kernel:
    """The kernel that writes `mixed`; units are (token, head), a token's key heads first."""

    @kernel(lanes)
    def mix(address: int, thread: int, threads: int) -> None:
        arguments = DELTA_NET(address)
        num_rows, rows = read_i64(arguments.step, STEP_ROWS), arguments.rows
        key_heads, heads, length = arguments.key_heads, arguments.value_heads, arguments.length
        per_token, channels = key_heads + heads, channels_of(arguments)
        sources = np.empty(length, np.int64)
        units, place = all_tokens(rows, num_rows) * per_token, 0
        start, stop = units * thread // threads, units * (thread + 1) // threads
        for index in range(num_rows):
            row = rows + index * STATE_ROW_FIELDS * 8
            first = place + read_i64(row, REPLAYED)
            after = place + tokens_of(row)
            for unit in range(max(start, place * per_token), min(stop, after * per_token)):
                token, part = unit // per_token, unit % per_token
                if part == 0 or unit == start:
                    for j in range(length):
                        sources[j] = source_of(arguments, row, token - first - (length - 1) + j)
                mixed = arguments.mixed + token * arguments.mixed_stride
                if part < key_heads:
                    mix_key_head(lanes, arguments, sources.ctypes.data, part, mixed)
                    continue
                own = sources[length - 1]
                beta, decay = own + channels * 4, own + (channels + heads) * 4
                if token >= first:
                    beta, decay = own + arguments.beta_column * 4, own + arguments.decay_column * 4
                mix_value_head(lanes, arguments, sources.ctypes.data, beta, decay, part - key_heads, mixed)
            place = after

    return mix


@inner
def recur_run(lanes: int, columns: int, arguments: Any, thread: int, row: int, place: int, head: int, run: int) -> None:
    """All tokens of a row through one run of a value head's state; outputs of those of the step, before their norm.

    `place` is that of the row's first token in `mixed`.
    """
    _ = literally(lanes), literally(columns)
    key_heads, heads = arguments.key_heads, arguments.value_heads
    key_size, value_size = arguments.key_size, arguments.value_size
    key_head = head % key_heads if arguments.tiled != 0 else head // (heads // key_heads)
    column, channels = head * value_size + run * columns, channels_of(arguments)
    state = arguments.matrices + read_i64(row, SLOT) * arguments.slot_bytes
    state += column * key_size * 4
    scratch = arguments.scratch + thread * arguments.scratch_bytes
    lacking = scratch + columns * key_size * 4
    unread = lacking + columns * 4
    if read_i64(row, IS_NEW) != 0:
        clear(state, columns * key_size)
    replayed, tokens = read_i64(row, REPLAYED), tokens_of(row)
    certain = tokens - read_i64(row, UNCERTAIN)
    stride, out_stride = arguments.mixed_stride, arguments.out_stride
    mixed = arguments.mixed + place * stride
    output = arguments.out + (read_i64(row, FIRST) - replayed) * out_stride + column * 4
    source, key, decay = state, 0, np.float32(0.0)
    for token in range(tokens):
        earlier_key, earlier_decay = key, decay
        query = mixed + key_head * key_size * 4
        key = query + key_heads * key_size * 4
        value = mixed + (2 * key_heads * key_size + column) * 4
        beta, decay = read_f32(mixed, channels + head), read_f32(mixed, channels + heads + head)
        query_key = read_f32(mixed, channels + 2 * heads + key_head)
        out = output + token * out_stride if token >= replayed else unread
        if token == 0:
            pass_over(
                lanes, columns, 0, 1, source, source, key_size, key, decay, lacking, key, query, value,
                decay, beta, query_key, out,
            )  # fmt: skip
        else:
            target = state if token <= certain else scratch
            pass_over(
                lanes, columns, 1, 1, source, target, key_size, earlier_key, earlier_decay, lacking, key,
                query, value, decay, beta, query_key, out,
            )  # fmt: skip
            source = target
        mixed += stride
    if certain == tokens:
        pass_over(
            lanes, columns, 1, 0, state, state, key_size, key, decay, lacking, key, key, key, decay, decay,
            decay, unread,
        )  # fmt: skip


@inner
def finish_head(lanes: int, arguments: Any, row: int, head: int) -> None:
    """Norm and gate of a head's outputs of the step, and their records where a head is whole groups."""
    _ = literally(lanes)
    size, stride = arguments.value_size, arguments.out_stride
    records, groups, width = arguments.records, arguments.records_groups, arguments.records_width
    weight, first = arguments.weight, read_i64(row, FIRST)
    for token in range(first, first + read_i64(row, TOKENS)):
        values = arguments.out + token * stride + head * size * 4
        gate = arguments.inputs + token * arguments.inputs_stride
        gate += (arguments.gate_column + head * size) * 4
        mean = dot(lanes, values, values, size // lanes) / np.float32(size)
        factor = np.float32(1.0) / np.sqrt(mean + arguments.eps)
        gate_head(lanes, values, size // lanes, factor, weight, gate)
        if records != 0:
            for group in range(size // GROUP):
                place = head * (size // GROUP) + group
                quantize_group(values + group * GROUP * 4, records + offset_of(token, place, groups, width))


@inner
def keep_inputs(arguments: Any, row: int, thread: int, threads: int) -> None:
    """A thread's channels of what the row's next step reads: inputs before its state, and those of uncertain tokens.

    The first come from the same place of the state or a later one, or from replayed tokens, which are written after.
    """
    channels, before, uncertain = channels_of(arguments), arguments.length - 1, read_i64(row, UNCERTAIN)
    start = channels * thread // threads
    count = channels * (thread + 1) // threads - start
    slot, end = read_i64(row, SLOT), read_i64(row, TOKENS) - uncertain
    state = arguments.states + slot * arguments.slot_bytes
    for place in range(before):
        copy(source_of(arguments, row, end - before + place) + start * 4, state + (place * channels + start) * 4, count)
    replay = arguments.replays + slot * arguments.replay_bytes
    for token in range(end, end + uncertain):
        source = source_of(arguments, row, token)
        copy(source + start * 4, replay + start * 4, count)
        if thread == 0:
            heads = arguments.value_heads
            copy(source + arguments.beta_column * 4, replay + channels * 4, heads)
            copy(source + arguments.decay_column * 4, replay + (channels + heads) * 4, heads)
        replay += arguments.token_bytes


def make_recur(lanes: int, columns: int) -> Kernel:
    """The kernel that reads `mixed`. Units are (row, value head), shared by their tokens."""

    @kernel(lanes, columns)
    def recur(address: int, thread: int, threads: int) -> None:
        arguments = DELTA_NET(address)
        num_rows, rows = read_i64(arguments.step, STEP_ROWS), arguments.rows
        heads, runs = arguments.value_heads, arguments.value_size // columns
        total, place = all_tokens(rows, num_rows) * heads, 0
        start, stop = total * thread // threads, total * (thread + 1) // threads
        for index in range(num_rows):
            row = rows + index * STATE_ROW_FIELDS * 8
            tokens = tokens_of(row)
            if tokens == 0:
                continue
            for head in range(heads):
                if start <= place * heads + head * tokens < stop:
                    for run in range(runs):
                        recur_run(lanes, columns, arguments, thread, row, place, head, run)
                    finish_head(lanes, arguments, row, head)
            keep_inputs(arguments, row, thread, threads)
            place += tokens

    return recur
