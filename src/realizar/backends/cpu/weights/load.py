"""All weights of a model on the CPU: matrices in tiles, vectors in float32, the embedding left in its file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Any, get_args

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.emit import F16, F32, I8, I32, Emitter
from realizar.backends.cpu.codegen.float_tile import FLOAT_BYTES
from realizar.backends.cpu.codegen.formats import packed_format
from realizar.backends.cpu.emitted import Float, Value, emitted
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.memory import read_i32
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.pack import Matrix, PackedMatrix, Zeros, allocate, fill
from realizar.backends.cpu.weights.repack_readers import READERS, Fields
from realizar.backends.weight_tensors import WeightTensors, naming_refusals
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.parameters import size_of_token
from realizar.models.parts import Linear, Norm
from realizar.models.spec import ExpertLinear, LayerStack
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization.block_source import FLOAT32_LAYOUT, float32_source
from realizar.quantization.layout import FloatType, WeightLayout
from realizar.quantization.source import MatrixSource

_CHECKED_BYTES = 4 << 20  # of the embedding, at a time


class Weights:
    """Loads tensors of a spec, one at a time, releasing their pages. A tile has `lanes`. Routers become floats.

    `lent` are weights that stay as long as these: matrices of the same tensors of the same checkpoint are theirs, and
    those that are the first out_features of one.
    """

    def __init__(
        self, spec: LayerStack, checkpoint: Checkpoint, lanes: int, threads: int, lent: Weights | None = None
    ) -> None:
        self._spec, self._tensors, self._lanes = spec, WeightTensors(spec, checkpoint), lanes
        self._checkpoint = checkpoint
        self._lent: dict[TensorSource, Matrix] = {}
        if lent is not None and lent._checkpoint is checkpoint:
            self._lent = {lent._spec.tensors[name]: matrix for name, matrix in lent.matrices.items()}
        self._threads = threads
        self._routers = {experts.router.weight for _, experts in spec.mixtures()}
        self.matrices: dict[TensorName, Matrix] = {}
        self._arrays: dict[tuple[Any, ...], NDArray[np.float32]] = {}

    def reserve(self, matrices: Iterable[Linear | ExpertLinear], zeros: Zeros = aligned_zeros) -> None:
        """Allocate the matrices, reading the checkpoint's header alone; `zeros` makes their memory.

        Raises UnsupportedModelError where no kernel expresses a matrix's layout, or experts of a layer have several.
        """
        for each in matrices:
            if (taken := self._taken(each)) is not None:
                self.matrices[each.weight] = taken
                continue
            with naming_refusals(each.weight):
                layout, count = self._tensors.layout(each.weight), 1
                ordered = None
                if isinstance(each, Linear) and each.weight not in self._routers:
                    ordered = self._tensors.ordered(each)
                if isinstance(each, ExpertLinear):
                    count = each.num_experts
                elif each.weight in self._routers and not layout.is_float:
                    layout = FLOAT32_LAYOUT
                elif ordered is not None:
                    layout = ordered[0].layout
                made = allocate(layout, each.out_features, each.in_features, self._lanes, count, zeros)
                if ordered is not None and isinstance(made, PackedMatrix):
                    made = replace(made, order=ordered[1])
                self.matrices[each.weight] = made

    def _taken(self, matrix: Linear | ExpertLinear) -> Matrix | None:
        """What is lent of a matrix; None where it is to be packed."""
        place = self._spec.tensors[matrix.weight]
        if place in self._lent:
            return self._lent[place]
        count, whole = matrix.out_features, place.whole
        is_first = place.rows == ((0, count),) and place.columns is None and count % self._lanes == 0
        if whole is None or not is_first or whole not in self._lent:
            return None
        return self._lent[whole].first(count, self._lanes)

    def load(self, matrices: Sequence[Linear | ExpertLinear], progress: Callable[[int], None]) -> None:
        """Pack the matrices, as they were reserved; `progress` gets the bytes of each as it is done.

        Raises CheckpointError where a weight is NaN or infinite.
        """
        self._tensors.check_vectors()
        distinct = list({each.weight: each for each in matrices}.values())
        self.reserve([each for each in distinct if each.weight not in self.matrices])
        distinct = [each for each in distinct if self._taken(each) is None]
        self._rows = {name: EmbeddingRows(self._tensors.matrix(name)) for name in self._spec.tables()}
        with ThreadPoolExecutor(self._threads) as pool:
            for each, following in zip_longest(distinct, distinct[1:]):
                if isinstance(following, Linear):
                    self._tensors.matrix(following.weight).prefetch()
                with naming_refusals(each.weight):
                    done = self._fill_experts(each, pool) if isinstance(each, ExpertLinear) else self._fill(each, pool)
                progress(done)
            packed = [self._spec.tensors[name] for name in self.matrices]
            for name in self._rows:
                if self._spec.tensors[name] not in packed:
                    self._check_rows(name, pool)

    def _fill(self, linear: Linear, pool: Executor) -> int:
        stored, matrix = self._tensors.matrix(linear.weight), self.matrices[linear.weight]
        source = float32_source(stored) if linear.weight in self._routers else stored
        if stored.ordered is not None and isinstance(matrix, PackedMatrix):
            source, _ = stored.ordered
        fill(matrix, source, self._lanes, pool, _checked(source))
        stored.release(0, stored.out_features)
        return stored.size_bytes

    def _fill_experts(self, stack: ExpertLinear, pool: Executor) -> int:
        """Pack a matrix of each expert, an expert on a thread; returns their bytes in the file."""
        matrix, count = self.matrices[stack.weight], stack.num_experts
        self._tensors.expert(stack.weight, 0).prefetch()

        def load(expert: int) -> int:
            if expert + 1 < count:
                self._tensors.expert(stack.weight, expert + 1).prefetch()
            source = self._tensors.expert(stack.weight, expert)
            fill(matrix.part(expert), source, self._lanes, None, _checked(source))
            source.release(0, source.out_features)
            return source.size_bytes

        return sum(pool.map(load, range(count)))

    def vector(self, name: TensorName, offset: float = 0.0, scale: float = 1.0) -> NDArray[np.float32]:
        """float32 [elements padded with zeros to whole tiles], plus `offset`, times `scale`; kept alive here."""

        def make() -> NDArray[np.float32]:
            return _aligned((self._tensors.vector(name) + np.float32(offset)) * np.float32(scale), 16)

        return self._kept(("vector", name, offset, scale), make)

    def taps(self, name: TensorName) -> NDArray[np.float32]:
        """The kernel of a convolution, float32 [length, channels]; kept alive here."""
        return self._kept(("taps", name), lambda: _aligned(self._tensors.convolution(name).T))

    def rates(self, name: TensorName, *, is_log: bool) -> NDArray[np.float32]:
        """Rates of a recurrence, below zero; the tensor has the logarithms of their negatives where `is_log`."""
        return self._kept(("rates", name), lambda: -np.exp(self.vector(name))) if is_log else self.vector(name)

    def half_of(self, name: TensorName) -> NDArray[np.float32]:
        """Half of a vector's values, in the shape of `vector`; kept alive here."""
        return self._kept(("half", name), lambda: _aligned(self.vector(name) * np.float32(0.5)))

    def expert_biases(self, name: TensorName) -> NDArray[np.float32]:
        """A vector for each expert, float32 [experts, out_features padded with zeros to whole tiles]; kept here."""
        return self._kept(("biases", name), lambda: _aligned(self._tensors.expert_vectors(name), 16))

    def _kept(self, key: tuple[Any, ...], make: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:
        if key not in self._arrays:
            self._arrays[key] = make()
        return self._arrays[key]

    def length(self, name: TensorName) -> int:
        return self._spec.tensors[name].shape[0]

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    def vector_at(self, name: TensorName | None) -> int:
        """The address of `vector`; 0 for None."""
        return 0 if name is None else address(self.vector(name))

    def norm_at(self, norm: Norm | None) -> int:
        """The address of a norm's weights, as `vector_at`; its offset is added, times its scale."""
        return 0 if norm is None else address(self.vector(norm.weight, norm.weight_offset, norm.weight_scale))

    def has_codes(self, linear: Linear) -> bool:
        """True for a matrix that multiplies quantised activations, in whatever order."""
        return isinstance(self.matrices[linear.weight], PackedMatrix)

    def is_packed(self, linear: Linear | ExpertLinear) -> bool:
        """True for a matrix that multiplies quantised activations as they were written, and so needs no floats."""
        matrix = self.matrices[linear.weight]
        return isinstance(matrix, PackedMatrix) and matrix.order is None

    @property
    def size_bytes(self) -> int:
        """Of what is not lent."""
        own = {each.weight for each in self._spec.matrices() if self._taken(each) is None}
        return sum(matrix.size_bytes for name, matrix in self.matrices.items() if name in own)

    @property
    def token_bytes(self) -> int:
        """Packed bytes that a token reads: of a mixture's experts those that it goes through."""
        return size_of_token(self._spec, {name: matrix.size_bytes for name, matrix in self.matrices.items()})

    def rows(self, name: TensorName, ids: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """out [len(ids), columns] = the file's rows of int32 `ids` of one of `LayerStack.tables`, times its factor."""
        self._rows[name].read(ids, self._spec.tables()[name], out)

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


def _aligned(values: NDArray[np.float32], unit: int = 1) -> NDArray[np.float32]:
    """A copy at an aligned address, its last axis filled up with zeros to a multiple of `unit`."""
    *outer, size = values.shape
    shape = *outer, -(-size // unit) * unit
    copy = aligned_zeros(shape, np.float32)
    copy[..., :size] = values
    return copy


def _checked(source: MatrixSource) -> Callable[[int, int], None]:
    """Called for a run of out_features that was packed: read just now, it costs little to look for what is not finite.

    Its pages are released.
    """

    def packed(start: int, stop: int) -> None:
        source.check_finite(start, stop)
        source.release(start, stop)

    return packed


# Rows of the embedding as float32, straight from the file's blocks: a step starts with them.

COMPILED: tuple[FloatType | WeightLayout, ...] = (
    *get_args(FloatType),
    *(layout for layout in READERS if layout.codebook is None),
)
"""Numbers and layouts that have a kernel here. Codebooks, which embeddings hardly ever have, go through numpy."""
_WIDE = ir.VectorType(F32, GROUP)
_SIGNATURE = types.void(*[types.int64] * 7, types.float32)


class EmbeddingRows:
    def __init__(self, source: MatrixSource) -> None:
        kind = source.layout.float_type or source.layout
        self._source, self._raw = source, source.raw
        compiled = self._raw is not None and kind in COMPILED and source.in_features % GROUP == 0
        self._read = make_read_rows(COMPILED.index(kind)).call if compiled else None

    def read(self, ids: NDArray[np.int32], scale: float, out: NDArray[np.float32]) -> None:
        """out [len(ids), in_features] = out_features `ids`, the same bits as dequantised times float32 `scale`."""
        if self._read is not None and self._raw is not None:
            ids = np.ascontiguousarray(ids)
            source = address(self._raw), self._raw.strides[0]
            self._read(*source, address(ids), len(ids), address(out), out.strides[0], out.shape[1], scale)
            return
        np.multiply(self._source.gather(ids), np.float32(scale), out=out)


@cache
def make_read_rows(kind: int) -> Kernel:
    """The reader of COMPILED[kind]: address of row 0, bytes of a row; address and number of int32 ids; address of
    float32 [ids, columns], bytes of a row there, columns; what all is multiplied by."""
    layout = COMPILED[kind]
    if isinstance(layout, WeightLayout):
        block_bytes, cols = layout.block_bytes, layout.block_size
    else:
        block_bytes, cols = FLOAT_BYTES[layout] * GROUP, GROUP

    @kernel(kind, signature=_SIGNATURE)
    def read_rows(
        source: int, row_bytes: int, ids: int, count: int, out: int, out_stride: int, columns: int, scale: float
    ) -> None:
        for token in range(count):
            at, to = source + read_i32(ids, token) * row_bytes, out + token * out_stride
            for block in range(columns // cols):
                _dequantize_block(kind, at + block * block_bytes, to + block * cols * 4, scale)

    return read_rows


@emitted
def _dequantize_block(builder: Any, kind: int, source: Value, out: Value, scale: Float) -> None:
    layout = COMPILED[kind]
    e = Fields(builder, source)
    factor = _spread(e, [scale])
    if isinstance(layout, WeightLayout):
        groups = _dequantize(e, layout)
    else:
        groups = [Emitter(builder, GROUP).load_float(layout, source, 1)]
    for index, values in enumerate(groups):
        e.store(builder.fmul(values, factor), e.at(out, index * GROUP * 4), 4)


def _dequantize(e: Fields, layout: WeightLayout) -> list[Value]:
    """float32 [32] per group: scale * (code - offset) + minimum, each step rounded."""
    weight_format, reader = packed_format(layout), READERS[layout]
    nibbles = 2 if weight_format.small == "u4" else 1  # that share a stored value
    small = [_small(e, weight_format.small, value, plane) for value in reader.small(e) for plane in range(nibbles)]
    supers = [_half(e, value) for value in reader.supers(e)]
    parts = GROUP // weight_format.group
    result = []
    for group in range(layout.block_size // GROUP):
        if weight_format.centred:
            planes = [[e.b.fadd(supers[0], supers[0])], [e.b.fneg(supers[0])]]
        elif weight_format.small == "none":
            planes = [supers]
        else:
            first = group * parts * weight_format.planes
            planes = [
                [small[first + part * weight_format.planes + plane] for part in range(parts)]
                for plane in range(weight_format.planes)
            ]
            if supers:
                planes = [[e.b.fmul(value, supers[i]) for value in plane] for i, plane in enumerate(planes)]
        wide = ir.VectorType(I32, GROUP)
        codes = e.b.zext(e.b.bitcast(reader.words(e, group), e.bytes), wide)
        integers = e.b.sitofp(e.b.sub(codes, ir.Constant(wide, [weight_format.offset] * GROUP)), _WIDE)
        values = e.b.fmul(integers, _spread(e, planes[0]))
        result.append(values if len(planes) == 1 else e.b.fadd(values, _spread(e, planes[1])))
    return result


def _small(e: Fields, kind: str, value: Value, plane: int) -> Value:
    if kind == "f16":
        return _half(e, value)
    if kind == "i8":
        return e.b.sitofp(value, F32)
    if kind == "u4":
        value = e.b.lshr(value, ir.Constant(I8, 4)) if plane else e.b.and_(value, ir.Constant(I8, 15))
    return e.b.uitofp(value, F32)


def _half(e: Fields, bits: Value) -> Value:
    return e.b.fpext(e.b.bitcast(bits, F16), F32)


def _spread(e: Fields, scalars: list[Value]) -> Value:
    """float32 [32]: each scalar over its equal share of columns."""
    vector = ir.Constant(_WIDE, ir.Undefined)
    for index, scalar in enumerate(scalars):
        vector = e.b.insert_element(vector, scalar, ir.Constant(I32, index))
    return e.pick(vector, vector, [column * len(scalars) // GROUP for column in range(GROUP)])
