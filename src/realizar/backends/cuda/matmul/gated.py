"""The gated epilogue: a matmul of a feed-forward's interleaved gate and up writes activation(gate) * up.

A consumer warpgroup of the Hopper kernel holds the sums of gate and up of the same outputs, and so does a block of the
mat-vec that takes the same tile of two strips. So it can write the next matmul's input. This saves a kernel, and the
sums of 2 x 14336 columns as float32 with their way through memory.
"""

from __future__ import annotations

from realizar.backends.cuda.matmul.fixed_order import is_gated
from realizar.backends.cuda.matmul.quantized import (
    MATRIX_SIZES,
    SHAPE_SIZES,
    Activations,
    HalfActivations,
    MatmulConfig,
    MatmulKernels,
    input_addresses,
    shape_arguments,
)
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.weights.pack import PackedMatrix


def route_gated(
    matmuls: MatmulKernels, tokens: int, matrix: PackedMatrix, activation: GatedActivation
) -> MatmulConfig | None:
    """A matmul with the gated epilogue, for `tokens` tokens; None where it has none.

    With `batch_invariant` it has one for every number of tokens or for none.
    """
    activation_format = matmuls.activation_format(tokens, matrix.format.is_float)
    if not matrix.interleaved or not matmuls.has_epilogues:
        return None
    if matmuls.batch_invariant and not is_gated(matmuls.tuning, matrix.out_features, matrix.in_features, matrix.format):
        return None
    choose = matmuls.tuning.gated_few if activation_format.kind == "int8" else matmuls.tuning.gated
    tiles = choose(tokens, matrix.out_features, matrix.in_features, matrix.format)
    if tiles is None:
        return None
    return MatmulConfig(tiles, activation_format, 1, matmuls.is_dependent(tokens), activation)


def launch_gated(
    matmuls: MatmulKernels, matrix: PackedMatrix, activations: Activations, target: Activations, tokens: int,
    config: MatmulConfig, stream: int | None = None,
) -> None:  # fmt: skip
    """Start target = activation(gate) * up, of gate and up = activations @ matrix.T.

    Args:
        matrix: gate and up, interleaved.
        target: of matrix.out_features / 2 columns, in the format `config.format` as `activations`, in other memory. All
            tokens of `half` are divided by one power of two; values beyond 4.2e6 are cut to that. Tokens beyond the
            step's are written up to the end of their block.
        tokens: of the step.
        config: from `route_gated` for these tokens and this matrix.
        stream: its handle; torch's current stream if None.

    Raises:
        KernelError: the kernel can't be compiled, loaded or launched.
    """
    assert isinstance(activations, HalfActivations) == isinstance(target, HalfActivations)
    kernel, tiles = matmuls.prepared((matrix.format,), config.tiles, config.epilogue), config.tiles
    out, out_scales = input_addresses(target)
    shape = shape_arguments(activations, tokens, matrix, 1, 0, 0)
    arguments = [*matrix.arguments(out, 0), *shape, out_scales]
    grid, sizes = tiles.grid(matrix.out_features, 1, -(-tokens // tiles.tokens)), MATRIX_SIZES + SHAPE_SIZES + "p"
    kernel.launch(grid, tiles.threads, arguments, sizes, matmuls.stream(stream), config.dependent)
