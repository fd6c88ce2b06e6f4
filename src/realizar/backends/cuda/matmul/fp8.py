"""Long steps in 8-bit floats (e4m3) on compute capability 9.0: from how many tokens on, in which tiles.

Weights stay as they are packed: before each matmul a kernel decodes them to e4m3, with a scale for 64 output features
and 128 columns, into memory that all matmuls share. The scale is a power of two for 64 output features. Weights that a
checkpoint stores as e4m3 are copied from fragment order as they are (`StoredWeights`), if the scales of 64 output
features are equal in 128 columns, as those of blocks and tensors, or in all columns; else they are decoded with the
largest of those scales. Activations have a scale for each token and 128 columns, so that the largest of them is 448;
products of 128 columns are added in the tensor cores, and their sums, scaled, in float32. The price is fidelity: 3 bits
of mantissa in both operands.

Experts are decoded all at once, chosen or not, so they need more tokens (`grouped_tiles.DECODED_PAIRS`); their rows lie
in tiles (`matmul.grouped`), which the kernel reads as it does blocks of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.layouts.fragments import BLOCK
from realizar.backends.cuda.matmul.grouped_tiles import DECODED_PAIRS, STORED_PAIRS
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.native.chunks.tensor_map import TensorMap
from realizar.backends.cuda.native.sources import (
    FP8_FEATURES,
    FP8Tiles,
    GatedActivation,
    fp8_experts_source,
    fp8_weights_source,
)
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.resolved_config import ResolvedConfig

_LOG = logging.getLogger(__name__)
LEAST_TOKENS, STORED_TOKENS = 1024, 128
"""Tokens of a step, padded, from which on matmuls are in 8-bit floats: with fewer, decoding weights takes too long, and
tiles of stored ones leave too much of the device idle."""
TILES, EXPERT_TILES = FP8Tiles(), FP8Tiles(cluster=1)
FP8_INPUT = InputFormat("fp8", TILES.tokens)
FP8_ROWS = InputFormat("fp8", 1)
"""Of rows that are laid in tiles."""
_MOST_SPLITS, _END_GROUPS, _SPLIT_GROUPS = 8, 6, 0.5
"""Splits of a matmul at most; what a tile's end, and adding up a split, take as long as, in groups of 128 columns."""
_TILE_BYTES = FP8_FEATURES * 128  # of a tile's output features and 128 columns
_WEIGHTS = {False: "pp", True: "tpp"}  # of parameters: decoded weights, and stored ones, with their scales
_MATRIX_SIZES, _SHAPE_SIZES = "pii", "ppiiiii"  # of what follows, in `fp8_source`'s order
_EXPERT_SIZES, _DECODE_SIZES = "ppppppppii", "ppppppii"
_stored: WeakIdKeyDictionary = WeakIdKeyDictionary()  # `StoredWeights` or None by a matrix's `weights`


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights of e4m3, of a matrix or of each of a stack, that are multiplied as they lie in fragment order.

    Attributes:
        boxes: where a tile's chunks of 64 columns are, in fragment order rows of 64 bytes.
        scales: float32 [matrices, tiles of output features, groups of 128 columns, 4], each of 64 output features.
        features: float32 [matrices, strips * 64], factors of sums; None where `scales` have all.
    """

    boxes: TensorMap
    scales: torch.Tensor
    features: torch.Tensor | None

    @property
    def arguments(self) -> tuple[Any, int, int]:
        return self.boxes, 0 if self.features is None else self.features.data_ptr(), self.scales.data_ptr()


def stored_weights(matrix: PackedMatrix) -> StoredWeights | None:
    """Those of a matrix or stack, made once; None of other formats, and of scales that do not allow it."""
    if not matrix.format.e4m3:
        return None
    if matrix.weights not in _stored:
        _stored[matrix.weights] = _stored_weights(matrix)
    found: StoredWeights | None = _stored[matrix.weights]
    return found


def _stored_weights(matrix: PackedMatrix) -> StoredWeights | None:
    weight_format, count = matrix.format, matrix.count if isinstance(matrix, PackedExperts) else 1
    chunks, strips = weight_format.chunks(matrix.in_features), -(-matrix.out_features // BLOCK)
    blocks = matrix.weights.view(count, strips, chunks, weight_format.block_bytes)
    halves = blocks[..., weight_format.codes_bytes :].contiguous().view(torch.float16)
    by_row = halves.view(count, strips, chunks, 4, weight_format.sets, 8, 2).permute(0, 1, 3, 6, 5, 2, 4)
    own = by_row.reshape(count, strips * BLOCK, chunks, weight_format.sets)[:, : matrix.out_features].float()
    own = own.flatten(2)[..., : -(-matrix.in_features * weight_format.sets // BLOCK)]  # of columns that are there
    own = torch.nn.functional.pad(own, (0, -own.shape[2] % (2 * weight_format.sets)), value=torch.nan)
    groups = own.view(count, matrix.out_features, -1, 2 * weight_format.sets)  # of 128 columns
    low, high = (_padded_rows(each, strips) for each in _ends(groups, 3))
    (low, top), features = _ends(low.view(count, strips, BLOCK, -1), 2), None
    largest = _ends(high.view(count, strips, BLOCK, -1), 2)[1]
    if not torch.equal(low, largest):
        low, high = _ends(groups.flatten(2), 2)
        if not torch.equal(low, high):
            return None
        features, top = _padded_rows(high, strips).nan_to_num(0.0), torch.ones_like(top)
    scales = top * matrix.block_scales.view(count, strips, 1) * 2.0 ** (weight_format.positions[0] - 24)
    tiles = -(-strips // 4)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, 4 * tiles - strips)).view(count, tiles, 4, -1)
    strip_bytes = weight_format.strip_bytes(matrix.in_features)
    sizes, strides = (
        (BLOCK, BLOCK, strips, count, chunks),
        (BLOCK, strip_bytes, strips * strip_bytes, weight_format.block_bytes),
    )
    boxes = TensorMap(matrix.weights.data_ptr(), "u8", sizes, strides, (BLOCK, BLOCK, FP8_FEATURES // BLOCK, 1, 1))
    return StoredWeights(boxes, scales.transpose(2, 3).contiguous(), features)


def _ends(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest along a dimension, NaN apart."""
    return values.nan_to_num(torch.inf).amin(dim), values.nan_to_num(-torch.inf).amax(dim)


