"""`MatrixSource`: a weight matrix between its checkpoint and a backend's packers. numpy only.

A backend asks a source for its layout, finds the format and the kernels for it, and packs the matrix from `planes`, a
run of out_features at a time. Where the backend knows the layout's own bytes, it may read `raw` in place of planes. A
format of weights is a subclass with `planes`; slices of it are sources too, and `PlanesSource` is one of planes that
are made in memory.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.layout import WeightLayout
from realizar.quantization.microscaling import half_e4m3
from realizar.quantization.planes import Planes

Run = tuple[int, int]
"""The first of some out_features or columns that lie one after another, and one more than the last."""

_SMALL: dict[str, tuple[int, int]] = {"i8": (-32, 32), "u8": (0, 64), "u4": (0, 16), "odd4": (0, 16)}
"""Small scales of each type, from the first number to before the second."""


def places_of(runs: Sequence[Run]) -> NDArray[np.intp]:
    """All numbers of some runs, in order: intp [numbers]."""
    return np.fromiter(itertools.chain.from_iterable(itertools.starmap(range, runs)), np.intp)


class MatrixSource(ABC):
    """A weight matrix [out_features, in_features], or a slice of one; `path` and `name` are for errors.

    Raises ValueError where the columns are not a whole number of the layout's blocks.

    Attributes:
        ordered: the matrix with its columns sorted, which packs in fewer bits, and the column of the input that each
            one is, int32 [in_features]; None where columns are best as they are.
    """

    ordered: tuple[MatrixSource, NDArray[np.int32]] | None = None

    def __init__(self, layout: WeightLayout, out_features: int, in_features: int, path: Path, name: str) -> None:
        self.row_bytes = layout.row_bytes(in_features)
        self.layout, self.out_features, self.in_features = layout, out_features, in_features
        self.path, self.name = path, name

    @property
    def size_bytes(self) -> int:
        return self.out_features * self.row_bytes

    @property
    def raw(self) -> NDArray[np.uint8] | None:
        """The stored bytes, uint8 [out_features, row_bytes], where they are in the layout's own order; else None.

        Bytes of an out_feature are contiguous; out_features may lie further apart. A float matrix always has them.
        """
        return None

    @abstractmethod
    def planes(self, start: int, stop: int) -> Planes:
        """The exact weights of a run of out_features; raises UnsupportedModelError for a float matrix."""

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """float32 [stop - start, in_features]."""
        return self.planes(start, stop).dequantize()

    def gather(self, out_features: NDArray[np.int32]) -> NDArray[np.float32]:
        """In any order: float32 [len(out_features), in_features]."""
        return np.concatenate([self.read(int(each), int(each) + 1) for each in out_features])

    def dequantize(self) -> NDArray[np.float32]:
        """All weights: float32 [out_features, in_features]."""
        return self.read(0, self.out_features)

    def check_finite(self, start: int, stop: int) -> None:
        """Raise CheckpointError for NaN or infinity: such weights would make random text of every prompt."""
        reason = self.find_not_finite(start, stop)
        if reason is not None:
            raise CheckpointError(self.path, f"tensor {shown(self.name)}", reason)

    def find_not_finite(self, start: int, stop: int) -> str | None:
        """The reason to refuse a run of out_features, a weight that is NaN or infinite, as a sentence; or None."""
        planes, book = self.planes(start, stop), self.layout.codebook
        if book is not None and book.floats:
            numbers = book.load()
            for code in np.flatnonzero(~np.isfinite(numbers)).astype(np.uint8):
                if (found := planes.codes == code).any():
                    return f"a number of out_feature {start + int(np.argwhere(found)[0, 0])} is not finite"
            dead = planes.scales == 0
            if dead.any():
                silenced = dead.repeat(self.layout.group_size, axis=1) & (numbers[planes.codes] != 0)
                if silenced.any():
                    place = start + int(np.argwhere(silenced)[0, 0])
                    return f"a scale of out_feature {place} is 0, and its numbers are not"
        arrays = {
            "scale": (planes.scales, planes.super_scales),
            "minimum": (planes.minima, planes.super_minima),
        }
        for what, levels in arrays.items():
            for values in levels:
                if values is not None and not np.isfinite(values).all():
                    place = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
                    return f"a {what} of out_feature {start + place} is not finite"
        return None

    def slice_out_features(self, start: int, stop: int) -> MatrixSource:
        """Raises ValueError where the matrix has no such out_features."""
        check_run(self, start, stop)
        return Slice(self, start, stop, 0, self.in_features)

    def slice_columns(self, start: int, stop: int) -> MatrixSource:
        """The columns from `start` to `stop`, both at borders of the layout's blocks.

        Raises ValueError where the matrix has no such columns, or they are not whole blocks.
        """
        check_columns(self, start, stop)
        return Slice(self, 0, self.out_features, start, stop)

    def every(self, first: int, step: int, run: int = 1) -> MatrixSource:
        """Runs of out_features as a source: `run` at `first` and at every `step`th out_feature after it.

        Raises ValueError where runs of more than one do not lie within whole steps.
        """
        if run > 1 and (self.out_features % step or not 0 <= first <= first + run <= step):
            raise ValueError(
                f"tensor '{self.name}' of {self.out_features} out_features has no {run} from {first} of each {step}"
            )
        return self.out_feature_runs([(at, at + run) for at in range(first, self.out_features, step)])

    def out_feature_runs(self, runs: Sequence[Run]) -> MatrixSource:
        """Some runs of out_features as a source, one below the other.

        Raises ValueError where the matrix has no such out_features.
        """
        if len(runs) == 1:
            return self.slice_out_features(*runs[0])
        return self.runs(runs, ((0, self.in_features),))

    def column_runs(self, runs: Sequence[Run]) -> MatrixSource:
        """Some runs of columns as a source, side by side, each at borders of the layout's blocks.

        Raises ValueError where the matrix has no such columns, or they are not whole blocks.
        """
        if len(runs) == 1:
            return self.slice_columns(*runs[0])
        return self.runs(((0, self.out_features),), runs)

    def runs(self, out_features: Sequence[Run], columns: Sequence[Run]) -> MatrixSource:
        """The out_features and columns of some runs; raises as `out_feature_runs` and `column_runs` do."""
        for run in out_features:
            check_run(self, *run)
        for run in columns:
            check_columns(self, *run)
        return _Parts(self, places_of(out_features), columns)

    def prefetch(self) -> None:
        """Ask the system to read the bytes ahead, without waiting for them."""
        return

    def release(self, start: int, stop: int) -> None:
        """Advise the system that the pages of a run of out_features are not needed for now; they stay valid."""
        return


class Slice(MatrixSource):
    """Some out_features and columns of a source that has no road of its own to them."""

    def __init__(self, whole: MatrixSource, start: int, stop: int, first_column: int, last_column: int) -> None:
        super().__init__(whole.layout, stop - start, last_column - first_column, whole.path, whole.name)
        self._whole, self._start = whole, start
        self._first_column, self._last_column = first_column, last_column

    def planes(self, start: int, stop: int) -> Planes:
        planes = self._whole.planes(self._start + start, self._start + stop)
        return planes.slice_columns(self._first_column, self._last_column)

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        values = self._whole.read(self._start + start, self._start + stop)
        return np.ascontiguousarray(values[:, self._first_column : self._last_column])

    def prefetch(self) -> None:
        self._whole.prefetch()

    def release(self, start: int, stop: int) -> None:
        self._whole.release(self._start + start, self._start + stop)


class _Parts(MatrixSource):
    """Some out_features, by their numbers, and runs of columns of a source that has no road of its own to them."""

    def __init__(self, whole: MatrixSource, places: NDArray[np.intp], columns: Sequence[Run]) -> None:
        super().__init__(
            whole.layout, len(places), sum(stop - start for start, stop in columns), whole.path, whole.name
        )
        self._whole, self._places, self._columns = whole, places, columns

    def planes(self, start: int, stop: int) -> Planes:
        first, last = self._run(start, stop)
        return self._whole.planes(first, last).parts(self._places[start:stop] - first, self._columns)

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        first, last = self._run(start, stop)
        values = self._whole.read(first, last)[self._places[start:stop] - first]
        return np.concatenate([values[:, begin:end] for begin, end in self._columns], axis=1)

    def _run(self, start: int, stop: int) -> Run:
        """The out_features of the whole among which those of a run are."""
        places = self._places[start:stop]
        first = int(places.min(initial=self._whole.out_features))
        return first, max(first, int(places.max(initial=-1)) + 1)

    def prefetch(self) -> None:
        self._whole.prefetch()

    def release(self, start: int, stop: int) -> None:
        if stop == self.out_features:
            self._whole.release(0, self._whole.out_features)


def check_run(source: MatrixSource, start: int, stop: int) -> None:
    """Raise ValueError for out_features that a matrix does not have."""
    if not 0 <= start <= stop <= source.out_features:
        raise ValueError(f"tensor '{source.name}' has {source.out_features} out_features, not {start} to {stop}")


def check_columns(source: MatrixSource, start: int, stop: int) -> None:
    """Raise ValueError for columns that a matrix does not have, or that are not whole blocks."""
    if not 0 <= start <= stop <= source.in_features:
        raise ValueError(f"tensor '{source.name}' has {source.in_features} columns, not {start} to {stop}")
    unit = source.layout.block_size
    if start % unit or stop % unit:
        raise ValueError(
            f"tensor '{source.name}': columns {start} to {stop} are not at borders of {source.layout.name} blocks,"
            f" which hold {unit} columns"
        )


class PlanesSource(MatrixSource):
    """A matrix whose planes are at hand; there are no raw bytes."""

    def __init__(self, layout: WeightLayout, planes: Planes, name: str = "matrix") -> None:
        super().__init__(layout, planes.out_features, planes.in_features, Path("memory"), name)
        self._planes = planes

    def planes(self, start: int, stop: int) -> Planes:
        return self._planes.slice_out_features(start, stop)


def random_source(
    layout: WeightLayout, out_features: int, in_features: int, rng: np.random.Generator, std: float
) -> PlanesSource:
    """A random matrix of a layout: every code occurs, and the weights' root mean square is about `std`.

    Raises:
        UnsupportedModelError: the layout has no codes.
        ValueError: the columns are not a whole number of blocks.
    """
    if layout.is_float:
        raise UnsupportedModelError(f"weights in the layout {layout.name} are not codes")
    layout.row_bytes(in_features)
    once = _random_planes(layout, out_features, in_features, rng, 1.0)
    factor = std / float(np.sqrt(np.mean(np.square(once.dequantize(), dtype=np.float64))))
    return PlanesSource(layout, _random_planes(layout, out_features, in_features, rng, factor))


def _random_planes(
    layout: WeightLayout, out_features: int, in_features: int, rng: np.random.Generator, factor: float
) -> Planes:
    vector = layout.vector_size
    codes: NDArray[Any] = rng.integers(0, 1 << layout.bits, (out_features, in_features // vector))
    if layout.codebook is not None and layout.codebook.floats:
        codes = np.where(np.isfinite(layout.codebook.load())[codes], codes, 0)
    groups = out_features, in_features // layout.group_size
    outer = None if layout.super_group_size is None else (out_features, in_features // layout.super_group_size)
    scales, minima = _scales(layout, groups, rng, factor)
    supers = None if outer is None else _floats(outer, rng, factor)
    return Planes(
        layout,
        codes=codes.astype(np.uint8) if vector == 1 else codes.astype(np.uint16),
        scales=scales,
        minima=minima,
        super_scales=supers,
        super_minima=-_floats(outer, rng, factor) if outer is not None and minima is not None else None,
        signs=rng.integers(0, 256, (out_features, in_features // 8), np.uint8) if layout.signs else None,
    )


def _scales(
    layout: WeightLayout, groups: tuple[int, int], rng: np.random.Generator, factor: float
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    if layout.super_group_size is not None:
        first, stop = _SMALL[layout.scale]
        small = rng.integers(first, stop, (2, *groups)).astype(np.int16)
        if layout.scale == "odd4":
            small = small * np.int16(2) + np.int16(1)
        return small[0], small[1] if layout.minimum else None
    scales = _floats(groups, rng, factor)
    if layout.scale == "e8m0":
        scales = np.exp2(np.rint(np.log2(scales))).astype(np.float32)
    elif layout.scale == "e4m3":
        table = half_e4m3()[:127]
        scales = table[np.searchsorted(table[:-1], scales)]
    if layout.centred:
        return 2 * scales, -scales
    middle = np.float32(((1 << layout.bits) - 1) / 2 - layout.offset)
    return scales, (-middle * scales).astype(np.float16).astype(np.float32) if layout.minimum else None


def _floats(shape: tuple[int, int], rng: np.random.Generator, factor: float) -> NDArray[np.float32]:
    return (factor * rng.uniform(0.8, 1.2, shape)).astype(np.float16).astype(np.float32)
