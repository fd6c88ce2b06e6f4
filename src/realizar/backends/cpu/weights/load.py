"""All weights of a model on the CPU: matrices in tiles, vectors in float32, the embedding left in its file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.records import aligned_zeros
from realizar.backends.cpu.weights.embedding_rows import EmbeddingRows
from realizar.backends.cpu.weights.pack import PackedMatrix, allocate, fill, pack
from realizar.backends.cpu.weights.pack_floats import FloatMatrix, allocate_floats, fill_floats, pack_floats
from realizar.backends.weight_tensors import WeightTensors, naming_refusals
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.parameters import size_of_token
from realizar.models.parts import Linear, Norm
from realizar.models.spec import ExpertLinear, ModelSpec
from realizar.models.tensor_source import TensorName
from realizar.quantization import MatrixSource, float32_source

Matrix = PackedMatrix | FloatMatrix
_CHECKED_BYTES = 4 << 20  # of the embedding, at a time


class Weights:
    """Loads tensors of a spec from a checkpoint, one at a time, releasing each one's pages. Routers become floats.

    Args:
        lanes: out_features of a tile.
        threads: that pack.
    """

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, lanes: int, threads: int) -> None:
        self._spec, self._tensors, self._lanes = spec, WeightTensors(spec, checkpoint), lanes
        self._threads = threads
        self._routers = {experts.router.weight for _, experts in spec.mixtures()}
        self.matrices: dict[TensorName, Matrix] = {}
        self._halves: dict[TensorName, NDArray[np.float32]] = {}
        self._taps: dict[TensorName, NDArray[np.float32]] = {}
        self._rates: dict[TensorName, NDArray[np.float32]] = {}
        self._expert_biases: dict[TensorName, NDArray[np.float32]] = {}
        self._vectors: dict[tuple[TensorName, float, float], NDArray[np.float32]] = {}
        self._embedding = EmbeddingRows(self._tensors.matrix(spec.embedding))
        inputs = spec.layer_inputs
        self._layer_rows = None if inputs is None else EmbeddingRows(self._tensors.matrix(inputs.table))

    def load(self, matrices: Sequence[Linear | ExpertLinear], progress: Callable[[int], None]) -> None:
        """Pack the matrices; `progress` gets the bytes of each as it is done.

        Raises:
            CheckpointError: a weight is NaN or infinite.
            UnsupportedModelError: no kernel expresses a matrix's layout, or experts of a layer have several.
        """
        self._tensors.check_vectors()
        distinct = list({each.weight: each for each in matrices}.values())
        with ThreadPoolExecutor(self._threads) as pool:
            for each, following in zip(distinct, [*distinct[1:], None], strict=True):
                if isinstance(following, Linear):
                    self._tensors.matrix(following.weight).prefetch()
                load = self._load_experts if isinstance(each, ExpertLinear) else self._load
                with naming_refusals(each.weight):
                    progress(load(each, pool))  # type: ignore[arg-type]
            if self._spec.tensors[self._spec.embedding] not in (self._spec.tensors[name] for name in self.matrices):
                self._check_rows(self._spec.embedding, pool)
            if self._spec.layer_inputs is not None:
                self._check_rows(self._spec.layer_inputs.table, pool)

    def _load(self, linear: Linear, pool: Executor) -> int:
        """Pack a matrix; returns its bytes in the file."""
        stored = self._tensors.matrix(linear.weight)
        source = float32_source(stored) if linear.weight in self._routers else stored
        pack_any = pack_floats if source.layout.is_float else pack
        self.matrices[linear.weight] = pack_any(source, self._lanes, pool, _checked(source))
        stored.release(0, stored.out_features)
        return stored.size_bytes

    def _load_experts(self, stack: ExpertLinear, pool: Executor) -> int:
        """Pack a matrix of each expert into one store, an expert on a thread; returns their bytes in the file."""
        layout, count = self._tensors.layout(stack.weight), stack.num_experts
        make = allocate_floats if layout.is_float else allocate
        matrix: Matrix = make(layout, stack.out_features, stack.in_features, self._lanes, count)
        self._tensors.expert(stack.weight, 0).prefetch()

        def load(expert: int) -> int:
            if expert + 1 < count:
                self._tensors.expert(stack.weight, expert + 1).prefetch()
            source, part = self._tensors.expert(stack.weight, expert), matrix.part(expert)
            if isinstance(part, FloatMatrix):
                fill_floats(part, source, self._lanes, None, _checked(source))
            else:
                fill(part, source, self._lanes, None, _checked(source))
            source.release(0, source.out_features)
            return source.size_bytes

        self.matrices[stack.weight] = matrix
        return sum(pool.map(load, range(count)))

    def vector(self, name: TensorName, offset: float = 0.0, scale: float = 1.0) -> NDArray[np.float32]:
        """float32 [elements padded with zeros to whole tiles], plus `offset`, times `scale`; kept alive here."""
        key = (name, offset, scale)
        if key not in self._vectors:
            values = self._tensors.vector(name)
            padded = aligned_zeros(-(-values.size // 16) * 16, np.float32)
            padded[: values.size] = (values + np.float32(offset)) * np.float32(scale)
            self._vectors[key] = padded  # type: ignore[assignment]
        return self._vectors[key]

    def taps(self, name: TensorName) -> NDArray[np.float32]:
        """The kernel of a convolution, float32 [length, channels]; kept alive here."""
        if name not in self._taps:
            kernel = self._tensors.convolution(name)
            self._taps[name] = aligned_zeros(kernel.size, np.float32).reshape(kernel.shape[::-1])  # type: ignore[assignment]
            self._taps[name][:] = kernel.T
        return self._taps[name]

    def rates(self, name: TensorName, *, is_log: bool) -> NDArray[np.float32]:
        """Rates of a recurrence, below zero; the tensor has the logarithms of their negatives where `is_log`."""
        if not is_log:
            return self.vector(name)
        if name not in self._rates:
            self._rates[name] = -np.exp(self.vector(name))
        return self._rates[name]

    def half_of(self, name: TensorName) -> NDArray[np.float32]:
        """Half of a vector's values, in the shape of `vector`; kept alive here."""
        if name not in self._halves:
            self._halves[name] = aligned_zeros(self.vector(name).size, np.float32)  # type: ignore[assignment]
            np.multiply(self.vector(name), np.float32(0.5), out=self._halves[name])
        return self._halves[name]

    def expert_biases(self, name: TensorName) -> NDArray[np.float32]:
        """A vector for each expert, float32 [experts, out_features padded with zeros to whole tiles]; kept here."""
        if name not in self._expert_biases:
            values = self._tensors.expert_vectors(name)
            shape = len(values), -(-values.shape[1] // 16) * 16
            padded = aligned_zeros(shape[0] * shape[1], np.float32).reshape(shape)
            padded[:, : values.shape[1]] = values
            self._expert_biases[name] = padded
        return self._expert_biases[name]

    def length(self, name: TensorName) -> int:
        """Values of a vector."""
        return self._spec.tensors[name].shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._spec.hidden_size

    def norm_weight(self, norm: Norm) -> NDArray[np.float32]:
        """The weights of a norm, in the shape of `vector`, its offset added, times its scale."""
        return self.vector(norm.weight, norm.weight_offset, norm.weight_scale)

    @property
    def size_bytes(self) -> int:
        """Packed bytes of all matrices."""
        return sum(matrix.size_bytes for matrix in self.matrices.values())

    @property
    def token_bytes(self) -> int:
        """Packed bytes that a token reads: of a mixture's experts those that it goes through."""
        return size_of_token(self._spec, {name: matrix.size_bytes for name, matrix in self.matrices.items()})

    def embed(self, ids: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """out [len(ids), hidden_size] = the file's rows of int32 `ids`, times the model's embedding scale."""
        self._embedding.read(ids, self._spec.embedding_scale, out)

    def layer_rows(self, ids: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """out [len(ids), layers * size] = rows of the table of layers' inputs, scaled, where the model has one."""
        if self._layer_rows is not None and self._spec.layer_inputs is not None:
            self._layer_rows.read(ids, self._spec.layer_inputs.table_scale, out)

    def _check_rows(self, name: TensorName, pool: Executor) -> None:
        """Look at a table's rows, which steps read from the file, for weights that are not finite."""
        source = self._tensors.matrix(name)
        step = max(1, _CHECKED_BYTES // source.row_bytes)

        def check(start: int) -> None:
            stop = min(start + step, source.out_features)
            source.check_finite(start, stop)
            source.release(start, stop)

        for _ in pool.map(check, range(0, source.out_features, step)):
            pass


def _checked(source: MatrixSource) -> Callable[[int, int], None]:
    """Called for a run of out_features that was packed: read just now, it costs little to look for what is not finite.

    Its pages are released.
    """

    def packed(start: int, stop: int) -> None:
        source.check_finite(start, stop)
        source.release(start, stop)

    return packed
