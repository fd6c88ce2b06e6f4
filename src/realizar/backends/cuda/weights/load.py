"""The model's weights on the device: matrices packed one by one, vectors in float32, an allocation for each layer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.device_errors import translate
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import Packer, RawMatrix, memory_bytes
from realizar.backends.cuda.weights.plain import PlainMatrix, pack_plain
from realizar.backends.cuda.weights.store import Store
from realizar.backends.finite_weights import check_finite, check_vectors
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import CapacityError, DeviceLostError, KernelError, UnsupportedModelError
from realizar.models.spec import FeedForward, Layer, Linear, ModelSpec, Norm, TensorName
from realizar.quantization import QUANTIZED_TYPES, dequantize

_FLOATS = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}

Matrix: TypeAlias = PackedMatrix | PlainMatrix | torch.Tensor
Group: TypeAlias = tuple[TensorName, ...]

_CHECKED_BYTES = 4 << 20  # of a matrix, by one thread at a time
_MERGED_ROWS = 64  # matrices lie one below the other at multiples of so many rows


class Weights:
    """Device copies of a checkpoint's tensors.

    Attributes:
        groups: the matrices of products that share an input, in order; those of one type may lie in one. A float
            matrix is a tensor [rows, cols] of its own type.
        gated: feed-forwards by the group of their gate and up.
        embedding: of its own, row by row.
    """

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, device: DeviceProfile) -> None:
        self._spec, self._checkpoint, self._device = spec, checkpoint, device
        self.groups: dict[Group, tuple[Matrix, ...]] = {}
        self.gated: dict[Group, FeedForward] = {
            (one.gate.weight, one.up.weight): one for _, one in spec.feed_forwards() if one.gate is not None
        }
        self._vectors: dict[tuple[TensorName, float], torch.Tensor] = {}
        self._packer: Packer | None = None
        self._tables: dict[GGMLType, torch.Tensor | None] = {}
        self._stores: dict[TensorName, Store] = {}

    def load(self, groups: Iterable[Sequence[Linear]], progress: Callable[[int], None]) -> None:
        """Pack the matrices; `progress` gets the bytes of each group as it is done.

        Raises:
            CheckpointError: a weight is NaN or infinite.
        """
        check_vectors(self._spec, self._checkpoint)
        self._packer = Packer(self._device.torch_device) if self._device.has_cuda_kernels else None
        for linears in groups:
            key = tuple(linear.weight for linear in linears)
            if key not in self.groups:
                for name in key:
                    self._check(name)
                with naming(*key):
                    self._make_store(key[0])
                    self.groups[key] = tuple(self._pack_group(linears, self._stores.get(key[0])))
                for name in key:
                    self._checkpoint.release(self._stored(name))
                    progress(self.stored_rows(name)[0].size)
        embedding = self._spec.embedding
        data, ggml_type = self.stored_rows(embedding)
        own = self.groups.get((embedding,), ())
        if own and not isinstance(own[0], PackedMatrix):
            self.embedding = own[0]
        else:
            if not own:
                self._check(embedding)
            with naming(embedding):
                self.embedding = self._pack_plain(data, ggml_type, self._spec.vocab_size, self._spec.hidden_size)
        self._packer = None

    def are_float32(self, linears: list[Linear]) -> bool:
        """Whether every matrix is stored in float32."""
        return all(self._stored(linear.weight).ggml_type is GGMLType.F32 for linear in linears)

    def vector(self, name: TensorName, offset: float = 0.0) -> torch.Tensor:
        """float32 values plus `offset`."""
        key = name, offset
        if key not in self._vectors:
            with naming(name):
                self._vectors[key] = self._send(self.vector_values(name) + np.float32(offset), self._stores.get(name))
        return self._vectors[key]

    def vector_values(self, name: TensorName) -> NDArray[np.float32]:
        """float32 values, on the host."""
        data, ggml_type = self.stored_rows(name)
        return dequantize(ggml_type, data, 1, self._spec.tensors[name].shape[0])[0]

    def norm_weight(self, norm: Norm) -> torch.Tensor:
        return self.vector(norm.weight, norm.weight_offset)

    def bias(self, linears: tuple[Linear, ...]) -> torch.Tensor | None:
        """The biases of products side by side, zeros for those without; None where none has one."""
        if all(linear.bias is None for linear in linears):
            return None
        parts = [
            np.zeros(linear.out_features, np.float32) if linear.bias is None else self.vector_values(linear.bias)
            for linear in linears
        ]
        return self._send(np.concatenate(parts), self._stores.get(linears[0].weight))

    @property
    def size_bytes(self) -> int:
        """Packed bytes of all matrices."""
        return sum(matrix_bytes(matrix) for group in self.groups.values() for matrix in group)

    def stored_rows(self, name: TensorName) -> tuple[NDArray[np.uint8], GGMLType]:
        """The bytes of a canonical tensor: a run of rows of its checkpoint tensor."""
        source, stored = self._spec.tensors[name], self._stored(name)
        if not source.fused:
            return stored.data, stored.ggml_type
        row_bytes = stored.data.size // stored.shape[0]
        first = source.first_row * row_bytes
        return stored.data[first : first + source.shape[0] * row_bytes], stored.ggml_type

    def _stored(self, name: TensorName) -> StoredTensor:
        return self._checkpoint.tensors[self._spec.tensors[name].name]

    def _check(self, name: TensorName) -> None:
        """Refuse a matrix with weights that are not finite. Several threads also bring its pages in."""
        (data, ggml_type), stored = self.stored_rows(name), self._stored(name)
        step = max(1, _CHECKED_BYTES // ggml_type.type_size) * ggml_type.type_size
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(
                lambda start: check_finite(stored, data[start : start + step], start), range(0, data.size, step)
            ):
                pass

    def _make_store(self, weight: TensorName) -> None:
        """Allocate what the layer that has this matrix takes, once; the head is in no layer and has its own."""
        if weight in self._stores:
            return
        for layer in self._spec.layers:
            linears, vectors = layer.linears(), list(layer.vectors())
            if any(linear.weight == weight for linear in linears):
                store = Store(self._part_sizes(layer), self._device.torch_device)
                self._stores.update(dict.fromkeys([linear.weight for linear in linears] + vectors, store))
                return

    def _part_sizes(self, layer: Layer) -> Iterator[int]:
        """Bytes of a layer's tensors. Merged matrices and biases take no more than one by one.

        Raises:
            UnsupportedModelError: a matrix's type has no format.
        """
        linears = layer.linears()
        for linear in linears:
            data, ggml_type = self.stored_rows(linear.weight)
            if ggml_type not in QUANTIZED_TYPES:
                yield data.size
            elif self._packer is not None:
                try:
                    yield memory_bytes([RawMatrix(ggml_type, data, linear.out_features, linear.in_features)])
                except UnsupportedModelError as error:
                    raise UnsupportedModelError(f"tensor '{linear.weight}': {error}") from error
            if any(each.bias is not None for each in linears):
                yield 4 * linear.out_features
        for name in layer.vectors():
            yield 4 * self._spec.tensors[name].shape[0]

    def _pack_group(self, linears: Sequence[Linear], store: Store | None) -> Iterable[Matrix]:
        """Matrices side by side; neighbours of one type as one where the CUDA products can have them so."""
        for ggml_type, run in itertools.groupby(linears, lambda linear: self.stored_rows(linear.weight)[1]):
            part = list(run)
            if ggml_type not in QUANTIZED_TYPES or self._packer is None:
                for linear in part:
                    data, _ = self.stored_rows(linear.weight)
                    yield self._pack_plain(data, ggml_type, linear.out_features, linear.in_features, store)
                continue
            raw = [
                RawMatrix(ggml_type, self.stored_rows(one.weight)[0], one.out_features, one.in_features) for one in part
            ]
            mergeable = all(matrix.rows % _MERGED_ROWS == 0 for matrix in raw[:-1])
            for together in [raw] if mergeable else [[matrix] for matrix in raw]:
                into = None if store is None else store.take(memory_bytes(together))
                packed = self._packer.pack(together, into, interleaved=self._interleaved(part))
                yield replace(packed, table=self._tables.setdefault(ggml_type, packed.table))

    def _interleaved(self, linears: Sequence[Linear]) -> bool:
        """Whether matrices that are packed as one are the gate and up of a feed-forward, and can take turns in it.

        Biases keep their order, so there must be none.
        """
        gated = tuple(linear.weight for linear in linears) in self.gated
        return gated and all(one.bias is None and one.out_features % _MERGED_ROWS == 0 for one in linears)

    def _pack_plain(
        self, data: NDArray[np.uint8], ggml_type: GGMLType, rows: int, cols: int, store: Store | None = None
    ) -> PlainMatrix | torch.Tensor:
        if ggml_type in QUANTIZED_TYPES:
            return pack_plain(ggml_type, data, rows, cols, self._device.torch_device)
        return self._copy(data, store).view(_FLOATS[ggml_type]).reshape(rows, cols)

    def _send(self, values: NDArray[np.float32], store: Store | None) -> torch.Tensor:
        return self._copy(np.ascontiguousarray(values).view(np.uint8), store).view(torch.float32)

    def _copy(self, data: NDArray[np.uint8], store: Store | None) -> torch.Tensor:
        """uint8 [size in bytes] on the device."""
        host = torch.from_numpy(np.array(data, copy=True))
        return host.to(self._device.torch_device) if store is None else store.take(data.size).copy_(host)


@contextmanager
def naming(*names: TensorName) -> Iterator[None]:
    """Within, an error of the device is raised as one of ours that names the tensors which are uploaded."""
    try:
        yield
    except Exception as error:
        ours = translate(error) or error
        if not isinstance(ours, CapacityError | KernelError | DeviceLostError):
            raise
        try:
            raise type(ours)(f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(names)}: {ours}") from error
        finally:
            del ours


def matrix_bytes(matrix: Matrix) -> int:
    """Bytes on the device."""
    return matrix.numel() * matrix.element_size() if isinstance(matrix, torch.Tensor) else matrix.size_bytes
