"""The layers' own inputs: each layer's slice of the projection normed, added to its slice of the token's row."""

from __future__ import annotations

import numpy as np

from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.normalize import normalize_row
from realizar.backends.cpu.memory import read_i64, view
from realizar.backends.cpu.records import Record

# inputs = scale * (norm(inputs) + rows), in slices of `size`; `rows` has the same stride.
LAYER_INPUTS = Record("step count_field inputs rows stride layers size kind eps=f32 weight scale=f32")


@kernel()
def layer_inputs(address: int, thread: int, threads: int) -> None:
    """Units are (token, layer)."""
    arguments = LAYER_INPUTS(address)
    tokens = read_i64(arguments.step, arguments.count_field)
    layers, size = arguments.layers, arguments.size
    kind, eps, scale = arguments.kind, arguments.eps, arguments.scale
    weight = view(arguments.weight, size, np.float32)
    units = tokens * layers
    for unit in range(units * thread // threads, units * (thread + 1) // threads):
        at = unit // layers * arguments.stride + unit % layers * size * 4
        values = view(arguments.inputs + at, size, np.float32)
        row = view(arguments.rows + at, size, np.float32)
        normalize_row(values, values, kind, eps, weight, weight, False)
        for i in range(size):
            values[i] = scale * (values[i] + row[i])
