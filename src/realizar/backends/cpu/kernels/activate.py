"""The feed-forward's activation, gated or not, with its result quantised in the same pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.linear import cut, run_of
from realizar.backends.cpu.kernels.quantize import activate_group, offset_of, quantize_group
from realizar.backends.cpu.memory import load_i64
from realizar.backends.cpu.records import Record

ACTIVATE = Record(
    "step count_field gate up input_stride groups out out_stride records records_groups records_width source_groups "
    "block_bytes"
)
_STEP, _COUNT, _GATE, _UP, _IN_STRIDE, _GROUPS, _OUT, _OUT_STRIDE, _RECORDS, _RECORDS_GROUPS, _RECORDS_WIDTH = range(11)
_SOURCE_GROUPS, _BLOCK_BYTES = 11, 12


def make_activate(kind: int, gated: int) -> Any:
    """The kernel of one activation. A thread takes what it computed: groups of columns of blocks of tokens.

    `out` 0 leaves the floats out: where matmuls read records, writing them too would be most of the traffic.
    """

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def activate(arguments: int, thread: int, threads: int) -> None:
        tokens = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
        groups = load_i64(arguments, _GROUPS)
        stride, out_stride = load_i64(arguments, _IN_STRIDE), load_i64(arguments, _OUT_STRIDE)
        records = load_i64(arguments, _RECORDS)
        record_groups, width = load_i64(arguments, _RECORDS_GROUPS), load_i64(arguments, _RECORDS_WIDTH)
        gate, up, out = load_i64(arguments, _GATE), load_i64(arguments, _UP), load_i64(arguments, _OUT)
        scratch = np.empty(GROUP, np.float32)
        source_groups, block_bytes = load_i64(arguments, _SOURCE_GROUPS), load_i64(arguments, _BLOCK_BYTES)
        run = run_of(tokens, source_groups, block_bytes, width, threads)
        block, start, _ = cut(tokens, run, width, groups, 1, thread, threads)
        last_block, stop, _ = cut(tokens, run, width, groups, 1, thread + 1, threads)
        while block < last_block or (block == last_block and start < stop):
            for token in range(block * run, min((block + 1) * run, tokens)):
                for group in range(start, stop if block == last_block else groups):
                    at = token * stride + group * GROUP * 4
                    target = scratch.ctypes.data
                    if out != 0:
                        target = out + token * out_stride + group * GROUP * 4
                    activate_group(kind, gated, gate + at, up + at, target)
                    if records != 0:
                        quantize_group(target, records + offset_of(token, group, record_groups, width))
            block, start = block + 1, 0

    return activate
