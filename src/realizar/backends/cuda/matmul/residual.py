"""The residual-add epilogue: a matmul adds its sums to the residual stream and begins the norm after it.

Where a matmul's tiles fill the device, the mat-vec gives all columns of a tile to one block, so the block has whole
sums. It adds them to the stream, and writes the next matmul's input as far as a block of columns determines it:
stream * norm weight as codes and terms, and a partial sum of squares, from which that matmul applies the norm's scale
(`folded_norm`). This saves two kernels in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.matmul.quantized import (
    MATRIX_SIZES,
    SHAPE_SIZES,
    MatmulConfig,
    MatmulKernels,
    shape_arguments,
)
from realizar.backends.cuda.native.sources import MatvecTiles, matmul_source
from realizar.backends.cuda.weights.pack import PackedMatrix

EPILOGUE_COLUMNS = 16  # columns whose squares one block sums
_STREAM_SIZES = "pfppppi"


@dataclass(frozen=True, slots=True)
class Residual:
    """Operands of a residual-add epilogue.

    Attributes:
        hidden: float32 [>= tokens, matrix.out_features], contiguous: the stream.
        bias: float32 [matrix.out_features] of the matmul, or None.
        scale: of what is added.
        norm_weight: float32 [matrix.out_features], the next norm's; None where only the sum is written.
        target: in `int8`, of matrix.out_features columns, in other memory than the matmul's own input; None without
            `norm_weight`. Columns beyond the width stay as they are.
        square_sums: float32 [>= tokens, parts], parts a multiple of 8 and at least `epilogue_square_parts`: gets the
            partial sums of squares.
    """

    hidden: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    norm_weight: torch.Tensor | None
    target: ActivationBuffer | None
    square_sums: torch.Tensor


def epilogue_square_parts(cols: int) -> int:
    """Partial sums of squares of a token of the stream, filled up to a multiple of 8."""
    return -(-cols // (8 * EPILOGUE_COLUMNS)) * 8


def route_residual(matmuls: MatmulKernels, tokens: int, matrix: PackedMatrix) -> MatmulConfig | None:
    """A matmul with the residual-add epilogue, for `tokens` tokens; None where its columns must be split."""
    if not matmuls.has_epilogues:
        return None
    config = matmuls.route(tokens, matrix)
    if not isinstance(config.tiles, MatvecTiles) or config.splits > 1 or matrix.out_features % EPILOGUE_COLUMNS:
        return None
    return replace(config, epilogue="residual")


def launch_residual(
    matmuls: MatmulKernels, matrix: PackedMatrix, activations: ActivationBuffer, residual: Residual, tokens: int,
    config: MatmulConfig,
) -> None:  # fmt: skip
    """Start hidden += scale * (activations @ matrix.T + bias), and target = hidden * norm_weight.

    The activations have no folded norm; `config` is from `route_residual` for these tokens and this matrix. Raises
    KernelError where the kernel can't be compiled, loaded or launched.
    """
    assert activations.norm is None
    assert isinstance(config.tiles, MatvecTiles)
    source, tiles = matmul_source((matrix.format,), config.tiles, config.epilogue), config.tiles
    target, norm_weight, bias = residual.target, residual.norm_weight, residual.bias
    codes, terms = target.addresses if target is not None else (0, 0)
    arguments = [
        *matrix.arguments(residual.hidden.data_ptr(), 0), *shape_arguments(activations, tokens, matrix, 1, 0, 0),
        0 if bias is None else bias.data_ptr(), residual.scale, 0 if norm_weight is None else norm_weight.data_ptr(),
        codes, terms, residual.square_sums.data_ptr(), int(residual.square_sums.shape[1]),
    ]  # fmt: skip
    grid, sizes = tiles.grid(matrix.out_features, 1, 1), MATRIX_SIZES + SHAPE_SIZES + _STREAM_SIZES
    matmuls.start(source, grid, tiles.threads, arguments, sizes, config.dependent)
