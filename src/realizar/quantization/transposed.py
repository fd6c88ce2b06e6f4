"""Float matrices that a checkpoint stores as [in_features, out_features], such as gpt-oss's experts. numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.errors import UnsupportedModelError
from realizar.quantization.block_source import BlockSource, CopiedSource, Pages, ggml_layout
from realizar.quantization.source import MatrixSource, check_run

_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class TransposedSource(CopiedSource):
    """A matrix of a stack of plain numbers, of which all or every so many columns are its out_features.

    Its numbers are copied to out_features one after another when they are first read.

    Args:
        numbers: uint16 or uint32 bits [in_features, out_features], a view of the file.
        stored: the tensor that holds the stack. pages: the place of this matrix in it.
    """

    def __init__(self, numbers: NDArray[Any], stored: StoredTensor, pages: Pages) -> None:
        assert stored.ggml_type is not None  # else it has no layout
        super().__init__(
            ggml_layout(stored.ggml_type), numbers.shape[1], numbers.shape[0], stored.path, stored.name
        )  # fmt: skip
        self._numbers, self._stored, self._pages = numbers, stored, pages

    def _copy(self) -> BlockSource:
        assert self._stored.ggml_type is not None
        raw = np.ascontiguousarray(self._numbers.T).view(np.uint8)
        return BlockSource(self._stored.ggml_type, raw, self.path, self.name)

    def slice_out_features(self, start: int, stop: int) -> TransposedSource:
        check_run(self, start, stop)
        return TransposedSource(self._numbers[:, start:stop], self._stored, self._pages)

    def every(self, first: int, step: int, run: int = 1) -> MatrixSource:
        if run > 1:
            return super().every(first, step, run)
        return TransposedSource(self._numbers[:, first::step], self._stored, self._pages)

    def prefetch(self) -> None:
        self._pages.checkpoint.prefetch(self._pages.part(0, 1))

    def release(self, start: int, stop: int) -> None:
        """The pages of the matrix after its last out_features: each of its pages has some of all."""
        if stop == self.out_features:
            self._pages.checkpoint.release(self._pages.part(0, 1))


def transposed_source(checkpoint: Checkpoint, stored: StoredTensor, index: int) -> TransposedSource:
    """One matrix of a stack [matrices, in_features, out_features].

    Raises:
        UnsupportedModelError: its numbers are not plain, so that columns can't be told apart.
    """
    layout = None if stored.ggml_type is None else ggml_layout(stored.ggml_type)
    if layout is None or not layout.is_float:
        raise UnsupportedModelError(
            f"{stored.path}: tensor '{stored.name}': weights of type {stored.type_name} can't lie transposed"
        )
    _, rows, columns = stored.shape
    size = rows * columns * layout.block_bytes
    data = stored.data[index * size : (index + 1) * size]
    numbers = data.view(_DTYPES[layout.block_bytes]).reshape(rows, columns)
    return TransposedSource(numbers, stored, Pages(checkpoint, stored, index * size, size))
