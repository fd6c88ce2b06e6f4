"""Matrices of ggml blocks, and of plain numbers, as sources: GGUF and unquantised safetensors files hold these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization.convert import dequantize, to_planes
from realizar.quantization.finite import find_not_finite
from realizar.quantization.ggml_layouts import GGML_LAYOUTS
from realizar.quantization.layout import WeightLayout
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource, Run, check_columns, check_run, places_of

_MEMORY = Path("memory")


@dataclass(frozen=True, slots=True)
class Pages:
    """The place of some out_features in a mapped file; `stride` is the bytes from one to the next.

    A stride of 0 is that of out_features that share all pages of `stored`.
    """

    stored: StoredTensor
    first_byte: int = 0
    stride: int = 0

    def after(self, out_features: int) -> Pages:
        return replace(self, first_byte=self.first_byte + out_features * self.stride)

    def every(self, first: int, step: int) -> Pages:
        return replace(self.after(first), stride=step * self.stride)

    def part(self, start: int, stop: int) -> StoredTensor:
        if not self.stride:
            return self.stored
        first, last = (self.first_byte + place * self.stride for place in (start, stop))
        return self.stored.part(first, last)


class BlockSource(MatrixSource):
    """A matrix whose `raw` bytes are ggml blocks; raises UnsupportedModelError where weights can't have the type.

    Args:
        raw: uint8 [out_features, bytes of one], each contiguous.
        first_block: number of the first block in its tensor, for errors.
        pages: where it lies in a mapped file; None in memory.
    """

    def __init__(
        self, ggml_type: GGMLType, raw: NDArray[np.uint8], path: Path = _MEMORY, name: str = "matrix",
        first_block: int = 0, pages: Pages | None = None,
    ) -> None:  # fmt: skip
        layout = ggml_layout(ggml_type)
        super().__init__(layout, raw.shape[0], raw.shape[1] // layout.block_bytes * layout.block_size, path, name)
        self.ggml_type, self._raw, self._first_block, self._pages = ggml_type, raw, first_block, pages

    @property
    def raw(self) -> NDArray[np.uint8]:
        return self._raw

    def planes(self, start: int, stop: int) -> Planes:
        return to_planes(self.ggml_type, self._bytes(start, stop), stop - start, self.in_features)

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        return dequantize(self.ggml_type, self._bytes(start, stop), stop - start, self.in_features)

    def gather(self, out_features: NDArray[np.int32]) -> NDArray[np.float32]:
        return dequantize(self.ggml_type, self._raw[out_features].reshape(-1), len(out_features), self.in_features)

    def find_not_finite(self, start: int, stop: int) -> str | None:
        first = self._first_block + start * (self.row_bytes // self.layout.block_bytes)
        return find_not_finite(self.ggml_type, self._bytes(start, stop), first)

    def slice_out_features(self, start: int, stop: int) -> BlockSource:
        check_run(self, start, stop)
        first = self._first_block + start * (self.row_bytes // self.layout.block_bytes)
        pages = None if self._pages is None else self._pages.after(start)
        return BlockSource(self.ggml_type, self._raw[start:stop], self.path, self.name, first, pages)

    def every(self, first: int, step: int, run: int = 1) -> MatrixSource:
        """Errors of such a source count its own blocks."""
        if run > 1:
            return super().every(first, step, run)
        pages = None if self._pages is None else self._pages.every(first, step)
        return BlockSource(self.ggml_type, self._raw[first::step], self.path, self.name, 0, pages)

    def slice_columns(self, start: int, stop: int) -> BlockSource:
        """Errors of such a slice count its own blocks."""
        check_columns(self, start, stop)
        raw = self._raw[:, self.layout.row_bytes(start) : self.layout.row_bytes(stop)]
        return BlockSource(self.ggml_type, raw, self.path, self.name, 0, self._pages)

    def runs(self, out_features: Sequence[Run], columns: Sequence[Run]) -> CopiedSource:
        """Those of one kind, say, where several kinds alternate. Columns begin and end at borders of blocks."""
        for run in out_features:
            check_run(self, *run)
        for run in columns:
            check_columns(self, *run)
        bytes_of = [slice(*map(self.layout.row_bytes, run)) for run in columns]

        def make(places: NDArray[np.intp]) -> NDArray[np.uint8]:
            raw = self._raw[places]
            return np.concatenate([raw[:, part] for part in bytes_of], axis=1)

        width = sum(stop - start for start, stop in columns)
        pages = None if self._pages is None else Pages(self._pages.part(0, self.out_features))
        return CopiedSource(self.ggml_type, width, [places_of(out_features)], make, self.path, self.name, pages)

    def prefetch(self) -> None:
        if self._pages is not None:
            self._pages.part(0, self.out_features).prefetch()

    def release(self, start: int, stop: int) -> None:
        """Pages that all out_features share go with the last of them."""
        if self._pages is not None and (self._pages.stride or stop == self.out_features):
            self._pages.part(start, stop).release()

    def _bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """A run of out_features as contiguous bytes: a view, but for slices by columns."""
        return np.ascontiguousarray(self._raw[start:stop]).reshape(-1)


class CopiedSource(BlockSource):
    """Blocks that lie apart in the file, or as other bytes: they are made when they are first read, in one place.

    Errors count the blocks of the source itself.

    Args:
        stored: arrays [out_features, ...], whose out_features are those of the matrix.
        make: the blocks of any such arrays, uint8 [out_features, bytes of one].
    """

    def __init__(
        self, ggml_type: GGMLType, in_features: int, stored: Sequence[NDArray[Any]],
        make: Callable[..., NDArray[np.uint8]], path: Path, name: str, pages: Pages | None,
    ) -> None:  # fmt: skip
        MatrixSource.__init__(self, ggml_layout(ggml_type), len(stored[0]), in_features, path, name)
        self.ggml_type, self._first_block, self._pages = ggml_type, 0, pages
        self.stored, self._make = stored, make

    @cached_property
    def _raw(self) -> NDArray[np.uint8]:  # type: ignore[override]
        return self._make(*self.stored)

    def slice_out_features(self, start: int, stop: int) -> Self:
        check_run(self, start, stop)
        return self._part(slice(start, stop), None if self._pages is None else self._pages.after(start))

    def every(self, first: int, step: int, run: int = 1) -> MatrixSource:
        if run > 1:
            return super().every(first, step, run)
        return self._part(slice(first, None, step), None if self._pages is None else self._pages.every(first, step))

    def _part(self, part: slice, pages: Pages | None) -> Self:
        stored = [each[part] for each in self.stored]
        return type(self)(self.ggml_type, self.in_features, stored, self._make, self.path, self.name, pages)


def ggml_layout(ggml_type: GGMLType) -> WeightLayout:
    """Raises UnsupportedModelError where weights can't have the type."""
    layout = GGML_LAYOUTS.get(ggml_type)
    if layout is None:
        raise UnsupportedModelError(f"weights of type {ggml_type.name} are not supported")
    return layout


def block_source(ggml_type: GGMLType, data: NDArray[np.uint8], out_features: int, in_features: int) -> BlockSource:
    """A source from bytes in memory: uint8 [size in bytes], contiguous, out_features one after another.

    Raises:
        UnsupportedModelError: weights can't have the type.
        ValueError: `data` is not of the size that the shape asks for.
    """
    row_bytes = ggml_layout(ggml_type).row_bytes(in_features)
    if data.size != out_features * row_bytes:
        raise ValueError(
            f"{data.size} bytes are not {out_features} out_features of {in_features} {ggml_type.name} weights"
        )
    return BlockSource(ggml_type, data.reshape(out_features, row_bytes))


FLOAT32_LAYOUT = GGML_LAYOUTS[GGMLType.F32]


def float32_source(source: MatrixSource) -> MatrixSource:
    """The weights of a source in float32, in memory; a float matrix stays as it is."""
    if source.layout.is_float:
        return source
    raw = source.dequantize().view(np.uint8)
    return BlockSource(GGMLType.F32, raw, source.path, source.name)