def _padded_rows(values: torch.Tensor, strips: int) -> torch.Tensor:
    """[matrices, out_features, ..] with NaN up to whole strips."""
    rows = values.new_full((len(values), strips * BLOCK, *values.shape[2:]), torch.nan)
    rows[:, : values.shape[1]] = values
    return rows


def _are_stored(matrices: Sequence[PackedMatrix]) -> bool:
    """True if a launch of these matrices decodes none; of weights that are not there yet by their format alone."""
    return all(
        matrix.format.e4m3 and (matrix.weights.is_meta or stored_weights(matrix) is not None) for matrix in matrices
    )


def route_fp8(
    matmuls: MatmulKernels, tokens: int, matrices: Sequence[PackedMatrix], activation: GatedActivation | None
) -> MatmulConfig:
    """A matmul in 8-bit floats for segments of one merged output, with the gated epilogue where they can have one."""
    epilogue = activation if matrices[0].interleaved and matmuls.has_epilogues else None
    tiles = replace(TILES, stored=_are_stored(matrices), cluster=1 if tokens <= TILES.tokens else TILES.cluster)
    splits = 1 if epilogue else _splits(tiles, tokens, matrices, matmuls.tuning.processors)
    return MatmulConfig(tiles, FP8_INPUT, splits, matmuls.is_dependent(tokens) and tiles.stored, epilogue)


