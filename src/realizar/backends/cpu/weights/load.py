"""All weights of a model on the CPU: matrices in tiles, vectors in float32, the embedding left in its file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.float_linear import FLOAT_TYPES
from realizar.backends.cpu.records import aligned_zeros
from realizar.backends.cpu.weights.embedding_rows import EmbeddingRows
from realizar.backends.cpu.weights.pack import PackedMatrix, pack
from realizar.backends.cpu.weights.pack_floats import FloatMatrix, pack_floats
from realizar.backends.finite_weights import check_finite, check_vectors
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.spec import Linear, ModelSpec, Norm, TensorName
from realizar.quantization import dequantize

Matrix = PackedMatrix | FloatMatrix
_CHECKED_BYTES = 4 << 20  # of the embedding, at a time


class Weights:
    """Loads tensors of a spec from a checkpoint, one at a time, releasing each one's pages.

    Args:
        lanes: rows of a tile.
        threads: that pack.
    """

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, lanes: int, threads: int) -> None:
        self._spec, self._checkpoint, self._lanes = spec, checkpoint, lanes
        self._threads = threads
        self.matrices: dict[TensorName, Matrix] = {}
        self._halves: dict[TensorName, NDArray[np.float32]] = {}
        self._vectors: dict[tuple[TensorName, float], NDArray[np.float32]] = {}
        stored = self._stored(spec.embedding)
        self._embedding = EmbeddingRows(stored.ggml_type, stored.data, spec.vocab_size, spec.hidden_size)

    def load(self, linears: list[Linear], progress: Callable[[int], None]) -> None:
        """Pack the matrices; `progress` gets the bytes of each as it is done.

        Raises:
            CheckpointError: a weight is NaN or infinite.
        """
        check_vectors(self._spec, self._checkpoint)
        distinct = list({linear.weight: linear for linear in linears}.values())
        with ThreadPoolExecutor(self._threads) as pool:
            for linear, following in zip(distinct, [*distinct[1:], None], strict=True):
                if following is not None:
                    self._checkpoint.prefetch(self._stored(following.weight))
                data, ggml_type = self._rows(linear.weight)
                self.matrices[linear.weight] = self._pack(data, ggml_type, linear, pool)
                self._checkpoint.release(self._stored(linear.weight))
                progress(data.size)
            if self._spec.tensors[self._spec.embedding] not in (self._spec.tensors[name] for name in self.matrices):
                self._check_embedding(pool)

    def are_float32(self, linears: list[Linear]) -> bool:
        """Whether every matrix is stored in float32."""
        return all(self._stored(linear.weight).ggml_type.name == "F32" for linear in linears)

    def vector(self, name: TensorName, offset: float = 0.0) -> NDArray[np.float32]:
        """float32 values plus `offset`, padded with zeros to whole tiles; kept alive here."""
        key = (name, offset)
        if key not in self._vectors:
            data, ggml_type = self._rows(name)
            size = self._spec.tensors[name].shape[0]
            padded = aligned_zeros(-(-size // 16) * 16, np.float32)
            padded[:size] = dequantize(ggml_type, data, 1, size)[0] + np.float32(offset)
            self._vectors[key] = padded  # type: ignore[assignment]
        return self._vectors[key]

    def half_of(self, name: TensorName) -> NDArray[np.float32]:
        """Half of a vector's values; kept alive here."""
        if name not in self._halves:
            self._halves[name] = aligned_zeros(self.vector(name).size, np.float32)  # type: ignore[assignment]
            np.multiply(self.vector(name), np.float32(0.5), out=self._halves[name])
        return self._halves[name]

    def length(self, name: TensorName) -> int:
        """Values of a vector."""
        return self._spec.tensors[name].shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._spec.hidden_size

    def norm_weight(self, norm: Norm) -> NDArray[np.float32]:
        """Float32 weights of a norm, its offset added."""
        return self.vector(norm.weight, norm.weight_offset)

    @property
    def size_bytes(self) -> int:
        """Packed bytes of all matrices."""
        return sum(matrix.size_bytes for matrix in self.matrices.values())

    def embed(self, ids: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """out [len(ids), hidden_size] = the file's rows of int32 `ids`, times the model's embedding scale."""
        self._embedding.read(ids, self._spec.embedding_scale, out)

    def _stored(self, name: TensorName) -> StoredTensor:
        return self._checkpoint.tensors[self._spec.tensors[name].name]

    def _rows(self, name: TensorName) -> tuple[NDArray[np.uint8], GGMLType]:
        """The bytes of a canonical tensor: a run of rows of its checkpoint tensor."""
        source, stored = self._spec.tensors[name], self._stored(name)
        if not source.fused:
            return stored.data, stored.ggml_type
        first = self._first_byte(name)
        row_bytes = stored.data.size // stored.shape[0]
        return stored.data[first : first + source.shape[0] * row_bytes], stored.ggml_type

    def _first_byte(self, name: TensorName) -> int:
        """Where a canonical tensor starts in its checkpoint tensor."""
        source, stored = self._spec.tensors[name], self._stored(name)
        return source.first_row * (stored.data.size // stored.shape[0]) if source.fused else 0

    def _check_embedding(self, pool: Executor) -> None:
        """Look at the embedding's rows, which steps read from the file, for weights that are not finite."""
        data, _ = self._rows(self._spec.embedding)
        stored, first = self._stored(self._spec.embedding), self._first_byte(self._spec.embedding)
        step = max(1, _CHECKED_BYTES // (data.size // self._spec.vocab_size)) * (data.size // self._spec.vocab_size)

        def check(start: int) -> None:
            rows = data[start : start + step]
            check_finite(stored, rows, first + start)
            self._checkpoint.release(replace(stored, data=rows, offset=stored.offset + first + start))

        for _ in pool.map(check, range(0, data.size, step)):
            pass

    def _pack(self, data: NDArray[np.uint8], ggml_type: GGMLType, linear: Linear, pool: Executor) -> Matrix:
        stored, first = self._stored(linear.weight), self._first_byte(linear.weight)

        def packed(start: int, stop: int) -> None:
            check_finite(stored, data[start:stop], first + start)  # read just now, so it costs little
            part = replace(stored, data=data[start:stop], offset=stored.offset + first + start)
            self._checkpoint.release(part)

        shape = linear.out_features, linear.in_features
        pack_any = pack_floats if ggml_type.name.lower() in FLOAT_TYPES else pack
        return pack_any(ggml_type, data, *shape, self._lanes, pool, packed)
