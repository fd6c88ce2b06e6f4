"""Products whose sums are added to the residual stream at once, and with which the norm after them begins.

Where a product's tiles fill the device, the mat-vec gives all columns of a tile to one block, so that it has whole
sums. It can add them, and write the next product's input as far as a block of columns determines it: stream * gain, as
codes and terms, and its share of the sum of squares, from which that product finishes the norm (`deferred_norm`). That
is two kernels less in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from realizar.backends.cuda.matmul.quantized import (
    MATRIX_SIZES,
    SHAPE_SIZES,
    Activations,
    Int8Activations,
    ProductConfig,
    Products,
    input_addresses,
    shape_arguments,
)
from realizar.backends.cuda.native.sources import MatvecTiles
from realizar.backends.cuda.weights.pack import PackedMatrix

SHARE = 16  # columns whose squares one block sums
_STREAM_SIZES = "pfppppi"


@dataclass(frozen=True, slots=True)
class Residual:
    """What a product adds to, and what it leaves for the product after it.

    Attributes:
        hidden: float32 [>= rows, matrix.rows], contiguous: the stream.
        bias: float32 [matrix.rows] of the product, or None.
        scale: of what is added.
        gain: float32 [matrix.rows], the next norm's weights; None where nothing but the sum is to be written.
        target: of matrix.rows columns, in other memory than the product's own input; None without `gain`. Columns
            beyond the width stay as they are.
        squares: float32 [>= rows, parts], parts a multiple of 8 that is no less than `share_count`: gets the shares.
    """

    hidden: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    gain: torch.Tensor | None
    target: Int8Activations | None
    squares: torch.Tensor


def share_count(cols: int) -> int:
    """Shares of the sum of squares of a row of the stream, filled up to a multiple of 8."""
    return -(-cols // (8 * SHARE)) * 8


def route_residual(products: Products, rows: int, matrix: PackedMatrix) -> ProductConfig | None:
    """How a product with `rows` rows ends on the stream; None where it does not: where its columns are split."""
    config = products.route(rows, matrix)
    if not isinstance(config.tiles, MatvecTiles) or config.splits > 1 or matrix.rows % SHARE:
        return None
    return replace(config, ending="residual")


def launch_residual(
    products: Products, matrix: PackedMatrix, activations: Activations, residual: Residual, rows: int,
    config: ProductConfig, stream: int | None = None,
) -> None:  # fmt: skip
    """Start hidden += scale * (activations @ matrix.T + bias), and target = hidden * gain.

    Args:
        activations: whose norm, if one was deferred, is finished already.
        rows: rows of the step.
        config: from `route_residual` for these rows and this matrix.
        stream: its handle; torch's current stream if None.

    Raises:
        KernelError: the kernel can't be compiled, loaded or launched.
    """
    assert activations.norm is None
    kernel, tiles = products.prepared((matrix.format,), config.tiles, config.ending)
    target, gain, bias = residual.target, residual.gain, residual.bias
    codes, terms = input_addresses(target) if target is not None else (0, 0)
    arguments = [
        *matrix.arguments(residual.hidden.data_ptr(), 0), *shape_arguments(activations, rows, matrix, 1, 0, 0),
        0 if bias is None else bias.data_ptr(), residual.scale, 0 if gain is None else gain.data_ptr(), codes, terms,
        residual.squares.data_ptr(), int(residual.squares.shape[1]),
    ]  # fmt: skip
    grid, sizes = tiles.grid(matrix.rows, 1, 1), MATRIX_SIZES + SHAPE_SIZES + _STREAM_SIZES
    kernel.launch(grid, tiles.threads, arguments, sizes, products.stream(stream), config.dependent)
