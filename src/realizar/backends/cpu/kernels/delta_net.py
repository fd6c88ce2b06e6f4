"""The gated delta net: what its matmuls give, through convolution and recurrence, to its gated heads.

`mix` makes the convolved and normed heads of each token, `recur` reads and updates the states of the value heads after
a barrier. The tokens of a row are those to be replayed, from its window, and those of the step. Both run each token by
itself, in order, and sum in an order of their own: bits depend neither on chunks nor on the batch, the thread, or which
tokens were uncertain.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cfunc, literally, types

from realizar.backends.cpu.codegen.recurrence import convolve, dot, gate_head, pass_over, scale
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.attention_record import STEP_ROWS
from realizar.backends.cpu.kernels.quantize import offset_of, quantize_group
from realizar.backends.cpu.memory import clear, inner, load_f32, load_i64, read_f32, view, write_f32, write_i64
from realizar.backends.cpu.records import Record
from realizar.backends.cpu.weights.formats import GROUP

# Rows of a step, int64 [rows, STATE_ROW_FIELDS]: the first token of the step and how many there are; the slot of the
# state; whether it begins from zeros; tokens of the window to be replayed before; how many of all these tokens, the
# last ones, leave no trace in the state but in the window; and the place of the row's first token, replayed or not,
# among those of all rows.
STATE_ROW_FIELDS = 7
_TOKEN, _TOKENS, _SLOT, _FRESH, _REPLAYED, _UNCERTAIN, _PLACE = range(STATE_ROW_FIELDS)

# inputs float32 [tokens, ...]: q, k, v, then from these columns on beta, decay, and the gate; the first `window_width`
# are kept. Of each slot, `slot_bytes` apart: window float32 [length - 1 + uncertain, window_width], which holds the
# `length - 1` tokens before the state's last and those after it; state, runs of each value head (`codegen.recurrence`).
# taps float32 [length, channels]. mixed float32 [places, channels + 2 * value heads + key heads]: q, k, v, beta,
# decay, q @ k. zeros float32 [window_width]. scratch of each thread: `delta_scratch_bytes`. rate is below zero.
DELTA_NET = Record(
    "step rows inputs inputs_stride beta_column decay_column gate_column window_width key_heads value_heads key_size "
    "value_size length tiled taps decay_bias rate window window_slot_bytes state state_slot_bytes mixed "
    "mixed_stride zeros weight eps scratch scratch_bytes out out_stride records records_groups records_width"
)
(
    _STEP, _ROWS, _INPUTS, _INPUTS_STRIDE, _BETA, _DECAY, _GATE, _WINDOW_WIDTH, _KEY_HEADS, _VALUE_HEADS, _KEY_SIZE,
    _VALUE_SIZE, _LENGTH, _TILED, _TAPS, _DECAY_BIAS, _RATE, _WINDOW, _WINDOW_SLOT_BYTES, _STATE, _STATE_SLOT_BYTES,
    _MIXED, _MIXED_STRIDE, _ZEROS, _WEIGHT, _EPS, _SCRATCH, _SCRATCH_BYTES, _OUT, _OUT_STRIDE, _RECORDS,
    _RECORDS_GROUPS, _RECORDS_WIDTH,
) = range(33)  # fmt: skip

_L2_EPS = np.float32(1e-6)
_LINEAR_FROM = 30.0  # where softplus(x) is x


def mixed_width(key_heads: int, value_heads: int, key_size: int, value_size: int) -> int:
    """float32 of a token in `mixed`."""
    return 2 * key_heads * key_size + value_heads * value_size + 2 * value_heads + key_heads


def delta_scratch_bytes(key_size: int, columns: int) -> int:
    """Scratch of a thread: a run of a state, what a token lacks, and an output that nobody reads."""
    return 4 * columns * (key_size + 2)


@inner
def find_sources(arguments: int, row: int, token: int, sources: Any) -> None:
    """The addresses of the inputs of the tokens that a row's `token` of the step sees; those replayed are below 0."""
    length, stride = load_i64(arguments, _LENGTH), load_i64(arguments, _INPUTS_STRIDE)
    own = load_i64(arguments, _INPUTS) + load_i64(row, _TOKEN) * stride
    kept = load_i64(arguments, _WINDOW) + load_i64(row, _SLOT) * load_i64(arguments, _WINDOW_SLOT_BYTES)
    row_bytes = 4 * load_i64(arguments, _WINDOW_WIDTH)
    first = kept + (load_i64(row, _REPLAYED) + length - 1) * row_bytes
    for j in range(length):
        seen = token - (length - 1) + j
        if seen >= 0:
            at = own + seen * stride
        elif load_i64(row, _FRESH) != 0:
            at = load_i64(arguments, _ZEROS)
        else:
            at = first + seen * row_bytes
        write_i64(sources.ctypes.data, j, at)


