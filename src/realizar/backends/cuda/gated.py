"""Products of a feed-forward's interleaved gate and up that end with their activation.

A consumer warpgroup of the Hopper kernel holds the sums of gate and up of the same outputs. So it can write
activation(gate) * up, the next product's input: one kernel less, and neither the sums of 2 x 14336 columns as float32
nor their way through memory.
"""

from __future__ import annotations

import torch

from realizar.backends.cuda.deferred_norm import NO_NORM
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.pack import PackedMatrix
from realizar.backends.cuda.products import HalfActivations, ProductConfig, Products, addresses


def route_gated(
    products: Products, rows: int, matrix: PackedMatrix, activation: GatedActivation
) -> ProductConfig | None:
    """How a product with `rows` rows ends with its activation; None where it does not.

    Where batches may not change a row's bits it never does: not every number of rows could.
    """
    form = products.activation_format(rows)
    if not matrix.interleaved or form.kind == "int8" or products.batch_invariant:
        return None
    tiles = products.tuning.gated(rows, matrix.rows, matrix.cols, matrix.format)
    if tiles is None:
        return None
    return ProductConfig(tiles, form, 1, products.capability >= (9, 0) and products.tuning.dependent(rows), activation)


def runs_gated(products: Products, matrix: PackedMatrix, config: ProductConfig) -> bool:
    """Whether `launch_gated` takes a config: it is from `route_gated`, and its kernel was not refused."""
    if config.activation is None or not products.refused:
        return config.activation is not None
    return ((matrix.format,), config.tiles, config.activation) not in products.refused


def launch_gated(
    products: Products, matrix: PackedMatrix, activations: HalfActivations, target: HalfActivations, rows: int,
    config: ProductConfig, stream: int | None = None,
) -> None:  # fmt: skip
    """Start target = activation(gate) * up, of gate and up = activations @ matrix.T.

    Args:
        matrix: gate and up, interleaved.
        target: of matrix.rows / 2 columns, in the format `config.format` as `activations`, in other memory. All its
            rows are divided by one power of two; values beyond 4.2e6 are cut to that. Rows beyond the step's are
            written up to the end of their block.
        rows: rows of the step.
        config: from `route_gated` for these rows and this matrix.
        stream: its handle; torch's current stream if None.

    Raises:
        KernelError: the kernel can't be compiled, loaded or launched.
    """
    kernel, tiles = products.prepared((matrix.format,), config.tiles, config.activation)
    handle = torch.cuda.current_stream(products.device).cuda_stream if stream is None else stream
    arguments: list[float] = [*addresses(matrix), target.values.data_ptr(), matrix.rows, 0]
    arguments += [activations.values.data_ptr(), activations.row_scales.data_ptr()]
    arguments += activations.norm.arguments() if activations.norm else NO_NORM
    arguments += [rows, matrix.format.chunks(matrix.cols), 1, 0, 0, target.row_scales.data_ptr()]
    grid = tiles.grid(matrix.rows, 1, -(-rows // tiles.rows))
    kernel.launch(grid, tiles.threads, arguments, "ppppii" + "pp" + "piff" + "iiiii" + "p", handle, config.dependent)
