"""Gathering the hidden states of the tokens whose logits are wanted."""

from __future__ import annotations

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.memory import load_i64, view
from realizar.backends.cpu.records import Record

SELECT = Record("step count_field indices input input_stride out out_stride width")
_STEP, _COUNT, _INDICES, _IN, _IN_STRIDE, _OUT, _OUT_STRIDE, _WIDTH = range(8)


@cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
def select(arguments: int, thread: int, threads: int) -> None:
    """float32 [count, width], the selected tokens one after another."""
    count = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
    indices = view(load_i64(arguments, _INDICES), max(count, 1), np.int32)
    width = load_i64(arguments, _WIDTH)
    for token in range(count * thread // threads, count * (thread + 1) // threads):
        source = view(load_i64(arguments, _IN) + indices[token] * load_i64(arguments, _IN_STRIDE), width, np.float32)
        view(load_i64(arguments, _OUT) + token * load_i64(arguments, _OUT_STRIDE), width, np.float32)[:] = source
