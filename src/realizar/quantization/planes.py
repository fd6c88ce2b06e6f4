"""`Planes`: quantised weights of any layout in one form. numpy only.

A weight is `scale * (code - offset) + minimum`, or `scale * codebook[code]`, per group of columns. Scales and minima
may be two-level: a small integer times a float per super-group. Vector codebooks keep their grid indices and, but for
IQ1, their signs; IQ1's shift of a vector by plus or minus an eighth is in its codebook, which holds each grid entry
times 8 plus 1 and minus 1. `Planes` is the reference: backends pack it, or repack raw blocks with an equal result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.quantization.layout import WeightLayout


@dataclass(frozen=True, slots=True)
class Planes:
    """A quantised matrix [out_features, in_features], exact.

    Attributes:
        layout: its bits, offset, groups and codebook.
        codes: uint8 [out_features, in_features]; with a vector codebook uint16, and in_features / vector_size columns.
        scales: float32 [out_features, in_features / group_size]; int16 of the same shape when two-level.
        minima: like `scales`, or None. A minimum is added; two-level ones are `minima * super_minima`.
        super_scales, super_minima: float32 [out_features, in_features / super_group_size], or None.
        signs: uint8 [out_features, in_features / 8], bit i of byte j set where column 8 j + i is negative; None without
            signs.
    """

    layout: WeightLayout
    codes: NDArray[np.uint8] | NDArray[np.uint16]
    scales: NDArray[np.float32] | NDArray[np.int16]
    minima: NDArray[np.float32] | NDArray[np.int16] | None = None
    super_scales: NDArray[np.float32] | None = None
    super_minima: NDArray[np.float32] | None = None
    signs: NDArray[np.uint8] | None = None

    @property
    def out_features(self) -> int:
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.scales.shape[1]) * self.layout.group_size

    def unscaled(self) -> NDArray[np.float32]:
        """The weights before scaling, exact: float32 [out_features, in_features]."""
        book = self.layout.codebook
        if book is None:
            values = self.codes.astype(np.float32) - np.float32(self.layout.offset)
        else:
            values = book.load()[self.codes].reshape(self.out_features, self.in_features).astype(np.float32)
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
        if large is None:
            return values
        return values * np.repeat(large, values.shape[1] // large.shape[1], axis=1)

    def slice_out_features(self, start: int, stop: int) -> Planes:
        return self._cut(lambda values, _: values[start:stop])

    def slice_columns(self, start: int, stop: int) -> Planes:
        """The columns from `start` to `stop`; both are multiples of the outermost group and of eight."""
        return self._cut(lambda values, width: values[:, start // width : stop // width])

    def parts(self, places: NDArray[np.intp], columns: Sequence[tuple[int, int]]) -> Planes:
        """Out_features by their numbers, and runs of columns, each as of `slice_columns`, side by side."""
        return self._cut(
            lambda values, width: np.concatenate(
                [values[places, start // width : stop // width] for start, stop in columns], axis=1
            )
        )

    def _cut(self, cut: Callable[[Any, int], Any]) -> Planes:
        """Each array as `cut` gives it, which takes the array and how many columns a number of it stands for."""
        group, super_group = self.layout.group_size, self.layout.super_group_size or 0
        arrays = {
            "codes": self.layout.vector_size,
            "scales": group,
            "minima": group,
            "super_scales": super_group,
            "super_minima": super_group,
            "signs": 8,
        }
        values = ((name, width, getattr(self, name)) for name, width in arrays.items())
        return replace(self, **{name: cut(value, width) for name, width, value in values if value is not None})

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [out_features, in_features], bit for bit what ggml's reference gives for the same blocks."""
        values = self.unscaled().reshape(self.out_features, -1, self.layout.group_size)
        values *= self.group_scales()[..., None]
        minima = self.group_minima()
        if minima is not None:
            values += minima[..., None]
        return values.reshape(self.out_features, self.in_features)
