"""The model's weights on the device: matrices packed one by one, vectors in float32, an allocation for each layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import ModelSource
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.device_errors import translate
from realizar.backends.cuda.weights.experts import (
    ExpertLoader,
    ExpertMatrices,
    ExpertsPlan,
    check_finite,
    matrix_bytes,
    reading,
    released,
)
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import FLOAT_TYPES, Packer, Reserver, memory_bytes
from realizar.backends.cuda.weights.plain import PlainMatrix, pack_plain
from realizar.backends.cuda.weights.store import Store
from realizar.backends.program import Program
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.weight_tensors import WeightTensors, naming_refusals
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CapacityError, DeviceLostError
from realizar.models.parts import Linear, Norm
from realizar.models.spec import Experts, FeedForward, Layer, ModelSpec
from realizar.models.tensor_source import TensorName
from realizar.quantization.layout import WeightLayout
from realizar.quantization.source import MatrixSource

Matrix: TypeAlias = PackedMatrix | PlainMatrix | torch.Tensor
Group: TypeAlias = tuple[TensorName, ...]

_COPIED_AT_ONCE = 256 << 20  # bytes
_MERGED_OUT_FEATURES = 64  # matrices lie one below the other at multiples of this many output features


class Weights:
    """Device copies of a checkpoint's tensors. On torch's device `meta` a load takes no memory, and reads nothing.

    Args:
        packs_floats: the matmuls read bf16 and fp16 matrices packed, as they do quantised ones.
        stacks_shared: shared experts join the stacks of experts where they can.
        lent: weights that stay as long as these, whose embedding is taken where it is the same tensor.

    Attributes:
        groups: the matrices of matmuls that share an input, in order; those of one layout may lie in one. A float
            matrix that is not packed is a tensor [out_features, cols] of its own type.
        experts: the matrices of mixtures, by the name of their gate.
        gated: feed-forwards whose activation may end a matmul, by the group of their gate and up.
        embedding: of its own, row by row. layer_table: so too, of the layers' own inputs; None where they have none.
        stacked: matrices of shared experts that are in a stack of experts, and in no group.
    """

    def __init__(
        self, spec: ModelSpec, program: Program, checkpoint: Checkpoint, device: DeviceProfile,
        packs_floats: bool = False, stacks_shared: bool = False, lent: Weights | None = None,
    ) -> None:  # fmt: skip
        self._source = ModelSource(spec, checkpoint)
        self._lent = lent if lent is not None and same_embedding(lent._source, self._source) else None
        self._spec, self._tensors, self._device = spec, WeightTensors(spec, checkpoint), device
        self._packs_floats, self._reads = packs_floats, device.torch_device.type != "meta"
        self.groups: dict[Group, tuple[Matrix, ...]] = {}
        inputs = [block.inputs for block in program.blocks]
        self.gated: dict[Group, FeedForward] = {
            tuple(linear.weight for linear in each.linears): each.gated for each in inputs if each.gated is not None
        }
        self.embedding: PlainMatrix | torch.Tensor
        self.layer_table: PlainMatrix | torch.Tensor | None = None
        self.stacked: set[TensorName] = set()
        self._plans: list[tuple[Experts, ExpertsPlan]] = []
        for _, experts in spec.mixtures():
            plan = ExpertsPlan.of(experts, self._tensors, packs=device.runs("matmuls"), stacks_shared=stacks_shared)
            self._plans.append((experts, plan))
            self.stacked.update(linear.weight for linear in plan.joined)
            shared = experts.shared
            if shared is not None and shared.gate is not None and not plan.joined:
                self.gated[shared.gate.weight, shared.up.weight] = shared
        self._vectors: dict[tuple[TensorName, float, float], torch.Tensor] = {}
        self.experts: dict[TensorName, ExpertMatrices] = {}
        self._as_floats = {linear.weight for _, experts in spec.mixtures() for linear in experts.scorers()}
        self._packer: Packer | Reserver | None = None
        self._tables: dict[WeightLayout, torch.Tensor | None] = {}
        self._stores: dict[TensorName, Store] = {}

    def apart(self, groups: Iterable[tuple[Linear, ...]]) -> list[tuple[Linear, ...]]:
        """The groups of matrices that are not `stacked`."""
        return [group for group in groups if group[0].weight not in self.stacked]

    def load(self, groups: Iterable[Sequence[Linear]], progress: Callable[[int], None]) -> None:
        """Pack groups of matrices that are not `stacked`; `progress` gets the bytes of each as it is done.

        Raises CheckpointError where a weight is NaN or infinite.
        """
        if self._reads:
            self._tensors.check_vectors()
        if self._device.runs("matmuls"):
            on, repacks = self._device.torch_device, "repack" not in self._device.without
            self._packer = Packer(on, repacks=repacks) if self._reads else Reserver(on)
        for key, linears, sources in self._checked(groups):
            with released(sources, progress), naming(*key):
                self._make_store(key[0])
                self.groups[key] = tuple(self._pack_group(linears, self._stores.get(key[0])))
        if self._reads:
            self._load_tables(progress)
        loader = ExpertLoader(self._tensors, self._device.torch_device, self._packer, progress)
        for experts, plan in self._plans:
            with naming(*(linear.weight for linear in experts.expert_linears())):
                self.experts[experts.up.weight] = loader.load(experts, plan)
        self._packer = None

    def _checked(
        self, groups: Iterable[Sequence[Linear]]
    ) -> Iterator[tuple[Group, Sequence[Linear], list[MatrixSource]]]:
        """Each group once, when its weights are known to be finite: the next one's are looked at meanwhile."""
        wanted = {tuple(linear.weight for linear in linears): linears for linears in groups}
        before: tuple[Group, list[MatrixSource], Future[None]] | None = None
        with ThreadPoolExecutor(1, "realizar-check") as others:
            for key in wanted:
                sources = [self._tensors.matrix(name) for name in key] if self._reads else []
                following = key, sources, others.submit(check_finite, sources)
                if before is not None:
                    before[2].result()
                    yield before[0], wanted[before[0]], before[1]
                before = following
            if before is not None:
                before[2].result()
                yield before[0], wanted[before[0]], before[1]

    def _load_tables(self, progress: Callable[[int], None]) -> None:
        if self._lent is not None:
            self.embedding = self._lent.embedding
            return
        embedding, inputs = self._spec.embedding, self._spec.layer_inputs
        own = self.groups.get((embedding,), ())
        if own and not isinstance(own[0], PackedMatrix):
            self.embedding = own[0]
        else:
            source = self._tensors.matrix(embedding)
            if not own:
                check_finite([source])
            with naming(embedding):
                self.embedding = self._pack_plain(source)
        if inputs is not None:
            source = self._tensors.matrix(inputs.table)
            with reading([source], progress), naming(inputs.table):
                self.layer_table = self._pack_plain(source)

    def vector(self, name: TensorName, offset: float = 0.0, scale: float = 1.0) -> torch.Tensor:
        """float32 [elements] of a vector, plus `offset`, times `scale`."""
        key = name, offset, scale
        if key not in self._vectors:
            with naming(name):
                values = (self.vector_values(name) + np.float32(offset)) * np.float32(scale)
                self._vectors[key] = self._send(values, self._stores.get(name))
        return self._vectors[key]

    def vector_values(self, name: TensorName) -> NDArray[np.float32]:
        """float32 [elements] of a vector, on the host."""
        return self._tensors.vector(name)

    def matrix(self, name: TensorName) -> torch.Tensor:
        """float32 [rows, columns] of a small matrix that no matmul reads: a convolution's."""
        key = name, 0.0, 1.0
        if key not in self._vectors:
            with naming(name):
                values = self._tensors.matrix(name).dequantize()
                self._vectors[key] = self._send(values.reshape(-1), self._stores.get(name)).view(values.shape)
        return self._vectors[key]

    def norm_weight(self, norm: Norm) -> torch.Tensor:
        return self.vector(norm.weight, norm.weight_offset, norm.weight_scale)

    def bias(self, linears: tuple[Linear, ...]) -> torch.Tensor | None:
        """float32 [out_features], biases of matmuls side by side, zeros for those without; None where none has one."""
        if all(linear.bias is None for linear in linears):
            return None
        parts = [
            np.zeros(linear.out_features, np.float32) if linear.bias is None else self.vector_values(linear.bias)
            for linear in linears
        ]
        return self._send(np.concatenate(parts), self._stores.get(linears[0].weight))

    @property
    def size_bytes(self) -> int:
        dense = sum(matrix_bytes(matrix) for group in self.groups.values() for matrix in group)
        return dense + sum(experts.size_bytes for experts in self.experts.values())

    @property
    def token_bytes(self) -> int:
        """Those that a token reads: of a mixture's experts those that it goes through."""
        return self.size_bytes - sum(matrices.unread_bytes for matrices in self.experts.values())

    def _make_store(self, weight: TensorName) -> None:
        """Allocate the memory of the layer that has this matrix, once; the head is in no layer and has its own."""
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

        Raises UnsupportedModelError where no format expresses a matrix's layout.
        """
        linears = [linear for linear in layer.linears() if linear.weight not in self.stacked]
        for linear in linears:
            source = self._tensors.matrix(linear.weight)
            if linear.weight in self._as_floats:
                yield 4 * linear.out_features * linear.in_features
            elif self._is_packed(source.layout):
                with naming_refusals(linear.weight):
                    size = memory_bytes([source])
                yield size
            elif source.layout.is_float:
                yield source.size_bytes
            if any(each.bias is not None for each in linears):
                yield 4 * linear.out_features
        for name in layer.vectors():
            yield 4 * self._spec.tensors[name].shape[0]

    def _pack_group(self, linears: Sequence[Linear], store: Store | None) -> Iterable[Matrix]:
        """Pack matrices side by side; neighbours of one layout are packed as one where the CUDA matmuls allow it.

        Routers become float32: a score decides which experts a token goes through. So do gates of shared experts.
        """
        if linears[0].weight in self._as_floats:
            source = self._tensors.matrix(linears[0].weight)
            yield self._stored(source, torch.float32, source.dequantize, store)
            return
        for layout, run in itertools.groupby(linears, lambda linear: self._tensors.layout(linear.weight)):
            part = list(run)
            sources = [self._tensors.matrix(linear.weight) for linear in part]
            if self._packer is None or not self._is_packed(layout):
                for source in sources:
                    yield self._pack_plain(source, store)
                continue
            mergeable = all(source.out_features % _MERGED_OUT_FEATURES == 0 for source in sources[:-1])
            for together in [sources] if mergeable else [[source] for source in sources]:
                with naming_refusals(part[0].weight):
                    into = None if store is None else store.take(memory_bytes(together))
                    packed = self._packer.pack(together, into, interleaved=self._interleaved(part))
                yield replace(packed, table=self._tables.setdefault(layout, packed.table))

    def _is_packed(self, layout: WeightLayout) -> bool:
        if self._packer is None or layout.float_type == "f32":
            return False
        return self._packs_floats or not layout.is_float

    def _interleaved(self, linears: Sequence[Linear]) -> bool:
        """True if matrices that are packed as one are a feed-forward's gate and up, and can be interleaved.

        Biases keep their order, so there must be none.
        """
        gated = tuple(linear.weight for linear in linears) in self.gated
        return gated and all(one.bias is None and one.out_features % _MERGED_OUT_FEATURES == 0 for one in linears)

    def _pack_plain(self, source: MatrixSource, store: Store | None = None) -> PlainMatrix | torch.Tensor:
        kind, raw = source.layout.float_type, source.raw
        if kind is None or raw is None:
            return pack_plain(source, self._device.torch_device)
        return self._stored(source, FLOAT_TYPES[kind], partial(np.ascontiguousarray, raw), store)

    def _stored(
        self, source: MatrixSource, dtype: torch.dtype, values: Callable[[], NDArray[Any]], store: Store | None
    ) -> torch.Tensor:
        """[out_features, in_features] of a type, with the bytes of `values`, which a plan does not ask for."""
        shape = source.out_features, source.in_features
        memory = self._take(math.prod(shape) * dtype.itemsize, store)
        if self._reads:
            _copy(values().reshape(-1).view(np.uint8), memory)
        return memory.view(dtype).view(shape)

    def _send(self, values: NDArray[np.float32], store: Store | None) -> torch.Tensor:
        data = np.ascontiguousarray(values).view(np.uint8)
        memory = self._take(data.size, store)
        _copy(data, memory)
        return memory.view(torch.float32)

    def _take(self, size_bytes: int, store: Store | None) -> torch.Tensor:
        """uint8 [size_bytes] of a layer's memory, or of its own."""
        if store is not None:
            return store.take(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device.torch_device)


