"""A checkpoint's tensors by name, as sources: plain ones, and matrices that a format makes of several. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.errors import UnsupportedModelError
from realizar.quantization.block_source import BlockSource, CopiedSource, Pages, ggml_layout
from realizar.quantization.layout import WeightLayout
from realizar.quantization.matrix_formats import MatrixFormat, matrix_format
from realizar.quantization.source import MatrixSource, check_run


def stored_names(checkpoint: Checkpoint, name: str) -> Sequence[str]:
    """The names of the tensors that hold the tensor `name`: its own, but where a format makes it of others."""
    stored_format = matrix_format(checkpoint)
    return (stored_format.tensors(checkpoint, name) if stored_format is not None else ()) or (name,)


def is_stored(checkpoint: Checkpoint, name: str) -> bool:
    """True if a checkpoint has any of the tensors that hold the tensor `name`."""
    return any(each in checkpoint.tensors for each in stored_names(checkpoint, name))


def is_packed(checkpoint: Checkpoint, name: str) -> bool:
    return _packed(checkpoint, name) is not None


def tensor_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """However its numbers are stored; CheckpointError where it is made of tensors that do not fit together."""
    packed = _packed(checkpoint, name)
    if packed is None:
        return checkpoint.tensors[name].shape
    return packed.shape(checkpoint, name)


def tensor_layout(checkpoint: Checkpoint, name: str) -> WeightLayout:
    """The layout of a checkpoint's tensor, without its bytes.

    Raises:
        UnsupportedModelError: weights can't have its type.
        CheckpointError: it is made of tensors that do not fit together.
    """
    packed = _packed(checkpoint, name)
    return _plain_layout(checkpoint.tensors[name]) if packed is None else packed.source(checkpoint, name).layout


def stack_layout(checkpoint: Checkpoint, names: Sequence[str]) -> WeightLayout:
    """The layout that all matrices of a stack have, which may be one.

    Raises UnsupportedModelError where they have several, and as `tensor_layout` does.
    """
    first, *others = names
    layout = tensor_layout(checkpoint, first)
    for other in others:
        own = tensor_layout(checkpoint, other)
        if own != layout:
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor '{other}' is of type {own.name}, and '{first}' of {layout.name}:"
                " experts of one layer must be of one type"
            )
    return layout


def tensor_source(checkpoint: Checkpoint, name: str) -> MatrixSource:
    """A checkpoint's tensor as a matrix; raises as `tensor_layout` does.

    A vector is a matrix of one out_feature. The matrices of a stack lie one below the other: `expert_source` gives one.
    """
    packed = _packed(checkpoint, name)
    if packed is not None:
        return packed.source(checkpoint, name)
    stored = checkpoint.tensors[name]
    row_bytes = _plain_layout(stored).row_bytes(stored.shape[-1])
    assert stored.ggml_type is not None  # else it has no layout
    raw = stored.data.reshape(-1, row_bytes)
    return BlockSource(stored.ggml_type, raw, stored.path, name, 0, Pages(checkpoint, stored, 0, row_bytes))


def expert_source(checkpoint: Checkpoint, name: str, expert: int, *, transposed: bool = False) -> MatrixSource:
    """One matrix of a stack [experts, out_features, in_features], or `transposed` [experts, in_features, out_features].

    Raises:
        UnsupportedModelError: weights can't have its type, or not lie transposed.
        ValueError: the tensor is not a stack, or has no such expert.
    """
    shape = tensor_shape(checkpoint, name)
    if len(shape) != 3:
        raise ValueError(f"tensor '{name}' of shape {shape} is not a stack of matrices")
    if not 0 <= expert < shape[0]:
        raise ValueError(f"tensor '{name}' has {shape[0]} experts, and not number {expert}")
    if transposed:
        return _transposed_source(checkpoint, checkpoint.tensors[name], expert)
    return tensor_source(checkpoint, name).slice_out_features(expert * shape[1], (expert + 1) * shape[1])


def _packed(checkpoint: Checkpoint, name: str) -> MatrixFormat | None:
    stored_format = matrix_format(checkpoint)
    return stored_format if stored_format is not None and stored_format.tensors(checkpoint, name) else None


def _plain_layout(stored: StoredTensor) -> WeightLayout:
    try:
        if stored.ggml_type is not None:
            return ggml_layout(stored.ggml_type)
        raise UnsupportedModelError(f"weights of type {stored.type_name} are not supported")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{stored.path}: tensor '{stored.name}': {error}") from error


# Float matrices that a checkpoint stores as [in_features, out_features], such as gpt-oss's experts.

_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class _TransposedSource(CopiedSource):
    """A matrix of a stack of plain numbers, of which all or every so many columns are its out_features.

    Its `numbers`, uint16 or uint32 bits [in_features, out_features], a view of the file, are copied to out_features one
    after another when they are first read.
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

    def slice_out_features(self, start: int, stop: int) -> _TransposedSource:
        check_run(self, start, stop)
        return _TransposedSource(self._numbers[:, start:stop], self._stored, self._pages)

    def every(self, first: int, step: int, run: int = 1) -> MatrixSource:
        if run > 1:
            return super().every(first, step, run)
        return _TransposedSource(self._numbers[:, first::step], self._stored, self._pages)

    def prefetch(self) -> None:
        self._pages.checkpoint.prefetch(self._pages.part(0, 1))

    def release(self, start: int, stop: int) -> None:
        """The pages of the matrix after its last out_features: each of its pages has some of all."""
        if stop == self.out_features:
            self._pages.checkpoint.release(self._pages.part(0, 1))


def _transposed_source(checkpoint: Checkpoint, stored: StoredTensor, index: int) -> _TransposedSource:
    """Raises UnsupportedModelError where its numbers are not plain, so that columns can't be told apart."""
    layout = None if stored.ggml_type is None else ggml_layout(stored.ggml_type)
    if layout is None or not layout.is_float:
        raise UnsupportedModelError(
            f"{stored.path}: tensor '{stored.name}': weights of type {stored.type_name} can't lie transposed"
        )
    _, rows, columns = stored.shape
    size = rows * columns * layout.block_bytes
    data = stored.data[index * size : (index + 1) * size]
    numbers = data.view(_DTYPES[layout.block_bytes]).reshape(rows, columns)
    return _TransposedSource(numbers, stored, Pages(checkpoint, stored, index * size, size))
