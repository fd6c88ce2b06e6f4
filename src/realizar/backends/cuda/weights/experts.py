"""The matrices of a mixture's experts on the device: those of all experts of one matrix in one allocation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch

from realizar.backends.cuda.layouts.fragments import BLOCK, fragment_format
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import FLOAT_TYPES, Packer, Reserver, table_of
from realizar.backends.cuda.weights.plain import PlainMatrix, pack_plain, stack_plain
from realizar.backends.cuda.weights.store import aligned
from realizar.backends.machine import num_processors
from realizar.backends.weight_tensors import WeightTensors, naming_refusals
from realizar.models.parts import Linear
from realizar.models.spec import ExpertLinear, Experts
from realizar.quantization.layout import WeightLayout
from realizar.quantization.source import MatrixSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts(PackedMatrix):
    """One matrix [out_features, in_features] of every expert in fragment order.

    Attributes:
        out_features, in_features: of an expert's matrix without padding; gate and up together where `interleaved`.
        weights: uint8 [count * stride], 256-byte aligned; an expert's begin at its number times `stride`.
        block_scales: float32 [count * strips].
        interleaved: blocks of 64 out_features of gate and up alternate, in each expert.
        shared: 1 if the last expert is the one that every token goes through, else 0.
    """

    count: int
    shared: int = 0

    @property
    def routed(self) -> int:
        return self.count - self.shared

    @property
    def stride(self) -> int:
        return self.format.size_bytes(self.out_features, self.in_features)

    @property
    def strips(self) -> int:
        return -(-self.out_features // BLOCK)

    def part(self, first: int, end: int) -> PackedMatrix:
        """The matrices of experts `first` to `end`, one below the other."""
        weights = self.weights[first * self.stride : end * self.stride]
        scales = self.block_scales[first * self.strips : end * self.strips]
        out_features = (end - first) * self.out_features
        return PackedMatrix(out_features, self.in_features, self.format, weights, scales, self.table, self.interleaved)


Stack: TypeAlias = PackedExperts | PlainMatrix | torch.Tensor
"""A matrix of every expert; where they are not packed, out_features of one expert lie below those of the one before."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of a mixture.

    Attributes:
        gate_up: one stack with gate and up interleaved, or gate and up.
        down: the last matrix.
        gate_up_biases, down_bias: of the stacks, float32 [experts, out_features] in the order of their out_features;
            None where experts have none.
    """

    experts: Experts
    gate_up: tuple[Stack, ...]
    down: Stack
    gate_up_biases: tuple[torch.Tensor | None, ...]
    down_bias: torch.Tensor | None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return *self.gate_up, self.down

    @property
    def ends_with_activation(self) -> bool:
        """True if the launch of gate and up applies the activation, and writes what down reads."""
        return len(self.gate_up) == 1 and isinstance(self.down, PackedExperts)

    @property
    def size_bytes(self) -> int:
        return sum(map(matrix_bytes, self.stacks))

    @property
    def unread_bytes(self) -> int:
        """Bytes of the experts that a token does not go through."""
        return self.size_bytes // self.count * (self.count - self.per_token)

    @property
    def shared(self) -> int:
        """1 if the last expert of each stack is the shared one, else 0."""
        return self.down.shared if isinstance(self.down, PackedExperts) else 0

    @property
    def shared_choice(self) -> int:
        """Whether a token's last expert is the shared one, as in `ChoiceShape`."""
        return self.shared * (1 if self.experts.shared_gate is None else 2)

    @property
    def count(self) -> int:
        """Experts of a stack."""
        return self.experts.num_experts + self.shared

    @property
    def per_token(self) -> int:
        """Experts of the stacks that a token goes through."""
        return self.experts.experts_per_token + self.shared


def matrix_bytes(matrix: PackedMatrix | Stack) -> int:
    return matrix.numel() * matrix.element_size() if isinstance(matrix, torch.Tensor) else matrix.size_bytes


