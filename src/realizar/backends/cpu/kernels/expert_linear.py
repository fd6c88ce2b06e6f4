"""Matmuls of experts: each with the tokens that chose it, sorted as in `routing`, by the tiles of dense matmuls.

Work is cut by items and then by tiles into shares of about equal cost, which follow from the step's choices alone. An
expert's tile is read once for all pairs of an item, and an expert that no token chose is not read at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.kernels.float_linear import multiply_float_tile
from realizar.backends.cpu.kernels.linear import add_bias, multiply_tile
from realizar.backends.cpu.kernels.quantize import activate_group, offset_of, quantize_group
from realizar.backends.cpu.kernels.routing import (
    COUNT_ITEMS,
    ITEM_COST,
    ITEM_EXPERT,
    ITEM_FIELDS,
    ITEM_PAIRS,
    ITEM_POSITION,
)
from realizar.backends.cpu.memory import inner, read_i64, view
from realizar.backends.cpu.records import Record

EXPERT_LINEAR = Record(
    "counts items codes scales supers table codes_stride scales_stride supers_stride tiles groups "
    "activations activation_groups out out_stride together bias bias_stride"
)


@inner
def share_of(counts: int, items: int, tiles: int, together: int, thread: int, threads: int) -> Any:
    """The start of a thread's share: item, and tile in it. It ends where the next one starts.

    Whole runs of `together` tiles, with all pairs of an item, stay with one thread. With `together` times fewer tiles
    and a `together` of 1 the shares are the same ones.
    """
    count = read_i64(counts, COUNT_ITEMS)
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


def make_expert_linear(instruction_set: int, weight_format: int) -> Kernel:
    """The kernel of one format. `together`: tiles that stay with one thread, which goes on with them itself; or 1."""
    width, row_bytes = INSTRUCTION_SETS[instruction_set].tile_tokens[0], 4 * INSTRUCTION_SETS[instruction_set].lanes

    @kernel(instruction_set, weight_format)
    def expert_linear(address: int, thread: int, threads: int) -> None:
        arguments = EXPERT_LINEAR(address)
        counts, items, tiles, together = arguments.counts, arguments.items, arguments.tiles, arguments.together
        groups, table = arguments.groups, arguments.table
        activations, record_groups = arguments.activations, arguments.activation_groups
        item, tile = share_of(counts, items, tiles, together, thread, threads)
        last_item, last_tile = share_of(counts, items, tiles, together, thread + 1, threads)
        while item < last_item or (item == last_item and tile < last_tile):
            own = items + item * ITEM_FIELDS * 8
            expert, position = read_i64(own, ITEM_EXPERT), read_i64(own, ITEM_POSITION)
            stop = position + read_i64(own, ITEM_PAIRS)
            for each in range(tile, last_tile if item == last_item else tiles):
                place = expert * tiles + each
                multiply_tile(
                    instruction_set, weight_format, 0, width,
                    arguments.codes + place * arguments.codes_stride,
                    arguments.scales + place * arguments.scales_stride,
                    arguments.supers + place * arguments.supers_stride,
                    table, groups, activations, record_groups, arguments.out + each * row_bytes,
                    arguments.out_stride, position, stop, np.float32(1.0),
                )  # fmt: skip
                if arguments.bias != 0:
                    add_bias(arguments.bias + expert * arguments.bias_stride,
                             arguments.out + position * arguments.out_stride,
                             arguments.out_stride, stop - position, each * row_bytes // 4,
                             (each + 1) * row_bytes // 4, np.float32(1.0))  # fmt: skip
            item, tile = item + 1, 0

    return expert_linear


EXPERT_FLOAT_LINEAR = Record(
    "counts items weights tile_stride tiles columns input input_stride out out_stride bias bias_stride"
)


def make_expert_float_linear(instruction_set: int, weight_type: int) -> Kernel:
    """The kernel of one element type; shaped like `make_expert_linear`."""
    row_bytes = 4 * INSTRUCTION_SETS[instruction_set].lanes

    @kernel(instruction_set, weight_type)
    def expert_float_linear(address: int, thread: int, threads: int) -> None:
        arguments = EXPERT_FLOAT_LINEAR(address)
        counts, items, tiles, columns = arguments.counts, arguments.items, arguments.tiles, arguments.columns
        item, tile = share_of(counts, items, tiles, 1, thread, threads)
        last_item, last_tile = share_of(counts, items, tiles, 1, thread + 1, threads)
        while item < last_item or (item == last_item and tile < last_tile):
            own = items + item * ITEM_FIELDS * 8
            expert, position = read_i64(own, ITEM_EXPERT), read_i64(own, ITEM_POSITION)
            stop = position + read_i64(own, ITEM_PAIRS)
            for each in range(tile, last_tile if item == last_item else tiles):
                multiply_float_tile(
                    instruction_set, weight_type, 0,
                    arguments.weights + (expert * tiles + each) * arguments.tile_stride,
                    columns, arguments.input, arguments.input_stride,
                    arguments.out + each * row_bytes, arguments.out_stride,
                    position, stop, np.float32(1.0),
                )  # fmt: skip
                if arguments.bias != 0:
                    add_bias(arguments.bias + expert * arguments.bias_stride,
                             arguments.out + position * arguments.out_stride,
                             arguments.out_stride, stop - position, each * row_bytes // 4,
                             (each + 1) * row_bytes // 4, np.float32(1.0))  # fmt: skip
            item, tile = item + 1, 0

    return expert_float_linear


# `out` 0 leaves the floats out, `records` 0 the records; without gate nothing is read at `gate`
EXPERT_ACTIVATE = Record("counts items gate up input_stride groups out out_stride records records_groups records_width")


def make_expert_activate(kind: int, gated: int) -> Kernel:
    """The kernel of one activation, gated or not. A thread takes what it computed: groups of 32 columns of items."""

    @kernel(kind, gated)
    def expert_activate(address: int, thread: int, threads: int) -> None:
        arguments = EXPERT_ACTIVATE(address)
        counts, items, groups = arguments.counts, arguments.items, arguments.groups
        gate, up, stride, out = arguments.gate, arguments.up, arguments.input_stride, arguments.out
        records, record_groups, width = arguments.records, arguments.records_groups, arguments.records_width
        scratch = np.empty(GROUP, np.float32)
        item, start = share_of(counts, items, groups, 1, thread, threads)
        last_item, last_start = share_of(counts, items, groups, 1, thread + 1, threads)
        while item < last_item or (item == last_item and start < last_start):
            own = items + item * ITEM_FIELDS * 8
            first = read_i64(own, ITEM_POSITION)
            stop = last_start if item == last_item else groups
            for position in range(first, first + read_i64(own, ITEM_PAIRS)):
                for group in range(start, stop):
                    at = position * stride + group * GROUP * 4
                    target = scratch.ctypes.data
                    if out != 0:
                        target = out + position * arguments.out_stride + group * GROUP * 4
                    activate_group(kind, gated, gate + at, up + at, target)
                    if records != 0:
                        quantize_group(target, records + offset_of(position, group, record_groups, width))
            item, start = item + 1, 0

    return expert_activate
