"""Long steps in 8-bit floats (e4m3) on compute capability 9.0: from how many tokens on, in which tiles.

Weights stay as they are packed: before each matmul a kernel decodes them to e4m3, with a scale for 64 output features
and 128 columns, into memory that all matmuls share. The scale is a power of two for 64 output features; of weights that
are stored as e4m3 it is the largest of theirs, so that those of blocks stay as they are. Activations have a scale for
each token and 128 columns, so that the largest of them is 448; products of 128 columns are added in the tensor cores,
and their sums, scaled, in float32. The price is fidelity: 3 bits of mantissa in both operands.

Experts are decoded all at once, chosen or not, so they need more tokens (`grouped_tiles.FP8_PAIRS`); their rows lie in
tiles (`matmul.grouped`), which the kernel reads as it does blocks of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.native.sources import (
    FP8_FEATURES,
    FP8Tiles,
    GatedActivation,
    fp8_experts_source,
    fp8_source,
    fp8_weights_source,
)
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.errors import InvalidRequestError

_LOG = logging.getLogger(__name__)
LEAST_TOKENS = 1024
"""Tokens of a step, padded, from which on matmuls are in 8-bit floats: with fewer, decoding weights takes too long."""
TILES, EXPERT_TILES = FP8Tiles(), FP8Tiles(cluster=1)
FP8_INPUT = InputFormat("fp8", TILES.tokens)
FP8_ROWS = InputFormat("fp8", 1)
"""Of rows that are laid in tiles."""
_CAPABILITY = (9, 0)
_TILE_BYTES = FP8_FEATURES * 128  # of a tile's output features and 128 columns
_MATRIX_SIZES, _SHAPE_SIZES = "pppii", "ppiii"  # of parameters, in `fp8_source`'s order
_EXPERT_SIZES, _DECODE_SIZES = "ppppppppppii", "ppppppii"


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
    outs = [partials.data_ptr() + partials.element_size() * column for column in columns]
    halves = partials.dtype == torch.float16
    _launch(matmuls, matrices, activations, outs, tokens, partials.stride(1), None, (), halves)


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
    halves: bool = False,
) -> None:  # fmt: skip
    arguments: list[int] = []
    columns, at = 0, matmuls.decoded(decoded_bytes(matrices))
    chunks = matrices[0].format.chunks(matrices[0].in_features)
    for matrix, out in zip(matrices, outs, strict=True):
        own, at = _decode(matmuls, matrix, at, activation is not None)
        arguments += [*own, out, matrix.out_features, columns]
        columns += _columns(matrix)
    clusters = columns * -(-tokens // (TILES.tokens * TILES.cluster))
    blocks = min(clusters, matmuls.tuning.processors // TILES.cluster) * TILES.cluster
    arguments += [*activations.addresses, tokens, chunks, token_stride, *out_scales]
    sizes = _MATRIX_SIZES * len(matrices) + _SHAPE_SIZES + "p" * len(out_scales)
    source = fp8_source(len(matrices), TILES, activation, halves)
    matmuls.start(source, (blocks, 1, 1), TILES.threads, arguments, sizes, False)


def launch_fp8_experts(
    matmuls: MatmulKernels, stack: PackedExperts, addresses: Sequence[int], tiles: int,
    activation: GatedActivation | None, halves: bool,
) -> None:  # fmt: skip
    """Start a matmul over experts, of at most so many tiles of rows; KernelError as of `launch_fp8`.

    `addresses` are of the parameters of `fp8_experts_source` from the biases to `work`.
    """
    own, _ = _decode(matmuls, stack, matmuls.decoded(decoded_bytes([stack])), activation is not None)
    arguments = [*own, *addresses, stack.out_features, stack.format.chunks(stack.in_features)]
    blocks = min(tiles * _columns(stack), matmuls.tuning.processors)
    source = fp8_experts_source(EXPERT_TILES, activation, halves)
    matmuls.start(source, (blocks, 1, 1), EXPERT_TILES.threads, arguments, _EXPERT_SIZES, False)


def laid_bytes(cols: int) -> tuple[int, int]:
    """Bytes of a row of so many columns in tiles: of its codes and of its scales."""
    groups = -(-cols // 128)
    return groups * 128, groups * 4


def _decode(
    matmuls: MatmulKernels, matrix: PackedMatrix, at: int, interleaved: bool
) -> tuple[tuple[int, int], int]:  # fmt: skip
    """Start the decoding of a matrix, or of all of a stack, to memory at `at`.

    Returns the addresses of its weights and scales, and where they end.
    """
    weight_bytes, scale_bytes = _decoded_sizes(matrix)
    own, chunks = (at, at + weight_bytes), matrix.format.chunks(matrix.in_features)
    experts, stride = (matrix.count, matrix.stride) if isinstance(matrix, PackedExperts) else (1, 0)
    grid = -(-chunks // 4), 2 * _columns(matrix), experts
    arguments = [*matrix.addresses, *own, stride, -(-matrix.out_features // 64), chunks]
    matmuls.start(fp8_weights_source(matrix.format, interleaved), grid, 256, arguments, _DECODE_SIZES, False)
    return own, at + weight_bytes + scale_bytes


def _columns(matrix: PackedMatrix) -> int:
    """Tiles of a matrix's output features."""
    return -(-matrix.out_features // FP8_FEATURES)


def _decoded_sizes(matrix: PackedMatrix) -> tuple[int, int]:
    """Bytes of decoded weights, and of their scales up to the next 256 bytes."""
    columns, groups = _columns(matrix), -(-matrix.format.chunks(matrix.in_features) // 2)
    columns *= matrix.count if isinstance(matrix, PackedExperts) else 1
    return columns * groups * _TILE_BYTES, -(-columns * groups * 16 // 256) * 256


def runs_fp8(device: DeviceProfile) -> bool:
    """True if a GPU multiplies in 8-bit floats; false, with a line in the log, where it goes without kernels for it.

    Raises InvalidRequestError for one that can't.
    """
    if device.capability != _CAPABILITY:
        major, minor = device.capability
        raise InvalidRequestError(
            f"prompt_dtype fp8 needs an NVIDIA GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]};"
            f" {device.name} has {major}.{minor}",
            "prompt_dtype",
        )
    if device.runs("matmuls") and device.runs("wgmma"):
        return True
    _LOG.warning("prompts are multiplied in halves: %s goes without the kernels for 8-bit floats", device.name)
    return False
