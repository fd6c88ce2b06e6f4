"""All weights of a model on the CPU: matrices in tiles, vectors in float32, the embedding left in its file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.records import aligned_zeros
from realizar.backends.cpu.weights.embedding_rows import EmbeddingRows
from realizar.backends.cpu.weights.pack import PackedMatrix, pack
from realizar.backends.cpu.weights.pack_floats import FloatMatrix, pack_floats
from realizar.backends.weight_tensors import WeightTensors, naming_refusals
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.spec import Linear, ModelSpec, Norm, TensorName
from realizar.quantization import MatrixSource

Matrix = PackedMatrix | FloatMatrix
_CHECKED_BYTES = 4 << 20  # of the embedding, at a time


class Weights:
    """Loads tensors of a spec from a checkpoint, one at a time, releasing each one's pages.

    Args:
        lanes: out_features of a tile.
        threads: that pack.
    """

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, lanes: int, threads: int) -> None:
        self._spec, self._tensors, self._lanes = spec, WeightTensors(spec, checkpoint), lanes
        self._threads = threads
        self.matrices: dict[TensorName, Matrix] = {}
        self._halves: dict[TensorName, NDArray[np.float32]] = {}
        self._vectors: dict[tuple[TensorName, float], NDArray[np.float32]] = {}
        self._embedding = EmbeddingRows(self._tensors.matrix(spec.embedding))

    def load(self, linears: list[Linear], progress: Callable[[int], None]) -> None:
        """Pack the matrices; `progress` gets the bytes of each as it is done.

        Raises:
            CheckpointError: a weight is NaN or infinite.
            UnsupportedModelError: no kernel expresses a matrix's layout.
        """
        self._tensors.check_vectors()
        names = list(dict.fromkeys(linear.weight for linear in linears))
        sources = [self._tensors.matrix(name) for name in names]
        with ThreadPoolExecutor(self._threads) as pool:
            for name, source, following in zip(names, sources, [*sources[1:], None], strict=True):
                if following is not None:
                    following.prefetch()
                with naming_refusals(name):
                    self.matrices[name] = self._pack(source, pool)
                source.release(0, source.out_features)
                progress(source.size_bytes)
            if self._spec.tensors[self._spec.embedding] not in (self._spec.tensors[name] for name in self.matrices):
                self._check_embedding(pool)

    def vector(self, name: TensorName, offset: float = 0.0) -> NDArray[np.float32]:
        """float32 values plus `offset`, padded with zeros to whole tiles; kept alive here."""
        key = (name, offset)
        if key not in self._vectors:
            values = self._tensors.vector(name)
            padded = aligned_zeros(-(-values.size // 16) * 16, np.float32)
            padded[: values.size] = values + np.float32(offset)
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

    def _check_embedding(self, pool: Executor) -> None:
        """Look at the embedding's rows, which steps read from the file, for weights that are not finite."""
        source = self._tensors.matrix(self._spec.embedding)
        step = max(1, _CHECKED_BYTES // source.row_bytes)

        def check(start: int) -> None:
            stop = min(start + step, source.out_features)
            source.check_finite(start, stop)
            source.release(start, stop)

        for _ in pool.map(check, range(0, source.out_features, step)):
            pass

    def _pack(self, source: MatrixSource, pool: Executor) -> Matrix:
        def packed(start: int, stop: int) -> None:
            source.check_finite(start, stop)  # read just now, so it costs little
            source.release(start, stop)

        return (pack_floats if source.layout.is_float else pack)(source, self._lanes, pool, packed)
