"""Exchanges between the ranks of a model: each writes rows of its own into a `RankMemory`, and then reads those of all.

Between the two kernels, and after the second, threads meet at a barrier. `turns` is of the rank alone: a line for each
thread, whose first word counts the exchanges that the thread has been through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.memory import copy, read_f32, read_i64, view, write_f32, write_i64
from realizar.backends.cpu.records import Record
from realizar.backends.cpu.walker import LINE_BYTES, atomic_load, atomic_store, yield_processor

_SPINS = 4000

# `row_bytes`: of a token in a slot. `rank`: whose slot it is.
PUBLISH = Record("step count_field input input_stride width memory slots slot_bytes row_bytes rank ranks turns")


@njit
def _slot(slots: int, slot_bytes: int, turn: int, ranks: int, rank: int) -> int:
    return slots + (turn % 2 * ranks + rank) * slot_bytes


@kernel()
def publish(address: int, thread: int, threads: int) -> None:
    """The rank's slot = the first `width` values of each token."""
    arguments = PUBLISH(address)
    tokens, width = read_i64(arguments.step, arguments.count_field), arguments.width
    turn = read_i64(arguments.turns + thread * LINE_BYTES, 0)
    slot = _slot(arguments.slots, arguments.slot_bytes, turn, arguments.ranks, arguments.rank)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        copy(arguments.input + token * arguments.input_stride, slot + token * arguments.row_bytes, width)


@njit
def _all_have_written(memory: int, rank: int, ranks: int, count: int, thread: int) -> bool:
    """Wait until all ranks have written so many exchanges; False if nobody is to wait any more."""
    if thread == 0:
        atomic_store(memory + (1 + rank) * LINE_BYTES, count)
    for other in range(ranks):
        spins = 0
        while atomic_load(memory + (1 + other) * LINE_BYTES) < count:
            spins += 1
            if spins > _SPINS:
                if atomic_load(memory) != 0:
                    return False
                yield_processor()
    return True


@njit
def _first_slot(arguments: Any, thread: int) -> int:
    """The first rank's slot of the thread's next exchange, once all have written it; 0 if nobody is to wait any more.

    No other exchange overwrites it before all of the rank's threads have met behind this one.
    """
    turns = arguments.turns + thread * LINE_BYTES
    turn = read_i64(turns, 0)
    if not _all_have_written(arguments.memory, arguments.rank, arguments.ranks, turn + 1, thread):
        return 0
    write_i64(turns, 0, turn + 1)
    return _slot(arguments.slots, arguments.slot_bytes, turn, arguments.ranks, 0)


# out = the sum of the ranks' rows, in the order of ranks: all ranks get the same bits.
ADD_UP = Record("step count_field out out_stride width memory slots slot_bytes rank ranks turns")


@kernel()
def add_up(address: int, thread: int, threads: int) -> None:
    """Tokens and columns are divided among threads, as one token's row may be all there is."""
    arguments = ADD_UP(address)
    tokens, width, ranks = read_i64(arguments.step, arguments.count_field), arguments.width, arguments.ranks
    first = _first_slot(arguments, thread)
    if first == 0:
        return
    start, end = width * thread // threads, width * (thread + 1) // threads
    for token in range(tokens):
        out = arguments.out + token * arguments.out_stride + 4 * start
        row = first + 4 * (token * width + start)
        copy(row, out, end - start)
        total = view(out, end - start, np.float32)
        for other in range(1, ranks):
            part = view(row + other * arguments.slot_bytes, end - start, np.float32)
            for i in range(end - start):
                total[i] += part[i]


# out = the ranks' rows one after another, each `width` wide but the last, which ends with `total`.
SIDE_BY_SIDE = Record("step count_field out out_stride width total memory slots slot_bytes rank ranks turns")


@kernel()
def side_by_side(address: int, thread: int, threads: int) -> None:
    """Tokens are divided among threads."""
    arguments = SIDE_BY_SIDE(address)
    tokens, width, ranks = read_i64(arguments.step, arguments.count_field), arguments.width, arguments.ranks
    first = _first_slot(arguments, thread)
    if first == 0:
        return
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        for other in range(ranks):
            count = min(width, arguments.total - other * width)
            out = arguments.out + token * arguments.out_stride + 4 * other * width
            row = first + other * arguments.slot_bytes + 4 * token * width
            copy(row, out, count)


SQUARES = Record("step count_field input input_stride width out out_stride")


@kernel()
def squares(address: int, thread: int, threads: int) -> None:
    """out = each token's sum of squares, one float32."""
    arguments = SQUARES(address)
    tokens, width = read_i64(arguments.step, arguments.count_field), arguments.width
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        x = view(arguments.input + token * arguments.input_stride, width, np.float32)
        total = np.float32(0.0)
        for i in range(width):
            total += x[i] * x[i]
        write_f32(arguments.out + token * arguments.out_stride, 0, total)


# `squares`: each token's sum over `features` values, of which these are some.
SCALE_ROWS = Record("step count_field values stride width squares squares_stride features eps=f32 weight")


@kernel()
def scale_rows(address: int, thread: int, threads: int) -> None:
    """values = values * weight / sqrt(squares / features + eps)"""
    arguments = SCALE_ROWS(address)
    tokens, width = read_i64(arguments.step, arguments.count_field), arguments.width
    weight = view(arguments.weight, width, np.float32)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        total = read_f32(arguments.squares + token * arguments.squares_stride, 0)
        factor = np.float32(1.0) / np.sqrt(total / np.float32(arguments.features) + arguments.eps)
        x = view(arguments.values + token * arguments.stride, width, np.float32)
        for i in range(width):
            x[i] = x[i] * factor * weight[i]