@inner
def mix_key_head(instruction_set: int, lanes: int, arguments: int, sources: int, head: int, mixed: int) -> None:
    """The convolved q and k of a key head, divided by their lengths, and their product."""
    _ = literally(instruction_set)
    heads, size, values = (
        load_i64(arguments, _KEY_HEADS), load_i64(arguments, _KEY_SIZE), load_i64(arguments, _VALUE_HEADS),
    )  # fmt: skip
    channels = 2 * heads * size + values * load_i64(arguments, _VALUE_SIZE)
    length, taps, count = load_i64(arguments, _LENGTH), load_i64(arguments, _TAPS), size // lanes
    query, key = mixed + head * size * 4, mixed + (heads + head) * size * 4
    convolve(instruction_set, sources, length, head * size, count, taps, channels * 4, query)
    convolve(instruction_set, sources, length, (heads + head) * size, count, taps, channels * 4, key)
    one = np.float32(1.0)
    root = np.sqrt(np.float32(size))
    scale(instruction_set, query, count, one / (np.sqrt(dot(instruction_set, query, query, count) + _L2_EPS) * root))
    scale(instruction_set, key, count, one / np.sqrt(dot(instruction_set, key, key, count) + _L2_EPS))
    write_f32(mixed, channels + 2 * values + head, dot(instruction_set, query, key, count))


@inner
def mix_value_head(
    instruction_set: int, lanes: int, arguments: int, sources: int, own: int, head: int, mixed: int
) -> None:
    """The convolved v of a value head, its beta and its decay; `own` is the token's row of inputs."""
    _ = literally(instruction_set)
    heads, size = load_i64(arguments, _VALUE_HEADS), load_i64(arguments, _VALUE_SIZE)
    keys = 2 * load_i64(arguments, _KEY_HEADS) * load_i64(arguments, _KEY_SIZE)
    column, channels = keys + head * size, keys + heads * size
    convolve(
        instruction_set, sources, load_i64(arguments, _LENGTH), column, size // lanes, load_i64(arguments, _TAPS),
        channels * 4, mixed + column * 4,
    )  # fmt: skip
    beta = 1.0 / (1.0 + math.exp(-np.float64(read_f32(own, load_i64(arguments, _BETA) + head))))
    shifted = np.float64(read_f32(own, load_i64(arguments, _DECAY) + head))
    shifted += read_f32(load_i64(arguments, _DECAY_BIAS), head)
    softplus = shifted if shifted > _LINEAR_FROM else math.log1p(math.exp(shifted))
    write_f32(mixed, channels + head, np.float32(beta))
    decay = math.exp(read_f32(load_i64(arguments, _RATE), head) * softplus)
    write_f32(mixed, channels + heads + head, np.float32(decay))


