"""`Planes`: quantised weights of any layout in one form. numpy only.

A weight is `scale * (code - offset) + minimum`, or `scale * codebook[code]`, per group of columns. Scales and minima
may be two-level: a small integer times a float per super-group. Vector codebooks keep their grid indices and, but for
IQ1, their signs; IQ1's shift of a vector by plus or minus an eighth is in its codebook, which holds each grid entry
times 8 plus 1 and minus 1. `Planes` is the reference: backends pack it, or repack raw blocks with an equal result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Planes:
    """A quantised matrix [out_features, in_features], exact.

    Attributes:
        codes: uint8 [out_features, in_features]; with a vector codebook uint16, and in_features / vector_size columns.
        bits: width of a code (1-6 or 8; of an index, for a vector codebook).
        offset: integer subtracted from a code; 0 with a codebook.
        group_size: columns that share a scale (16 to 256).
        scales: float32 [out_features, in_features / group_size]; int16 of the same shape when two-level.
        minima: like `scales`, or None. A minimum is added; two-level ones are `minima * super_minima`.
        super_group_size: columns that share a super-scale, or None where one-level.
        super_scales, super_minima: float32 [out_features, in_features / super_group_size], or None.
        codebook: int8 [2 ** bits] (scalar) or int8 [2 ** bits, vector_size] (vector), or None where affine.
        signs: uint8 [out_features, in_features / 8], bit i of byte j set where column 8 j + i is negative; None without
            signs.
    """

    codes: NDArray[np.uint8] | NDArray[np.uint16]
    bits: int
    offset: int
    group_size: int
    scales: NDArray[np.float32] | NDArray[np.int16]
    minima: NDArray[np.float32] | NDArray[np.int16] | None = None
    super_group_size: int | None = None
    super_scales: NDArray[np.float32] | None = None
    super_minima: NDArray[np.float32] | None = None
    codebook: NDArray[np.int8] | None = None
    signs: NDArray[np.uint8] | None = None

    @property
    def out_features(self) -> int:
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.scales.shape[1]) * self.group_size

    @property
    def vector_size(self) -> int:
        """Columns that one code stands for: 1, or the length of a vector codebook's entries."""
        return int(self.codebook.shape[1]) if self.codebook is not None and self.codebook.ndim == 2 else 1

    def integers(self) -> NDArray[np.int16]:
        """The weights before scaling: int16 [out_features, in_features]."""
        if self.codebook is None:
            values = self.codes.astype(np.int16) - np.int16(self.offset)
        else:
            values = self.codebook[self.codes].reshape(self.out_features, self.in_features).astype(np.int16)
        if self.signs is not None:
            negative = np.unpackbits(self.signs, axis=1, bitorder="little").astype(bool)
            np.negative(values, out=values, where=negative)
        return values

    def group_scales(self) -> NDArray[np.float32]:
        """float32 [out_features, in_features / group_size], the two levels multiplied."""
        return self._flatten(self.scales, self.super_scales)

    def group_minima(self) -> NDArray[np.float32] | None:
        """float32 [out_features, in_features / group_size], the two levels multiplied; None without minima."""
        return None if self.minima is None else self._flatten(self.minima, self.super_minima)

    def _flatten(self, small: NDArray[np.generic], large: NDArray[np.float32] | None) -> NDArray[np.float32]:
        values = small.astype(np.float32)
        if large is None or self.super_group_size is None:
            return values
        return values * np.repeat(large, self.super_group_size // self.group_size, axis=1)

    def slice_out_features(self, start: int, stop: int) -> Planes:
        return self._cut(lambda values, _: values[start:stop])

    def slice_columns(self, start: int, stop: int) -> Planes:
        """The columns from `start` to `stop`; both are multiples of the outermost group and of eight."""
        return self._cut(lambda values, width: values[:, start // width : stop // width])

    def _cut(self, cut: Callable[[Any, int], Any]) -> Planes:
        """Each array as `cut` gives it, which takes the array and how many columns a number of it stands for."""
        arrays = {
            "codes": self.vector_size,
            "scales": self.group_size,
            "minima": self.group_size,
            "super_scales": self.super_group_size or 0,
            "super_minima": self.super_group_size or 0,
            "signs": 8,
        }
        values = ((name, width, getattr(self, name)) for name, width in arrays.items())
        return replace(self, **{name: cut(value, width) for name, width, value in values if value is not None})

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [out_features, in_features], bit for bit what ggml's reference gives for the same blocks."""
        values = self.integers().astype(np.float32).reshape(self.out_features, -1, self.group_size)
        values *= self.group_scales()[..., None]
        minima = self.group_minima()
        if minima is not None:
            values += minima[..., None]
        return values.reshape(self.out_features, self.in_features)