def _splits(tiles: FP8Tiles, tokens: int, matrices: Sequence[PackedMatrix], processors: int) -> int:
    """Parts of the columns with which the last block ends soonest, of stored weights in steps of few tokens."""
    if not tiles.stored or tokens >= LEAST_TOKENS:
        return 1
    groups = -(-matrices[0].format.chunks(matrices[0].in_features) // 2)
    clusters = sum(map(_columns, matrices)) * -(-tokens // (tiles.tokens * tiles.cluster))

    def cost(splits: int) -> float:
        rounds = -(-clusters * splits // (processors // tiles.cluster))
        return rounds * (-(-groups // splits) + _END_GROUPS) + splits * _SPLIT_GROUPS

    return min(range(1, max(1, min(_MOST_SPLITS, groups // 4)) + 1), key=cost)


def least_tokens(matrices: Sequence[PackedMatrix]) -> int:
    """Of steps whose matmuls with all these matrices are in 8-bit floats."""
    return STORED_TOKENS if _are_stored(matrices) else LEAST_TOKENS


def least_pairs(stacks: Sequence[PackedMatrix]) -> int:
    """Of an expert, on average, in steps whose matmuls with all these stacks are in 8-bit floats."""
    return STORED_PAIRS if _are_stored(stacks) else DECODED_PAIRS


def expert_tiles(stack: PackedExperts) -> FP8Tiles:
    return replace(EXPERT_TILES, stored=_are_stored([stack]))


def decoded_bytes(matrices: Sequence[PackedMatrix]) -> int:
    """Bytes of `MatmulKernels.decoded` that a matmul of these matrices takes: of weights and, behind them, scales."""
    if _are_stored(matrices):
        return 0
    sizes = [_decoded_sizes(matrix) for matrix in matrices]
    return sum(weights + scales for weights, scales in sizes)


def launch_fp8(
    matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], activations: ActivationBuffer, partials: torch.Tensor,
    tokens: int, config: MatmulConfig, columns: Sequence[int],
) -> None:  # fmt: skip
    """Start the matmuls of matrices of equal columns with the same activations in one grid; formats may differ.

    They go to partials[:splits, :tokens, column : column + out_features] of each matrix, as of `MatmulKernels.launch`.

    Args:
        config: from `route_fp8`, with `halves` where partials are.
        columns: where each matrix begins in the output.

    Raises:
        KernelError: a kernel can't be compiled, loaded or launched.
    """
    assert partials.dtype == (torch.float16 if config.halves else torch.float32)
    outs = [partials.data_ptr() + partials.element_size() * column for column in columns]
    _launch(matmuls, matrices, activations, outs, tokens, config, (partials.stride(1), partials.stride(0)), ())


def launch_fp8_gated(
    matmuls: MatmulKernels, matrix: PackedMatrix, activations: ActivationBuffer, target: ActivationBuffer, tokens: int,
    config: MatmulConfig,
) -> None:  # fmt: skip
    """Start target = activation(gate) * up as `linears.launch_gated` does; `target` is of `fp8` as well."""
    codes, scales = target.addresses
    _launch(matmuls, [matrix], activations, [codes], tokens, config, (0, 0), (scales,))


def _launch(
    matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], activations: ActivationBuffer, outs: Sequence[int],
    tokens: int, config: MatmulConfig, strides: tuple[int, int], out_scales: tuple[int, ...],
) -> None:  # fmt: skip
    assert isinstance(config.tiles, FP8Tiles)
    arguments: list[Any] = []
    tiles, columns = config.tiles, 0
    at = 0 if tiles.stored else matmuls.decoded(decoded_bytes(matrices))
    chunks = matrices[0].format.chunks(matrices[0].in_features)
    for matrix, out in zip(matrices, outs, strict=True):
        if (stored := stored_weights(matrix)) is not None and tiles.stored:
            arguments += stored.arguments
        else:
            own, at = _decode(matmuls, matrix, at)
            arguments += own
        arguments += [out, matrix.out_features, columns]
        columns += _columns(matrix)
    clusters = columns * -(-tokens // (tiles.tokens * tiles.cluster)) * config.splits
    blocks = min(clusters, matmuls.tuning.processors // tiles.cluster) * tiles.cluster
    arguments += [*activations.addresses, tokens, chunks, config.splits, *strides, *out_scales]
    sizes = (_WEIGHTS[tiles.stored] + _MATRIX_SIZES) * len(matrices) + _SHAPE_SIZES + "p" * len(out_scales)
    source = config.sources(tuple(matrix.format for matrix in matrices))[-1]
    matmuls.start(source, (blocks, 1, 1), tiles.threads, arguments, sizes, config.dependent)


def launch_fp8_experts(
    matmuls: MatmulKernels, stack: PackedExperts, addresses: Sequence[int], tiles: int,
    activation: GatedActivation | None, halves: bool,
) -> None:  # fmt: skip
    """Start a matmul over experts, of at most so many tiles of rows; KernelError as of `launch_fp8`.

    `addresses` are of the parameters of `fp8_experts_source` from the biases to `work`.
    """
    own: tuple[Any, ...]
    if (stored := stored_weights(stack)) is not None:
        own = stored.arguments
    else:
        own, _ = _decode(matmuls, stack, matmuls.decoded(decoded_bytes([stack])))
    arguments = [*own, *addresses, stack.out_features, stack.format.chunks(stack.in_features)]
    blocks = min(tiles * _columns(stack), matmuls.tuning.processors)
    own_tiles, sizes = expert_tiles(stack), _WEIGHTS[stored is not None] + _EXPERT_SIZES
    source = fp8_experts_source(own_tiles, activation, halves)
    matmuls.start(source, (blocks, 1, 1), own_tiles.threads, arguments, sizes, False)


def laid_bytes(cols: int) -> tuple[int, int]:
    """Bytes of a row of so many columns in tiles: of its codes and of its scales."""
    groups = -(-cols // 128)
    return groups * 128, groups * 4


def _decode(matmuls: MatmulKernels, matrix: PackedMatrix, at: int) -> tuple[tuple[int, int], int]:
    """Start the decoding of a matrix, or of all of a stack, to memory at `at`.

    Returns the addresses of its weights and scales, and where they end.
    """
    weight_bytes, scale_bytes = _decoded_sizes(matrix)
    own, chunks = (at, at + weight_bytes), matrix.format.chunks(matrix.in_features)
    experts, stride = (matrix.count, matrix.stride) if isinstance(matrix, PackedExperts) else (1, 0)
    grid = -(-chunks // 4), 2 * _columns(matrix), experts
    arguments = [*matrix.addresses, *own, stride, -(-matrix.out_features // 64), chunks]
    matmuls.start(fp8_weights_source(matrix.format), grid, 256, arguments, _DECODE_SIZES, False)
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
    """True if a GPU of compute capability 9.0 multiplies in 8-bit floats; false, with a line in the log, where it goes
    without kernels for it.
    """
    if device.runs("matmuls") and device.runs("wgmma"):
        return True
    _warn_of_halves(device.name)
    return False


def as_device_multiplies(config: ResolvedConfig, device: DeviceProfile) -> ResolvedConfig:
    """The configuration, with prompts in halves where the device does not multiply them in 8-bit floats."""
    return replace(config, prompt_dtype="f16") if config.prompt_dtype == "fp8" and not runs_fp8(device) else config


@cache
def _warn_of_halves(name: str) -> None:
    _LOG.warning("prompts are multiplied in halves: %s goes without the kernels for 8-bit floats", name)