def make_mix(instruction_set: int) -> Any:
    """The kernel that writes `mixed`; units are (token, head), a token's key heads first."""
    lanes = INSTRUCTION_SETS[instruction_set].lanes

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def mix(arguments: int, thread: int, threads: int) -> None:
        num_rows, rows = load_i64(load_i64(arguments, _STEP), STEP_ROWS), load_i64(arguments, _ROWS)
        key_heads, length = load_i64(arguments, _KEY_HEADS), load_i64(arguments, _LENGTH)
        per_token = key_heads + load_i64(arguments, _VALUE_HEADS)
        sources = np.empty(length, np.int64)
        last = rows + (num_rows - 1) * STATE_ROW_FIELDS * 8
        units = (load_i64(last, _PLACE) + load_i64(last, _REPLAYED) + load_i64(last, _TOKENS)) * per_token
        start, stop = units * thread // threads, units * (thread + 1) // threads
        for index in range(num_rows):
            row = rows + index * STATE_ROW_FIELDS * 8
            place, replayed = load_i64(row, _PLACE), load_i64(row, _REPLAYED)
            low = max(start, place * per_token)
            high = min(stop, (place + replayed + load_i64(row, _TOKENS)) * per_token)
            for unit in range(low, high):
                token, part = unit // per_token, unit % per_token
                if part == 0 or unit == low:
                    find_sources(arguments, row, token - place - replayed, sources)
                mixed = load_i64(arguments, _MIXED) + token * load_i64(arguments, _MIXED_STRIDE)
                if part < key_heads:
                    mix_key_head(instruction_set, lanes, arguments, sources.ctypes.data, part, mixed)
                else:
                    own = sources[length - 1]
                    mix_value_head(instruction_set, lanes, arguments, sources.ctypes.data, own, part - key_heads, mixed)

    return mix


@inner
def recur_run(instruction_set: int, columns: int, arguments: int, thread: int, row: int, head: int, run: int) -> None:
    """All tokens of a row through one run of a value head's state; outputs of those of the step, before their norm."""
    _ = literally(instruction_set), literally(columns)
    key_heads, heads = load_i64(arguments, _KEY_HEADS), load_i64(arguments, _VALUE_HEADS)
    key_size, value_size = load_i64(arguments, _KEY_SIZE), load_i64(arguments, _VALUE_SIZE)
    key_head = head % key_heads if load_i64(arguments, _TILED) != 0 else head // (heads // key_heads)
    column = head * value_size + run * columns
    channels = 2 * key_heads * key_size + heads * value_size
    state = load_i64(arguments, _STATE) + load_i64(row, _SLOT) * load_i64(arguments, _STATE_SLOT_BYTES)
    state += (head * value_size + run * columns) * key_size * 4
    scratch = load_i64(arguments, _SCRATCH) + thread * load_i64(arguments, _SCRATCH_BYTES)
    lacking = scratch + columns * key_size * 4
    unread = lacking + columns * 4
    if load_i64(row, _FRESH) != 0:
        clear(state, columns * key_size)
    replayed = load_i64(row, _REPLAYED)
    tokens = replayed + load_i64(row, _TOKENS)
    certain = tokens - load_i64(row, _UNCERTAIN)
    stride, out_stride = load_i64(arguments, _MIXED_STRIDE), load_i64(arguments, _OUT_STRIDE)
    mixed = load_i64(arguments, _MIXED) + load_i64(row, _PLACE) * stride
    output = load_i64(arguments, _OUT) + (load_i64(row, _TOKEN) - replayed) * out_stride + column * 4
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
                instruction_set, columns, 0, 1, source, source, key_size, key, decay, lacking, key, query, value,
                decay, beta, query_key, out,
            )  # fmt: skip
        else:
            target = state if token <= certain else scratch
            pass_over(
                instruction_set, columns, 1, 1, source, target, key_size, earlier_key, earlier_decay, lacking, key,
                query, value, decay, beta, query_key, out,
            )  # fmt: skip
            source = target
        mixed += stride
    if tokens > 0 and certain == tokens:
        pass_over(
            instruction_set, columns, 1, 0, state, state, key_size, key, decay, lacking, key, key, key, decay, decay,
            decay, unread,
        )  # fmt: skip


