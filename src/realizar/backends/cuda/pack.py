"""Quantised matrices on the device, in fragment order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.fragments import BLOCK, FragmentFormat, fragment_format, pack_fragments
from realizar.errors import UnsupportedModelError
from realizar.quantization.planes import Planes


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix [rows, cols] that the product kernels read.

    Attributes:
        rows, cols: of the matrix without padding.
        format: the layout of `weights`.
        weights: uint8 [format.size_bytes(rows, cols)], 256-byte aligned.
        block_scales: float32 [ceil(rows / 64)]: what sums of 64 rows are multiplied by.
        table: uint8, the codebook's values plus 128: [16] or [entries * vector], or None.
    """

    rows: int
    cols: int
    format: FragmentFormat
    weights: torch.Tensor
    block_scales: torch.Tensor
    table: torch.Tensor | None

    @property
    def size_bytes(self) -> int:
        """Bytes that a product reads."""
        return int(self.weights.numel() + 4 * self.block_scales.numel())


def pack_matrix(
    parts: Planes | Sequence[Planes], device: torch.device | str, compact: bool = False,
    into: torch.Tensor | None = None,
) -> PackedMatrix:  # fmt: skip
    """Pack one matrix, or several of one format one below the other.

    Args:
        parts: the matrix, or matrices with equal columns. All but the last have a multiple of 64 rows.
        device: where it shall lie.
        compact: as in `fragment_format`.
        into: uint8 memory for `weights`, exactly as large and 256-byte aligned; allocated if None.

    Raises:
        UnsupportedModelError: the parts can't lie in one matrix, or have no format.
    """
    planes = [parts] if isinstance(parts, Planes) else list(parts)
    form = common_format(planes, compact)
    packed = [pack_fragments(part, form) for part in planes]
    rows, cols = sum(part.rows for part in planes), planes[0].cols
    weights = torch.empty(form.size_bytes(rows, cols), dtype=torch.uint8, device=device) if into is None else into
    start = 0
    for data, _ in packed:
        weights[start : start + data.size].copy_(torch.from_numpy(data))
        start += data.size
    scales = torch.from_numpy(np.concatenate([scales for _, scales in packed])).to(device)
    table = codebook_table(planes[0])
    return PackedMatrix(
        rows, cols, form, weights, scales, None if table is None else torch.from_numpy(table).to(device)
    )


def common_format(planes: Sequence[Planes], compact: bool = False) -> FragmentFormat:
    """The one format of matrices that are to lie one below the other.

    Raises:
        UnsupportedModelError: they differ in format, columns or codebook, or a part does not end with a block.
    """
    forms = {fragment_format(part, compact) for part in planes}
    if len(forms) != 1 or len({part.cols for part in planes}) != 1:
        raise UnsupportedModelError("matrices of different formats or widths do not merge")
    if any(part.rows % BLOCK for part in planes[:-1]):
        raise UnsupportedModelError(f"matrices merge at multiples of {BLOCK} rows")
    books = {None if part.codebook is None else part.codebook.tobytes() for part in planes}
    if len(books) != 1:
        raise UnsupportedModelError("matrices of different codebooks do not merge")
    return forms.pop()


def codebook_table(planes: Planes) -> NDArray[np.uint8] | None:
    """What codes index, as bytes of value + 128: uint8 [entries * vector], or None for affine codes."""
    if planes.codebook is None:
        return None
    return (planes.codebook.astype(np.int16) + np.int16(128)).astype(np.uint8).reshape(-1)
