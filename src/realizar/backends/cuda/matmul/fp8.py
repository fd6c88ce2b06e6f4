"""Long steps in 8-bit floats (e4m3) on compute capability 9.0: from how many tokens on, in which tiles. Off by default.

Weights stay as they are packed: before each matmul a kernel decodes them to e4m3, times a power of two for each 64
output features, into memory that all matmuls share. Activations have a scale for each token and 128 columns, so that
the largest of them is 448; products of 128 columns are added in the tensor cores, and their sums, scaled, in float32.
The price is fidelity: 3 bits of mantissa in both operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.native.sources import (
    FP8_FEATURES,
    FP8Tiles,
    GatedActivation,
    fp8_source,
    fp8_weights_source,
)
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.errors import InvalidRequestError

LEAST_TOKENS = 1024
"""Tokens of a step, padded, from which on matmuls are in 8-bit floats: with fewer, decoding weights takes too long."""
TILES = FP8Tiles()
FP8_INPUT = InputFormat("fp8", TILES.tokens)
_CAPABILITY = (9, 0)
_TILE_BYTES = FP8_FEATURES * 128  # of a tile's output features and 128 columns
_MATRIX_SIZES, _SHAPE_SIZES = "pppii", "ppiii"  # of parameters, in `fp8_source`'s order


def route_fp8(
    matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], activation: GatedActivation | None
) -> MatmulConfig:
    """A matmul in 8-bit floats for segments of one merged output, with the gated epilogue where they can have one."""
    epilogue = activation if matrices[0].interleaved and matmuls.has_epilogues else None
    return MatmulConfig(TILES, FP8_INPUT, 1, epilogue=epilogue)


def decoded_bytes(matrices: Iterable[PackedMatrix]) -> int:
    """Bytes of `MatmulKernels.decoded` that a matmul of these matrices takes: of weights and, behind them, scales."""
    sizes = [_decoded_sizes(matrix) for matrix in matrices]
    return sum(weights + scales for weights, scales in sizes)


def launch_fp8(
    matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], activations: ActivationBuffer, partials: torch.Tensor,
    tokens: int, columns: Sequence[int],
) -> None:  # fmt: skip
    """Start the matmuls of matrices of equal columns with the same activations in one grid; formats may differ.

    They go to partials[0, :tokens, column : column + out_features] of each matrix, as of `MatmulKernels.launch`.

    Args:
        columns: where each matrix begins in the output.

    Raises:
        KernelError: a kernel can't be compiled, loaded or launched.
    """
    outs = [partials.data_ptr() + 4 * column for column in columns]
    _launch(matmuls, matrices, activations, outs, tokens, partials.stride(1), None, ())


def launch_fp8_gated(
    matmuls: MatmulKernels, matrix: PackedMatrix, activations: ActivationBuffer, target: ActivationBuffer, tokens: int,
    activation: GatedActivation,
) -> None:  # fmt: skip
    """Start target = activation(gate) * up as `linears.launch_gated` does; `target` is of `fp8` as well."""
    codes, scales = target.addresses
    _launch(matmuls, [matrix], activations, [codes], tokens, 0, activation, (scales,))


def _launch(
    matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], activations: ActivationBuffer, outs: Sequence[int],
    tokens: int, token_stride: int, activation: GatedActivation | None, out_scales: tuple[int, ...],
) -> None:  # fmt: skip
    arguments: list[int] = []
    columns, at = 0, matmuls.decoded(decoded_bytes(matrices))
    chunks = matrices[0].format.chunks(matrices[0].in_features)
    for matrix, out in zip(matrices, outs, strict=True):
        weight_bytes, scale_bytes = _decoded_sizes(matrix)
        own = at, at + weight_bytes
        at += weight_bytes + scale_bytes
        count, strips = _columns(matrix), -(-matrix.out_features // 64)
        decode = fp8_weights_source(matrix.format, activation is not None)
        grid = -(-chunks // 4), 2 * count, 1
        matmuls.start(decode, grid, 256, [*matrix.addresses, *own, strips, chunks], "pppppii", False)
        arguments += [*own, out, matrix.out_features, columns]
        columns += count
    clusters = columns * -(-tokens // (TILES.tokens * TILES.cluster))
    blocks = min(clusters, matmuls.tuning.processors // TILES.cluster) * TILES.cluster
    arguments += [*activations.addresses, tokens, chunks, token_stride, *out_scales]
    sizes = _MATRIX_SIZES * len(matrices) + _SHAPE_SIZES + "p" * len(out_scales)
    source = fp8_source(len(matrices), TILES, activation)
    matmuls.start(source, (blocks, 1, 1), TILES.threads, arguments, sizes, False)


def _columns(matrix: PackedMatrix) -> int:
    """Tiles of a matrix's output features."""
    return -(-matrix.out_features // FP8_FEATURES)


def _decoded_sizes(matrix: PackedMatrix) -> tuple[int, int]:
    """Bytes of a matrix's decoded weights, and of their scales up to the next 256 bytes."""
    columns, groups = _columns(matrix), -(-matrix.format.chunks(matrix.in_features) // 2)
    return columns * groups * _TILE_BYTES, -(-columns * 16 // 256) * 256


def check_fp8(device: DeviceProfile) -> None:
    """Raise InvalidRequestError for a GPU that does not multiply in 8-bit floats here."""
    if not device.runs("matmuls") or not device.runs("wgmma") or device.capability != _CAPABILITY:
        major, minor = device.capability
        raise InvalidRequestError(
            f"prompt_dtype fp8 needs an NVIDIA GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]};"
            f" {device.name} has {major}.{minor}",
            "prompt_dtype",
        )
