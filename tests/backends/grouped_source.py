"""A weight format that no ggml type has, as a file of `quantization` would bring it; and models of such matrices.

Codes of four bits, with a float16 scale and minimum for each group of 64 or 128 columns. As AWQ stores them, the matrix
lies transposed, and a word of 32 bits holds the codes of eight out_features in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from random_models import Recipe, random_model
from realizar.backends import weight_tensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.spec import ModelSpec
from realizar.quantization import tensors
from realizar.quantization.layout import WeightLayout
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource
from reference_model import ReferenceModel
from reference_tensors import load_tensors

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def grouped_layout(group: int, bits: int = 4) -> WeightLayout:
    return WeightLayout(f"GROUPED{group}", group, group // 2 + 4, bits=bits, group_size=group, minimum=True)


class GroupedSource(MatrixSource):
    """A matrix of the format.

    Args:
        words: uint32 [in_features, out_features / 8].
        scales, minima: float16 [in_features / group, out_features].
    """

    def __init__(
        self, words: NDArray[np.uint32], scales: NDArray[np.float16], minima: NDArray[np.float16], name: str
    ) -> None:
        in_features, out_features = len(words), scales.shape[1]
        super().__init__(
            grouped_layout(in_features // len(scales)), out_features, in_features, Path("grouped.safetensors"), name
        )
        self._words, self._scales, self._minima = words, scales, minima

    def planes(self, start: int, stop: int) -> Planes:
        first, last = start // 8, -(-stop // 8)
        codes = np.empty((self.in_features, last - first, 8), np.uint8)
        for place, column in enumerate(_ORDER):
            codes[..., column] = (self._words[:, first:last] >> np.uint32(4 * place)) & np.uint32(15)
        run = slice(start - 8 * first, stop - 8 * first)
        return Planes(
            self.layout,
            codes=np.ascontiguousarray(codes.reshape(self.in_features, -1)[:, run].T),
            scales=np.ascontiguousarray(self._scales[:, start:stop].T.astype(np.float32)),
            minima=np.ascontiguousarray(self._minima[:, start:stop].T.astype(np.float32)),
        )


def grouped_source(
    out_features: int, in_features: int, group: int, seed: int = 0, name: str = "grouped"
) -> GroupedSource:
    """A random matrix whose weights have a mean near zero."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, (in_features, out_features // 8), np.uint32)
    scales = (rng.uniform(0.5, 1.5, (in_features // group, out_features)) * in_features**-0.5 / 5).astype(np.float16)
    minima = (scales * rng.uniform(-8.5, -6.5, scales.shape)).astype(np.float16)
    return GroupedSource(words, scales, minima, name)


def exact_weights(source: GroupedSource) -> NDArray[np.float64]:
    """[out_features, in_features], one formula per sentence of the description above."""
    group, words = source.layout.group_size, source._words
    weights = np.empty((source.out_features, source.in_features))
    for row in range(source.out_features):
        codes = words[:, row // 8] >> np.uint32(4 * _ORDER.index(row % 8)) & 15
        scales, minima = (np.repeat(each[:, row], group).astype(float) for each in (source._scales, source._minima))
        weights[row] = codes * scales + minima
    return weights


def grouped_model(
    recipe: Recipe, group: int, monkeypatch: pytest.MonkeyPatch, bits: int = 4
) -> tuple[ModelSpec, Checkpoint, ReferenceModel]:
    """A recipe's model whose matrices, its embedding too, are all of the format; and the model's reference.

    Until the test ends, its checkpoint is read so. The layout says that codes have so many `bits`.
    """
    spec, checkpoint = random_model(recipe)
    sources = {
        name: grouped_source(*tensor.shape, group, zlib.crc32(name.encode()), name)
        for name, tensor in checkpoint.tensors.items()
        if len(tensor.shape) == 2
    }
    source_of, layout_of = weight_tensors.tensor_source, tensors.tensor_layout

    def tensor_source(checkpoint: Checkpoint, name: str, columns: int | None = None) -> MatrixSource:
        if name not in sources:
            return source_of(checkpoint, name, columns)
        sources[name].layout = grouped_layout(group, bits)
        return sources[name]

    def tensor_layout(checkpoint: Checkpoint, name: str) -> WeightLayout:
        return grouped_layout(group, bits) if name in sources else layout_of(checkpoint, name)

    monkeypatch.setattr(weight_tensors, "tensor_source", tensor_source)
    monkeypatch.setattr(tensors, "tensor_layout", tensor_layout)
    weights = {name: exact_weights(source).astype(np.float32) for name, source in sources.items()}
    return spec, checkpoint, ReferenceModel(spec, {**load_tensors(spec, checkpoint), **weights}, np.float64)
