"""`WeightTensors`: the canonical tensors of a model as weight sources, wherever its checkpoint has them. numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.mixers import GatedDeltaNet
from realizar.models.parts import Linear
from realizar.models.spec import ExpertLinear, LayerStack
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization.layout import WeightLayout
from realizar.quantization.source import MatrixSource
from realizar.quantization.tensors import cache_scale, expert_source, stack_layout, tensor_source, transposed_source

_LARGEST_FP8 = 448


class WeightTensors:
    """Looks tensors up by their canonical name. One that is fused with others, or shared by ranks, is a slice."""

    def __init__(self, spec: LayerStack, checkpoint: Checkpoint) -> None:
        self._spec, self._checkpoint = spec, checkpoint

    def layout(self, name: TensorName) -> WeightLayout:
        """From the checkpoint's header; UnsupportedModelError: weights can't have its type, or a stack has several."""
        return stack_layout(self._checkpoint, self._spec.tensors[name].names)

    def size_bytes(self, name: TensorName) -> int:
        """Bytes of a tensor as stored, from the header; UnsupportedModelError: weights can't have its type."""
        *outer, columns = self._spec.tensors[name].shape
        return math.prod(outer) * self.layout(name).row_bytes(columns)

    @property
    def table_bytes(self) -> int:
        """Bytes as stored of what is read row by row: the embedding, and the table of the layers' own inputs."""
        return sum(map(self.size_bytes, self._spec.tables()))

    def are_float32(self, matrices: Iterable[Linear | ExpertLinear]) -> bool:
        return all(self.layout(matrix.weight).float_type == "f32" for matrix in matrices)

    def matrix(self, name: TensorName) -> MatrixSource:
        """Raises UnsupportedModelError where weights can't have its type, or not lie transposed."""
        place = self._spec.tensors[name]
        if place.transposed:
            return transposed_source(self._checkpoint.tensors[place.name])
        columns = None if place.stored_shape is None else place.shape[-1]
        return _part(tensor_source(self._checkpoint, place.name, columns), place)

    def ordered(self, linear: Linear) -> tuple[MatrixSource, NDArray[np.int32]] | None:
        """The matrix with its columns sorted, and their order, as `MatrixSource.ordered`; raises as `matrix`."""
        return self.matrix(linear.weight).ordered

    def widest_ordered(self) -> int:
        """Columns of the widest matrix that is `ordered`; 0 without any."""
        linears = (each for each in self._spec.matrices() if isinstance(each, Linear))
        return max((each.in_features for each in linears if self.ordered(each) is not None), default=0)

    def expert(self, name: TensorName, expert: int) -> MatrixSource:
        """One matrix of a stack, which the checkpoint holds as one tensor or as a tensor for each expert.

        Raises:
            UnsupportedModelError: weights can't have its type.
            ValueError: the stack has no such expert.
        """
        place = self._spec.tensors[name]
        if not place.stack:
            whole = expert_source(self._checkpoint, place.name, expert, transposed=place.transposed)
            return _part(whole, place)
        if not 0 <= expert < len(place.stack):
            raise ValueError(f"tensor '{name}' has {len(place.stack)} experts, and not number {expert}")
        return _part(tensor_source(self._checkpoint, place.stack[expert]), place)

    def stack(self, name: TensorName) -> MatrixSource | None:
        """The matrices of a stack one below the other; None where the checkpoint has them otherwise. Raises as
        `matrix`.
        """
        place = self._spec.tensors[name]
        apart = bool(place.stack) or place.fused or place.transposed or place.whole is not None
        return None if apart else tensor_source(self._checkpoint, place.name)

    def vector(self, name: TensorName) -> NDArray[np.float32]:
        """The values of a norm, a bias or sinks: float32 [size]."""
        place = self._spec.tensors[name]
        values: NDArray[np.float32] = self._vector_source(name).dequantize()[0]
        return values[place.out_features()] if place.fused or place.whole is not None else values

    def expert_vectors(self, name: TensorName) -> NDArray[np.float32]:
        """A vector for each expert: float32 [experts, out_features]."""
        place = self._spec.tensors[name]
        whole = tensor_source(self._checkpoint, place.name).dequantize()
        return whole[:, place.out_features()]

    def convolution(self, name: TensorName) -> NDArray[np.float32]:
        """The kernel of a convolution over each channel's last tokens: float32 [channels, length]."""
        return self._vector_source(name).dequantize()[self._spec.tensors[name].out_features()]

    def cache_scales(self, kv_dtype: str) -> dict[int, tuple[float, float]]:
        """What keys and values of each layer with attention are divided by in a cache of FP8; nothing for others.

        The checkpoint's scales, or else 1. Keys with biases that leave FP8 little room beyond them have more.

        Raises CheckpointError for a scale that is not one finite number above 0.
        """
        attentions = self._spec.attentions() if kv_dtype == "fp8" else ()
        return {layer: (self._cache_scale(part.k), self._cache_scale(part.v)) for layer, part in attentions}

    def _cache_scale(self, linear: Linear) -> float:
        stored = cache_scale(self._checkpoint, self._spec.tensors[linear.weight].name)
        if stored is not None:
            return stored
        bias = 0.0 if linear.bias is None else float(np.abs(self.vector(linear.bias)).max())
        return max(1.0, 2 * bias / _LARGEST_FP8)

    def check_vectors(self) -> None:
        """Raise CheckpointError for a norm, bias, sink or convolution that is not finite, and for a rate that makes
        states grow.

        They are small, and steps read some first.
        """
        biases = (matrix.bias for matrix in self._spec.matrices() if matrix.bias is not None)
        for name in dict.fromkeys((*self._spec.vectors(), *biases)):
            source = self._vector_source(name)
            source.check_finite(0, source.out_features)
        for layer in self._spec.layers:
            if isinstance(layer.mixer, GatedDeltaNet):
                self._check_rates(layer.mixer)

    def _check_rates(self, part: GatedDeltaNet) -> None:
        stored = self.vector(part.rate)
        with np.errstate(over="ignore"):
            rates = -np.exp(stored) if part.rate_is_log else stored
        wrong = np.flatnonzero(~np.isfinite(rates) | (rates > 0))
        if len(wrong):
            source = self._vector_source(part.rate)
            raise CheckpointError(
                source.path, f"tensor {shown(source.name)}",
                f"number {wrong[0]} is {stored[wrong[0]]:g}, by which no state decays",
            )  # fmt: skip

    def _vector_source(self, name: TensorName) -> MatrixSource:
        """Its tensor as a matrix of one out_feature, or several for a convolution or experts; others may lie beside."""
        return tensor_source(self._checkpoint, self._spec.tensors[name].name)


def _part(stored: MatrixSource, place: TensorSource) -> MatrixSource:
    if place.whole is not None:
        whole = _part(stored, place.whole)
        rows = whole if place.rows is None else whole.out_feature_runs(place.rows)
        return rows if place.columns is None else rows.column_runs(place.columns)
    if not place.fused:
        return stored
    if place.step > 1:
        return stored.every(place.first_out_feature, place.step, place.run)
    return stored.slice_out_features(place.first_out_feature, place.last_out_feature)


@contextmanager
def naming_refusals(name: TensorName) -> Iterator[None]:
    """Within, a backend's UnsupportedModelError for a layout names the tensor."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"tensor '{name}': {error}") from error
