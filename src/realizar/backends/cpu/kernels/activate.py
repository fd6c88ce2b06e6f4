"""The feed-forward's activation, gated or not, with its result quantised in the same pass."""

from __future__ import annotations

import numpy as np

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.kernels.linear import cut, run_of
from realizar.backends.cpu.kernels.quantize import activate_group, offset_of, quantize_group
from realizar.backends.cpu.memory import read_i64
from realizar.backends.cpu.records import Record

ACTIVATE = Record(
    "step count_field gate up input_stride groups out out_stride records records_groups records_width source_groups "
    "block_bytes"
)


def make_activate(kind: int, gated: int) -> Kernel:
    """The kernel of one activation. A thread takes what it computed: groups of columns of blocks of tokens.

    `out` 0 leaves the floats out: where matmuls read records, writing them too would be most of the traffic.
    """

    @kernel(kind, gated)
    def activate(address: int, thread: int, threads: int) -> None:
        arguments = ACTIVATE(address)
        tokens = read_i64(arguments.step, arguments.count_field)
        groups, stride, out_stride = arguments.groups, arguments.input_stride, arguments.out_stride
        records, record_groups, width = arguments.records, arguments.records_groups, arguments.records_width
        gate, up, out = arguments.gate, arguments.up, arguments.out
        scratch = np.empty(GROUP, np.float32)
        run = run_of(tokens, arguments.source_groups, arguments.block_bytes, width, threads)
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
