"""The model's weights on the device: matrices packed one by one, vectors in float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.plain_matrix import PlainMatrix, pack_plain
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.spec import Linear, ModelSpec, Norm, TensorName
from realizar.quantization import QUANTIZED_TYPES, dequantize, to_planes

_FLOATS = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}

Matrix = PlainMatrix | torch.Tensor


class Weights:
    """Device copies of a checkpoint's tensors. A float matrix is a tensor [rows, cols] of its own type."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, device: DeviceProfile) -> None:
        self._spec, self._checkpoint, self._device = spec, checkpoint, device
        self.matrices: dict[TensorName, Matrix] = {}
        self._vectors: dict[tuple[TensorName, float], torch.Tensor] = {}

    def load(self, linears: list[Linear], progress: Callable[[int], None]) -> None:
        """Pack the matrices; `progress` gets the bytes of each as it is done."""
        for linear in {linear.weight: linear for linear in linears}.values():
            data, ggml_type = self.stored_rows(linear.weight)
            self.matrices[linear.weight] = self._pack(data, ggml_type, linear.out_features, linear.in_features)
            self._checkpoint.release(self._stored(linear.weight))
            progress(data.size)
        embedding = self._spec.embedding
        data, ggml_type = self.stored_rows(embedding)
        self.embedding = self._pack_plain(data, ggml_type, self._spec.vocab_size, self._spec.hidden_size)

    def are_float32(self, linears: list[Linear]) -> bool:
        """Whether every matrix is stored in float32."""
        return all(self._stored(linear.weight).ggml_type is GGMLType.F32 for linear in linears)

    def vector(self, name: TensorName, offset: float = 0.0) -> torch.Tensor:
        """float32 values plus `offset`."""
        key = name, offset
        if key not in self._vectors:
            self._vectors[key] = self._send(self.vector_values(name) + np.float32(offset))
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
        return self._send(np.concatenate(parts))

    @property
    def size_bytes(self) -> int:
        """Packed bytes of all matrices."""
        return sum(matrix_bytes(matrix) for matrix in self.matrices.values())

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

    def _pack(self, data: NDArray[np.uint8], ggml_type: GGMLType, rows: int, cols: int) -> Matrix:
        return self._pack_plain(data, ggml_type, rows, cols)

    def _pack_plain(self, data: NDArray[np.uint8], ggml_type: GGMLType, rows: int, cols: int) -> Matrix:
        if ggml_type in QUANTIZED_TYPES:
            return pack_plain(to_planes(ggml_type, data, rows, cols), self._device.torch_device)
        bits = torch.from_numpy(np.array(data, copy=True)).view(_FLOATS[ggml_type])
        return bits.reshape(rows, cols).to(self._device.torch_device)

    def _send(self, values: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device.torch_device)


def matrix_bytes(matrix: Matrix) -> int:
    """Bytes on the device."""
    return matrix.numel() * matrix.element_size() if isinstance(matrix, torch.Tensor) else matrix.size_bytes
