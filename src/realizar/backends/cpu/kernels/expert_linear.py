"""Matmuls of experts: each with the tokens that chose it, sorted as in `routing`, by the tiles of dense matmuls.

Work is cut by items and then by tiles into shares of about equal cost, which follow from the step's choices alone. An
expert's tile is read once for all pairs of an item, and an expert that no token chose is not read at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.float_linear import WIDTHS, multiply_float_tile
from realizar.backends.cpu.kernels.linear import add_bias, multiply_tile, tile_widths
from realizar.backends.cpu.kernels.quantize import activate_group, offset_of, quantize_group
from realizar.backends.cpu.kernels.routing import (
    COUNT_ITEMS,
    ITEM_COST,
    ITEM_EXPERT,
    ITEM_FIELDS,
    ITEM_PAIRS,
    ITEM_POSITION,
)
from realizar.backends.cpu.memory import inner, load_i64, view
from realizar.backends.cpu.records import Record

EXPERT_LINEAR = Record(
    "counts items codes scales supers table codes_stride scales_stride supers_stride tiles groups "
    "activations activation_groups out out_stride together bias bias_stride"
)
_COUNTS, _ITEMS, _CODES, _SCALES, _SUPERS, _TABLE, _CODES_STRIDE, _SCALES_STRIDE, _SUPERS_STRIDE = range(9)
_TILES, _GROUPS, _ACTIVATIONS, _ACTIVATION_GROUPS, _OUT, _OUT_STRIDE, _TOGETHER, _BIAS, _BIAS_STRIDE = range(9, 18)


@inner
def share_of(counts: int, items: int, tiles: int, together: int, thread: int, threads: int) -> Any:
    """The start of a thread's share: item, and tile in it. It ends where the next one starts.

    Whole runs of `together` tiles, with all pairs of an item, stay with one thread. With `together` times fewer tiles
    and a `together` of 1 the shares are the same ones.
    """
    count = load_i64(counts, COUNT_ITEMS)
    table = view(items, (count + 1) * ITEM_FIELDS, np.int64)
    at = table[count * ITEM_FIELDS + ITEM_COST] * tiles * thread // threads
    item = 0
    while item < count and table[(item + 1) * ITEM_FIELDS + ITEM_COST] * tiles <= at:
        item += 1
    if item == count:
        return item, 0
    before = table[item * ITEM_FIELDS + ITEM_COST]
    cost = table[(item + 1) * ITEM_FIELDS + ITEM_COST] - before
    return item, (at - before * tiles) // cost // together * together


def make_expert_linear(instruction_set: int, weight_format: int) -> Any:
    """The kernel of one format. `together`: tiles that stay with one thread, which goes on with them itself; or 1."""
    first, second, third, fourth = tile_widths(instruction_set)
    row_bytes = 4 * INSTRUCTION_SETS[instruction_set].lanes

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def expert_linear(arguments: int, thread: int, threads: int) -> None:
        counts, items = load_i64(arguments, _COUNTS), load_i64(arguments, _ITEMS)
        tiles, together = load_i64(arguments, _TILES), load_i64(arguments, _TOGETHER)
        groups, record_groups = load_i64(arguments, _GROUPS), load_i64(arguments, _ACTIVATION_GROUPS)
        table, activations = load_i64(arguments, _TABLE), load_i64(arguments, _ACTIVATIONS)
        item, tile = share_of(counts, items, tiles, together, thread, threads)
        last_item, last_tile = share_of(counts, items, tiles, together, thread + 1, threads)
        while item < last_item or (item == last_item and tile < last_tile):
            own = items + item * ITEM_FIELDS * 8
            expert, position = load_i64(own, ITEM_EXPERT), load_i64(own, ITEM_POSITION)
            stop = position + load_i64(own, ITEM_PAIRS)
            for each in range(tile, last_tile if item == last_item else tiles):
                place = expert * tiles + each
                multiply_tile(
                    instruction_set, weight_format, 0, first, second, third, fourth,
                    load_i64(arguments, _CODES) + place * load_i64(arguments, _CODES_STRIDE),
                    load_i64(arguments, _SCALES) + place * load_i64(arguments, _SCALES_STRIDE),
                    load_i64(arguments, _SUPERS) + place * load_i64(arguments, _SUPERS_STRIDE),
                    table, groups, activations, record_groups, load_i64(arguments, _OUT) + each * row_bytes,
                    load_i64(arguments, _OUT_STRIDE), position, stop, np.float32(1.0),
                )  # fmt: skip
                if load_i64(arguments, _BIAS) != 0:
                    add_bias(load_i64(arguments, _BIAS) + expert * load_i64(arguments, _BIAS_STRIDE),
                             load_i64(arguments, _OUT) + position * load_i64(arguments, _OUT_STRIDE),
                             load_i64(arguments, _OUT_STRIDE), stop - position, each * row_bytes // 4,
                             (each + 1) * row_bytes // 4, np.float32(1.0))  # fmt: skip
            item, tile = item + 1, 0

    return expert_linear


EXPERT_FLOAT_LINEAR = Record(
    "counts items weights tile_stride tiles columns input input_stride out out_stride bias bias_stride"
)
_, _, _WEIGHTS, _TILE_STRIDE, _F_TILES, _COLUMNS, _IN, _IN_STRIDE, _F_OUT, _F_OUT_STRIDE = range(10)
_F_BIAS, _F_BIAS_STRIDE = 10, 11


def make_expert_float_linear(instruction_set: int, weight_type: int) -> Any:
    """The kernel of one element type; shaped like `make_expert_linear`."""
    row_bytes = 4 * INSTRUCTION_SETS[instruction_set].lanes
    first, second, third = WIDTHS

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def expert_float_linear(arguments: int, thread: int, threads: int) -> None:
        counts, items = load_i64(arguments, _COUNTS), load_i64(arguments, _ITEMS)
        tiles, columns = load_i64(arguments, _F_TILES), load_i64(arguments, _COLUMNS)
        item, tile = share_of(counts, items, tiles, 1, thread, threads)
        last_item, last_tile = share_of(counts, items, tiles, 1, thread + 1, threads)
        while item < last_item or (item == last_item and tile < last_tile):
            own = items + item * ITEM_FIELDS * 8
            expert, position = load_i64(own, ITEM_EXPERT), load_i64(own, ITEM_POSITION)
            stop = position + load_i64(own, ITEM_PAIRS)
            for each in range(tile, last_tile if item == last_item else tiles):
                multiply_float_tile(
                    instruction_set, weight_type, 0, first, second, third,
                    load_i64(arguments, _WEIGHTS) + (expert * tiles + each) * load_i64(arguments, _TILE_STRIDE),
                    columns, load_i64(arguments, _IN), load_i64(arguments, _IN_STRIDE),
                    load_i64(arguments, _F_OUT) + each * row_bytes, load_i64(arguments, _F_OUT_STRIDE),
                    position, stop, np.float32(1.0),
                )  # fmt: skip
                if load_i64(arguments, _F_BIAS) != 0:
                    add_bias(load_i64(arguments, _F_BIAS) + expert * load_i64(arguments, _F_BIAS_STRIDE),
                             load_i64(arguments, _F_OUT) + position * load_i64(arguments, _F_OUT_STRIDE),
                             load_i64(arguments, _F_OUT_STRIDE), stop - position, each * row_bytes // 4,
                             (each + 1) * row_bytes // 4, np.float32(1.0))  # fmt: skip
            item, tile = item + 1, 0

    return expert_float_linear


# `out` 0 leaves the floats out, `records` 0 the records; without gate nothing is read at `gate`
EXPERT_ACTIVATE = Record("counts items gate up input_stride groups out out_stride records records_groups records_width")
_, _, _GATE, _UP, _A_IN_STRIDE, _A_GROUPS, _A_OUT, _A_OUT_STRIDE, _RECORDS, _RECORDS_GROUPS, _RECORDS_WIDTH = range(11)


def make_expert_activate(kind: int, gated: int) -> Any:
    """The kernel of one activation, gated or not. A thread takes what it computed: groups of 32 columns of items."""

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def expert_activate(arguments: int, thread: int, threads: int) -> None:
        counts, items = load_i64(arguments, _COUNTS), load_i64(arguments, _ITEMS)
        groups = load_i64(arguments, _A_GROUPS)
        gate, up, stride = load_i64(arguments, _GATE), load_i64(arguments, _UP), load_i64(arguments, _A_IN_STRIDE)
        out, records = load_i64(arguments, _A_OUT), load_i64(arguments, _RECORDS)
        record_groups, width = load_i64(arguments, _RECORDS_GROUPS), load_i64(arguments, _RECORDS_WIDTH)
        scratch = np.empty(GROUP, np.float32)
        item, start = share_of(counts, items, groups, 1, thread, threads)
        last_item, last_start = share_of(counts, items, groups, 1, thread + 1, threads)
        while item < last_item or (item == last_item and start < last_start):
            own = items + item * ITEM_FIELDS * 8
            first = load_i64(own, ITEM_POSITION)
            stop = last_start if item == last_item else groups
            for position in range(first, first + load_i64(own, ITEM_PAIRS)):
                for group in range(start, stop):
                    at = position * stride + group * GROUP * 4
                    target = scratch.ctypes.data
                    if out != 0:
                        target = out + position * load_i64(arguments, _A_OUT_STRIDE) + group * GROUP * 4
                    activate_group(kind, gated, gate + at, up + at, target)
                    if records != 0:
                        quantize_group(target, records + offset_of(position, group, record_groups, width))
            item, start = item + 1, 0

    return expert_activate
