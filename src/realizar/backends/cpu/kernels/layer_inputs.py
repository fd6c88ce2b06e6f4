"""The layers' own inputs: each layer's slice of the projection normed, added to its slice of the token's row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.normalize import normalize_row
from realizar.backends.cpu.memory import load_f32, load_i64, view
from realizar.backends.cpu.records import Record

# inputs = scale * (norm(inputs) + rows), in slices of `size`; `rows` has the same stride.
LAYER_INPUTS = Record("step count_field inputs rows stride layers size kind eps weight scale")
_STEP, _COUNT, _INPUTS, _ROWS, _STRIDE, _LAYERS, _SIZE, _KIND, _EPS, _WEIGHT, _SCALE = range(11)


def make_layer_inputs() -> Any:
    """Units are (token, layer)."""

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def layer_inputs(arguments: int, thread: int, threads: int) -> None:
        tokens = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
        layers, size = load_i64(arguments, _LAYERS), load_i64(arguments, _SIZE)
        kind, eps, scale = load_i64(arguments, _KIND), load_f32(arguments, _EPS), load_f32(arguments, _SCALE)
        weight = view(load_i64(arguments, _WEIGHT), size, np.float32)
        units = tokens * layers
        for unit in range(units * thread // threads, units * (thread + 1) // threads):
            at = unit // layers * load_i64(arguments, _STRIDE) + unit % layers * size * 4
            values = view(load_i64(arguments, _INPUTS) + at, size, np.float32)
            row = view(load_i64(arguments, _ROWS) + at, size, np.float32)
            normalize_row(values, values, kind, eps, weight, weight, False)
            for i in range(size):
                values[i] = scale * (values[i] + row[i])

    return layer_inputs
