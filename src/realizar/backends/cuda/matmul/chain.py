"""Dense matmuls of few tokens that follow each other, in one launch.

One block a multiprocessor takes tiles of each matrix in turn. Its warps ask for weights in that order, as far ahead as
their rings in shared memory are deep, so that memory works on while a matmul's input is still being made: by attention
before the launch, or by other blocks, for whose counted tiles a block waits between two matmuls. All blocks must run at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from realizar.backends.cuda.layouts.fragments import TILE, FragmentFormat
from realizar.backends.cuda.matmul.inputs import NO_NORM, ActivationBuffer
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.matmul.residual import Residual
from realizar.backends.cuda.native.chains.source import INPUT_BYTES, SEGMENT_SIZES, ChainTiles, LinkKind, chain_source
from realizar.backends.cuda.native.chunks.tensor_map import TensorMap
from realizar.backends.cuda.native.compiler import Source
from realizar.backends.cuda.native.sources import GatedActivation, MatvecTiles
from realizar.backends.cuda.weights.pack import PackedMatrix

_WARPS, _FINISHERS = 8, 2
_SHARED_BYTES = 150 << 10  # of a block, beside which one of attention finds room
_MOST_INPUTS = 80 << 10  # bytes of them, so that a warp has two slots at least


@dataclass(frozen=True, slots=True)
class Link:
    """A matmul of a chain.

    Attributes:
        matrices: side by side. source: their input, with the norm whose scale they apply.
        ends: `Residual` for a residual add, the next matmul's input for an activation, or else partial sums, float32
            [1, tokens, width].
    """

    matrices: Sequence[PackedMatrix]
    source: ActivationBuffer
    ends: Residual | ActivationBuffer | torch.Tensor

    @property
    def kind(self) -> LinkKind:
        return kind_of(self.ends)


def kind_of(ends: Residual | ActivationBuffer | torch.Tensor) -> LinkKind:
    return "residual" if isinstance(ends, Residual) else "sums" if isinstance(ends, torch.Tensor) else "gated"


def is_link(matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], config: MatmulConfig | None) -> bool:
    """True if a chain may have these matrices, with the epilogue of `config`."""
    if config is None or not isinstance(config.tiles, MatvecTiles) or config.splits > 1:
        return False
    inputs = max(map(_chunks, matrices)) * config.tiles.tokens * INPUT_BYTES
    return matmuls.has_chains and inputs <= _MOST_INPUTS and all(_has_slot(matrix.format) for matrix in matrices)


def launch_chain(
    matmuls: MatmulKernels, links: Sequence[Link], tokens: int, activation: GatedActivation | None, done: torch.Tensor
) -> None:  # fmt: skip
    """Start all matmuls of a chain for `tokens` tokens.

    `done` is int32 [1], zero, and zero again at the end. Raises KernelError where the kernel can't be compiled, loaded
    or launched.
    """
    source, tiles = chain_kernel(links, tokens, activation)
    blocks = matmuls.tuning.processors
    units = sum(_units(link, matrix) for link in links for matrix in link.matrices)
    arguments: list[Any] = [done.data_ptr(), units]
    sizes, before = "pi", 0
    for link in links:
        awaited, column = before, 0
        for matrix in link.matrices:
            count = _units(link, matrix)
            arguments += _maps(matrix, tiles.slot_chunks, source.name)
            arguments += _arguments(link, matrix, column, (count, before % blocks, awaited))
            sizes += SEGMENT_SIZES[link.kind]
            before, column = before + count, column + matrix.out_features
    matmuls.start(source, (blocks, 1, 1), tiles.threads, arguments, sizes, True)


def chain_kernel(links: Sequence[Link], tokens: int, activation: GatedActivation | None) -> tuple[Source, ChainTiles]:
    """The kernel that `launch_chain` starts."""
    segments = [(link.kind, matrix) for link in links for matrix in link.matrices]
    chunks = [_chunks(matrix) for _, matrix in segments]
    tiles = chain_tiles([matrix.format for _, matrix in segments], chunks, tokens)
    return chain_source(tuple((kind, matrix.format) for kind, matrix in segments), tiles, activation), tiles


def chain_tiles(weight_formats: Sequence[FragmentFormat], chunks: Sequence[int], tokens: int) -> ChainTiles:
    """For matrices of these formats and chunks of columns. A slot is such that all warps have some of each."""
    together = 4 if min(chunks) >= 4 * _WARPS else 2
    slot = together * max(weight_format.block_bytes // 4 for weight_format in weight_formats)
    most = -(-max(chunks) // together) * together
    empty = ChainTiles(tokens, most, together, slot, _WARPS, 0, _FINISHERS)
    return replace(empty, depth=(_SHARED_BYTES - empty.shared_bytes) // (_WARPS * slot))


def _has_slot(weight_format: FragmentFormat) -> bool:
    scalar = not weight_format.vector and weight_format.bits in (4, 5, 6, 8) and weight_format.has_matvec
    return scalar and not weight_format.codebook and weight_format.small == "f16"


def _chunks(matrix: PackedMatrix) -> int:
    return matrix.format.chunks(matrix.in_features)


def _units(link: Link, matrix: PackedMatrix) -> int:
    return -(-matrix.out_features // (2 * TILE if link.kind == "gated" else TILE))


def _maps(matrix: PackedMatrix, rows: int, kernel: str) -> list[TensorMap]:
    """Of a tile's first plane of codes, its last one, and its scales, in so many blocks."""
    weight_format, block_bytes = matrix.format, matrix.format.block_bytes
    planes = weight_format.planes  # of which a tile has as many words as a lane has bits
    widths = planes[0], planes[-1], weight_format.tile_scale_bytes // 4
    size = block_bytes // 4, matrix.weights.numel() // block_bytes
    return [
        TensorMap(matrix.weights.data_ptr(), "u32", size, (block_bytes,), (width, rows), kernel) for width in widths
    ]


def _arguments(link: Link, matrix: PackedMatrix, column: int, place: tuple[int, int, int]) -> list[int | float]:
    norm = link.source.norm.arguments() if link.source.norm else NO_NORM
    ends, own, stride = link.ends, list[int | float](), 0
    if isinstance(ends, Residual):
        out, target, weight = ends.hidden.data_ptr(), ends.target, ends.norm_weight
        codes, terms = target.addresses if target is not None else (0, 0)
        own = [
            0 if ends.bias is None else ends.bias.data_ptr(), ends.scale, 0 if weight is None else weight.data_ptr(),
            codes, terms, ends.square_sums.data_ptr(), int(ends.square_sums.shape[1]),
        ]  # fmt: skip
    elif isinstance(ends, ActivationBuffer):
        out, terms = ends.addresses
        own = [terms]
    else:
        out, stride = ends.data_ptr() + 4 * column, ends.stride(1)
    scales = matrix.block_scales.data_ptr()
    own_shape = out, matrix.out_features, _chunks(matrix)
    return [scales, *own_shape, *place, *link.source.addresses, *norm, stride, *own]