def same_embedding(one: ModelSource, other: ModelSource) -> bool:
    """True if two models read the same embedding, from one file or lent by its name, and the other no other table."""
    first, second = (each.spec.tensors[each.spec.embedding] for each in (one, other))
    if other.spec.layer_inputs is not None or replace(first, name=second.name) != second:
        return False
    if one.checkpoint is other.checkpoint:
        return first.name == second.name
    own, lent = one.checkpoint.tensors.get(first.name), other.checkpoint.tensors.get(second.name)
    return own is not None and lent is not None and own.data is lent.data


def _copy(data: NDArray[np.uint8], memory: torch.Tensor) -> None:
    """Copy bytes to the device; what the host holds of them at once is bounded."""
    for first in range(0, data.size, _COPIED_AT_ONCE):
        part = data[first : first + _COPIED_AT_ONCE]
        memory[first : first + part.size].copy_(torch.from_numpy(np.array(part, copy=True)))


def stacks_shared(config: ResolvedConfig) -> bool:
    """True if shared experts may join the stacks of experts, whose sums have orders of their own, in halves."""
    return not config.batch_invariant


@contextmanager
def naming(*names: TensorName) -> Iterator[None]:
    """A context in which an error of the device is raised as one of ours that names the tensors being uploaded."""
    try:
        yield
    except Exception as error:
        ours = translate(error) or error
        if not isinstance(ours, CapacityError | DeviceLostError):  # others name a kernel
            raise
        try:
            raise type(ours)(f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(names)}: {ours}") from error
        finally:
            del ours
