"""Quantised matrices on the device, in fragment order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat
from realizar.errors import UnsupportedModelError
from realizar.quantization.layout import WeightLayout


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [out_features, in_features] in fragment order, quantised or of floats, that the matmul kernels read.

    Attributes:
        out_features, in_features: of the matrix without padding.
        weights: uint8 [format.size_bytes(out_features, in_features)], 256-byte aligned.
        block_scales: float32 [ceil(out_features / 64)]: the factor of the sums of 64 output features.
        table: uint8, the codebook's values plus 128: [16] or [entries * vector], or None.
        interleaved: its blocks of 64 out_features are alternately the gate's and up's of a feed-forward, for the gated
            epilogue; else its parts lie one below the other.
    """

    out_features: int
    in_features: int
    format: FragmentFormat
    weights: torch.Tensor
    block_scales: torch.Tensor
    table: torch.Tensor | None
    interleaved: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes that a matmul reads."""
        return int(self.weights.numel() + 4 * self.block_scales.numel())

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of weights, scales and codebook; without one that of the weights, which is not read."""
        table = self.weights if self.table is None else self.table
        return self.weights.data_ptr(), self.block_scales.data_ptr(), table.data_ptr()

    def arguments(self, out: int, first_block: int) -> tuple[int, ...]:
        """Kernel arguments of one matrix: `out` is the address of its output, `first_block` its first block in x."""
        return *self.addresses, out, self.out_features, first_block


def strip_places(out_features: Sequence[int], interleaved: bool) -> list[slice]:
    """Places of the blocks of 64 out_features of matrices of these sizes, in the matrix that they are packed into.

    Raises UnsupportedModelError for matrices to be interleaved that are not pairs of one whole number of blocks each.
    """
    if interleaved:
        firsts, seconds = out_features[::2], out_features[1::2]
        if list(firsts) != list(seconds) or any(count % BLOCK for count in firsts):
            raise UnsupportedModelError(
                f"two matrices interleave if their output features are the same multiple of {BLOCK}"
            )
        ends = itertools.accumulate((2 * count // BLOCK for count in firsts), initial=0)
        return [slice(first + part, end, 2) for first, end in itertools.pairwise(ends) for part in range(2)]
    ends = itertools.accumulate((-(-count // BLOCK) for count in out_features), initial=0)
    return [slice(first, end, 1) for first, end in itertools.pairwise(ends)]


def codebook_table(layout: WeightLayout) -> NDArray[np.uint8] | None:
    """The table that codes index, as bytes of value + 128: uint8 [entries * vector], or None for affine codes."""
    if layout.codebook is None:
        return None
    return (layout.codebook.load().astype(np.int16) + np.int16(128)).astype(np.uint8).reshape(-1)
