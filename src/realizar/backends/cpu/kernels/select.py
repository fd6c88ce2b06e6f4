"""Gathering the hidden states of the tokens whose logits are wanted."""

from __future__ import annotations

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.memory import read_i64, view
from realizar.backends.cpu.records import Record

SELECT = Record("step count_field indices input input_stride out out_stride width")


@cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
def select(address: int, thread: int, threads: int) -> None:
    """float32 [count, width], the selected tokens one after another."""
    arguments = SELECT(address)
    count = read_i64(arguments.step, arguments.count_field)
    indices = view(arguments.indices, max(count, 1), np.int32)
    width = arguments.width
    for token in range(count * thread // threads, count * (thread + 1) // threads):
        source = view(arguments.input + indices[token] * arguments.input_stride, width, np.float32)
        view(arguments.out + token * arguments.out_stride, width, np.float32)[:] = source