@inner
def finish_head(instruction_set: int, lanes: int, arguments: int, row: int, head: int) -> None:
    """Norm and gate of a head's outputs of the step, and their records where a head is whole groups."""
    _ = literally(instruction_set)
    size, stride = load_i64(arguments, _VALUE_SIZE), load_i64(arguments, _OUT_STRIDE)
    records, weight = load_i64(arguments, _RECORDS), load_i64(arguments, _WEIGHT)
    groups, width = load_i64(arguments, _RECORDS_GROUPS), load_i64(arguments, _RECORDS_WIDTH)
    first = load_i64(row, _TOKEN)
    for token in range(first, first + load_i64(row, _TOKENS)):
        values = load_i64(arguments, _OUT) + token * stride + head * size * 4
        gate = load_i64(arguments, _INPUTS) + token * load_i64(arguments, _INPUTS_STRIDE)
        gate += (load_i64(arguments, _GATE) + head * size) * 4
        mean = dot(instruction_set, values, values, size // lanes) / np.float32(size)
        factor = np.float32(1.0) / np.sqrt(mean + load_f32(arguments, _EPS))
        gate_head(instruction_set, values, size // lanes, factor, weight, gate)
        if records != 0:
            for group in range(size // GROUP):
                place = head * (size // GROUP) + group
                quantize_group(values + group * GROUP * 4, records + offset_of(token, place, groups, width))


@inner
def slide_window(arguments: int, row: int, thread: int, threads: int) -> None:
    """A thread's columns of a row's window: the tokens before the state's last, and the uncertain ones after it."""
    width, stride = load_i64(arguments, _WINDOW_WIDTH), load_i64(arguments, _INPUTS_STRIDE)
    before, replayed = load_i64(arguments, _LENGTH) - 1, load_i64(row, _REPLAYED)
    start = width * thread // threads
    count = width * (thread + 1) // threads - start
    kept = load_i64(arguments, _WINDOW) + load_i64(row, _SLOT) * load_i64(arguments, _WINDOW_SLOT_BYTES) + start * 4
    own = load_i64(arguments, _INPUTS) + load_i64(row, _TOKEN) * stride + start * 4
    first = load_i64(row, _TOKENS) - load_i64(row, _UNCERTAIN) - before
    for place in range(before + load_i64(row, _UNCERTAIN)):
        token, target = first + place, view(kept + place * width * 4, count, np.float32)
        if token < 0 and load_i64(row, _FRESH) != 0:
            for i in range(count):
                target[i] = 0.0
            continue
        at = own + token * stride if token >= 0 else kept + (replayed + before + token) * width * 4
        source = view(at, count, np.float32)  # never an earlier place of the window than the target
        for i in range(count):
            target[i] = source[i]


def make_recur(instruction_set: int, columns: int) -> Any:
    """The kernel that reads `mixed`. Units are (row, value head), shared by their tokens."""
    lanes = INSTRUCTION_SETS[instruction_set].lanes

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def recur(arguments: int, thread: int, threads: int) -> None:
        num_rows, rows = load_i64(load_i64(arguments, _STEP), STEP_ROWS), load_i64(arguments, _ROWS)
        heads, runs = load_i64(arguments, _VALUE_HEADS), load_i64(arguments, _VALUE_SIZE) // columns
        last = rows + (num_rows - 1) * STATE_ROW_FIELDS * 8
        total = (load_i64(last, _PLACE) + load_i64(last, _REPLAYED) + load_i64(last, _TOKENS)) * heads
        start, stop = total * thread // threads, total * (thread + 1) // threads
        for index in range(num_rows):
            row = rows + index * STATE_ROW_FIELDS * 8
            tokens = load_i64(row, _REPLAYED) + load_i64(row, _TOKENS)
            for head in range(heads):
                at = load_i64(row, _PLACE) * heads + head * tokens
                if start <= at < stop:
                    for run in range(runs):
                        recur_run(instruction_set, columns, arguments, thread, row, head, run)
                    finish_head(instruction_set, lanes, arguments, row, head)
            slide_window(arguments, row, thread, threads)

    return recur