@dataclass(frozen=True, slots=True)
class StackPlan:
    """A stack before it is loaded.

    Attributes:
        linears: the experts' matrices; two interleave, by blocks of 64 out_features.
        layout: of all of them, as stored.
        is_packed: they are put in fragment order.
        shared: the matrices of a shared expert that lies behind the others; none where it is apart.
    """

    linears: tuple[ExpertLinear, ...]
    layout: WeightLayout
    is_packed: bool
    shared: tuple[Linear, ...] = ()

    def reserve(self, device: torch.device) -> PackedExperts | torch.Tensor:
        """The stack without weights; UnsupportedModelError where no format expresses the layout."""
        first, out_features = self.linears[0], sum(one.out_features for one in self.linears)
        shared, cols = int(bool(self.shared)), first.in_features
        count = first.num_experts + shared
        if not self.is_packed:
            rows = count * out_features
            return torch.empty((rows, cols), dtype=FLOAT_TYPES[self.layout.float_type or "f32"], device=device)
        with naming_refusals(first.weight):
            weight_format = fragment_format(self.layout)
        size, strips = count * weight_format.size_bytes(out_features, cols), -(-out_features // BLOCK)
        memory = torch.empty(aligned(size) + 4 * count * strips, dtype=torch.uint8, device=device)
        weights, scales = memory[:size], memory[aligned(size) :].view(torch.float32)
        table, interleaved = table_of(self.layout, device), len(self.linears) == 2
        return PackedExperts(
            out_features, cols, weight_format, weights, scales, table, interleaved, count=count, shared=shared
        )


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """The stacks of a mixture, decided by layouts alone: what loads it, plans its memory and binds it reads this."""

    gate_up: tuple[StackPlan, ...]
    down: StackPlan

    @staticmethod
    def of(experts: Experts, tensors: WeightTensors, *, packs: bool, stacks_shared: bool) -> ExpertsPlan:
        """Decide.

        Gate and up of one layout interleave. Matrices of bf16 and fp16 are packed as well where grouped matmuls read
        all of a mixture. `packs`: matrices can be put in fragment order. `stacks_shared`: a shared expert lies in the
        stacks where it can.
        """
        assert experts.gate is not None  # `SUPPORTED` lists no experts without
        gate, up, down = (tensors.layout(one.weight) for one in experts.expert_linears())
        interleaves = packs and gate == up and experts.up.out_features % BLOCK == 0
        floats = interleaves and "f32" not in (gate.float_type, down.float_type)
        packed = {layout: packs and (floats or layout.has_integers) for layout in (gate, up, down)}
        shared = experts.shared if stacks_shared and interleaves and _fits_stacks(experts, tensors) else None
        last = () if shared is None else shared.linears()
        if interleaves and packed[gate]:
            gate_up: tuple[StackPlan, ...] = (StackPlan((experts.gate, experts.up), gate, True, last[:-1]),)
        else:
            gate_up = StackPlan((experts.gate,), gate, packed[gate]), StackPlan((experts.up,), up, packed[up])
        return ExpertsPlan(gate_up, StackPlan((experts.down,), down, packed[down], last[-1:]))

    @property
    def joined(self) -> tuple[Linear, ...]:
        """The matrices of the shared expert that are in the stacks."""
        return tuple(one for stack in (*self.gate_up, self.down) for one in stack.shared)


def _fits_stacks(experts: Experts, tensors: WeightTensors) -> bool:
    """A shared expert has the others' sizes, types and activation, these are codes, and nothing has biases."""
    shared = experts.shared
    if shared is None or shared.gate is None or experts.norms is not None:
        return False
    if experts.clamped or shared.activation != experts.activation:
        return False
    for own, one in zip(shared.linears(), experts.expert_linears(), strict=True):
        layout, sizes = tensors.layout(one.weight), (one.out_features, one.in_features)
        if layout.is_float or layout != tensors.layout(own.weight) or own.bias is not None or one.bias is not None:
            return False
        if sizes != (own.out_features, own.in_features):
            return False
    return True


class ExpertLoader:
    """Reads mixtures from a checkpoint, one matrix of all experts after the other; `progress` gets the bytes done.

    A packer of None has Triton multiply quantised matrices, row by row.
    """

    def __init__(
        self,
        tensors: WeightTensors,
        device: torch.device,
        packer: Packer | Reserver | None,
        progress: Callable[[int], None],
    ) -> None:
        self._tensors, self._device, self._packer, self._progress = tensors, device, packer, progress

    def load(self, experts: Experts, plan: ExpertsPlan) -> ExpertMatrices:
        """The matrices of a mixture; on the device `meta` nothing is read.

        Raises:
            CheckpointError: a weight is NaN or infinite.
            UnsupportedModelError: no kernel reads a matrix's layout.
        """
        if self._device.type == "meta":
            stacks = [stack.reserve(self._device) for stack in (*plan.gate_up, plan.down)]
            return ExpertMatrices(experts, tuple(stacks[:-1]), stacks[-1], (None,) * len(plan.gate_up), None)
        gate_up = tuple(self._stack(stack) for stack in plan.gate_up)
        biases = tuple(self._biases(*stack.linears) for stack in plan.gate_up)
        return ExpertMatrices(experts, gate_up, self._stack(plan.down), biases, self._biases(experts.down))

    def _biases(self, *linears: ExpertLinear) -> torch.Tensor | None:
        """Biases of a stack: float32 [experts, out_features], of two linears interleaved; zeros for one without."""
        if all(linear.bias is None for linear in linears):
            return None
        parts = [
            np.zeros((linear.num_experts, linear.out_features), np.float32)
            if linear.bias is None
            else self._tensors.expert_vectors(linear.bias)
            for linear in linears
        ]
        width = BLOCK if len(parts) > 1 else linears[0].out_features
        values = np.stack([part.reshape(len(part), -1, width) for part in parts], axis=2)
        return torch.from_numpy(np.ascontiguousarray(values).reshape(len(values), -1)).to(self._device)

    def _stack(self, plan: StackPlan) -> Stack:
        parts = [self._sources(linear) for linear in plan.linears]
        shared = [self._tensors.matrix(linear.weight) for linear in plan.shared]
        sources = [source for part in (*parts, shared) for source in part]
        with reading(sources, self._progress):
            if not plan.is_packed and not plan.layout.is_float:
                return stack_plain([pack_plain(source, self._device) for source in sources])
            made = plan.reserve(self._device)
            if isinstance(made, PackedExperts):
                self._pack(made, list(zip(*parts, strict=True)), shared)
            else:
                self._copy(made, sources)
        return made

    def _sources(self, linear: ExpertLinear) -> list[MatrixSource]:
        """One for all experts, if they lie one below the other in the file and end with a block; or one for each."""
        whole = self._tensors.stack(linear.weight) if linear.out_features % BLOCK == 0 else None
        if whole is not None:
            return [whole]
        return [self._tensors.expert(linear.weight, expert) for expert in range(linear.num_experts)]

    def _pack(self, stack: PackedExperts, runs: Sequence[Sequence[MatrixSource]], last: Sequence[MatrixSource]) -> None:
        """Pack runs of experts, one or all, of each the sources that interleave; then the `last` ones, of one
        expert.
        """
        assert self._packer is not None
        if stack.out_features % BLOCK == 0:
            self._packer.pack([*chain.from_iterable(runs), *last], stack.part(0, stack.count))
            return
        for expert, run in enumerate((*runs, last) if last else runs):  # each ends within a block
            self._packer.pack(run, stack.part(expert, expert + 1))

    def _copy(self, stack: torch.Tensor, sources: Sequence[MatrixSource]) -> None:
        first = 0
        for source in sources:
            assert source.raw is not None  # float matrices have their bytes
            rows = stack[first : first + source.out_features].view(torch.uint8)
            rows.copy_(torch.from_numpy(np.array(source.raw, copy=True).reshape(-1)).view(rows.shape))
            first += source.out_features


_CHECKED_BYTES = 4 << 20  # of a matrix, by one thread at a time


@contextmanager
def reading(sources: Sequence[MatrixSource], progress: Callable[[int], None]) -> Iterator[None]:
    """A context before which matrices are checked as of `check_finite`, and after which they are released."""
    check_finite(sources)
    with released(sources, progress):
        yield


@contextmanager
def released(sources: Sequence[MatrixSource], progress: Callable[[int], None]) -> Iterator[None]:
    """A context after which matrices are released; `progress` gets the bytes of each."""
    yield
    for source in sources:
        source.release(0, source.out_features)
        progress(source.size_bytes)


def check_finite(sources: Iterable[MatrixSource]) -> None:
    """Raise CheckpointError where a weight is NaN or infinite. Several threads also bring the matrices' pages in."""
    runs = [
        (source, start, min(start + step, source.out_features))
        for source in sources
        for step in (max(1, _CHECKED_BYTES // source.row_bytes),)
        for start in range(0, source.out_features, step)
    ]
    with ThreadPoolExecutor(min(8, num_processors())) as pool:
        for _ in pool.map(lambda run: run[0].check_finite(run[1], run[2]), runs):
            pass
