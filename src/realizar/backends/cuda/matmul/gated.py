"""Products of a feed-forward's interleaved gate and up that end with their activation.

A consumer warpgroup of the Hopper kernel holds the sums of gate and up of the same outputs, and so does a block of the
mat-vec that takes the same tile of two strips. So it can write activation(gate) * up, the next product's input: one
kernel less, and neither the sums of 2 x 14336 columns as float32 nor their way through memory.
"""

from __future__ import annotations

from realizar.backends.cuda.matmul.quantized import (
    MATRIX_SIZES,
    SHAPE_SIZES,
    Activations,
    HalfActivations,
    ProductConfig,
    Products,
    input_addresses,
    shape_arguments,
)
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.weights.pack import PackedMatrix


def route_gated(
    products: Products, rows: int, matrix: PackedMatrix, activation: GatedActivation
) -> ProductConfig | None:
    """How a product with `rows` rows ends with its activation; None where it does not.

    Where batches may not change a row's bits it never does: not every number of rows could.
    """
    form = products.activation_format(rows)
    if not matrix.interleaved or products.batch_invariant:
        return None
    choose = products.tuning.gated_few if form.kind == "int8" else products.tuning.gated
    tiles = choose(rows, matrix.rows, matrix.cols, matrix.format)
    if tiles is None:
        return None
    return ProductConfig(tiles, form, 1, products.is_dependent(rows), activation)


def launch_gated(
    products: Products, matrix: PackedMatrix, activations: Activations, target: Activations, rows: int,
    config: ProductConfig, stream: int | None = None,
) -> None:  # fmt: skip
    """Start target = activation(gate) * up, of gate and up = activations @ matrix.T.

    Args:
        matrix: gate and up, interleaved.
        target: of matrix.rows / 2 columns, in the format `config.format` as `activations`, in other memory. All rows of
            `half` are divided by one power of two; values beyond 4.2e6 are cut to that. Rows beyond the step's are
            written up to the end of their block.
        rows: rows of the step.
        config: from `route_gated` for these rows and this matrix.
        stream: its handle; torch's current stream if None.

    Raises:
        KernelError: the kernel can't be compiled, loaded or launched.
    """
    assert isinstance(activations, HalfActivations) == isinstance(target, HalfActivations)
    kernel, tiles = products.prepared((matrix.format,), config.tiles, config.ending)
    out, out_scales = input_addresses(target)
    shape = shape_arguments(activations, rows, matrix, 1, 0, 0)
    arguments = [*matrix.arguments(out, 0), *shape, out_scales]
    grid, sizes = tiles.grid(matrix.rows, 1, -(-rows // tiles.rows)), MATRIX_SIZES + SHAPE_SIZES + "p"
    kernel.launch(grid, tiles.threads, arguments, sizes, products.stream(stream), config.dependent)
