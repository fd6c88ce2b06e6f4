"""The matrices of a mixture's experts on the device: those of all experts of one matrix in one allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat, fragment_format
from realizar.backends.cuda.weights.finite import check_finite
from realizar.backends.cuda.weights.pack_floats import FLOAT_TYPES
from realizar.backends.cuda.weights.pack_raw import Packer
from realizar.backends.cuda.weights.plain import PlainMatrix, pack_plain, stack_plain
from realizar.backends.cuda.weights.store import aligned
from realizar.backends.weight_tensors import WeightTensors
from realizar.models.parts import Linear
from realizar.models.spec import ExpertLinear, Experts
from realizar.quantization import MatrixSource, WeightLayout


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One matrix [out_features, in_features] of every expert in fragment order, as `PackedMatrix` has a single one.

    Attributes:
        count: experts.
        out_features, in_features: of an expert's matrix without padding; gate and up together where `interleaved`.
        format: the layout of `weights`.
        weights: uint8 [count * stride], 256-byte aligned; an expert's begin at its number times `stride`.
        block_scales: float32 [count * strips].
        table: the codebook, as in `PackedMatrix`.
        interleaved: True if blocks of 64 out_features of gate and up alternate, in each expert.
        shared: 1 if the last expert is the one that every token goes through, else 0.
    """

    count: int
    out_features: int
    in_features: int
    format: FragmentFormat
    weights: torch.Tensor
    block_scales: torch.Tensor
    table: torch.Tensor | None
    interleaved: bool = False
    shared: int = 0

    @property
    def routed(self) -> int:
        """Experts that a router chooses from."""
        return self.count - self.shared

    @property
    def stride(self) -> int:
        """Bytes of an expert."""
        return self.format.size_bytes(self.out_features, self.in_features)

    @property
    def strips(self) -> int:
        """Block scales of an expert."""
        return -(-self.out_features // BLOCK)

    @property
    def size_bytes(self) -> int:
        """Bytes of all experts."""
        return int(self.weights.numel() + 4 * self.block_scales.numel())


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

    gate_up: tuple[Stack, ...]
    down: Stack
    gate_up_biases: tuple[torch.Tensor | None, ...]
    down_bias: torch.Tensor | None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return *self.gate_up, self.down

    @property
    def size_bytes(self) -> int:
        return sum(map(stack_bytes, self.stacks))

    @property
    def shared(self) -> int:
        """1 if the last expert of each stack is the shared one, else 0."""
        return self.down.shared if isinstance(self.down, PackedExperts) else 0

    def count(self, experts: Experts) -> int:
        """Experts of a stack."""
        return experts.num_experts + self.shared

    def per_token(self, experts: Experts) -> int:
        """Experts of the stacks that a token goes through."""
        return experts.experts_per_token + self.shared


def stack_bytes(stack: Stack) -> int:
    """Bytes on the device."""
    return stack.numel() * stack.element_size() if isinstance(stack, torch.Tensor) else stack.size_bytes


def is_interleaved(experts: Experts, gate: WeightLayout, up: WeightLayout) -> bool:
    """True if gate and up of these layouts lie in one stack, where they are packed."""
    return gate == up and experts.up.out_features % BLOCK == 0


def packs_floats(experts: Experts, gate: WeightLayout, up: WeightLayout, down: WeightLayout) -> bool:
    """True if matrices of bf16 and fp16 among these are packed as well: where grouped matmuls read all of them."""
    return is_interleaved(experts, gate, up) and "f32" not in (gate.float_type, down.float_type)


def fits_stacks(experts: Experts, tensors: WeightTensors) -> bool:
    """True if the shared expert of a mixture can be one more of its packed stacks: it has the sizes, the types and the
    activation of the experts, which are quantised, and nothing has biases."""
    shared, gate = experts.shared, experts.gate
    if shared is None or shared.gate is None or gate is None or experts.norms is not None:
        return False
    if experts.clamped or shared.activation != experts.activation:
        return False
    for own, one in zip(shared.linears(), experts.expert_linears(), strict=True):
        layout, sizes = tensors.layout(one.weight), (one.out_features, one.in_features)
        if layout.is_float or layout != tensors.layout(own.weight) or own.bias is not None or one.bias is not None:
            return False
        if sizes != (own.out_features, own.in_features):
            return False
    return is_interleaved(experts, tensors.layout(gate.weight), tensors.layout(experts.up.weight))


def packed_bytes(layout: WeightLayout, linear: ExpertLinear) -> int:
    """Bytes of a packed stack.

    Raises:
        UnsupportedModelError: no format expresses the layout.
    """
    size = fragment_format(layout).size_bytes(linear.out_features, linear.in_features)
    return linear.num_experts * (size + 4 * -(-linear.out_features // BLOCK))


class ExpertLoader:
    """Reads mixtures from a checkpoint, a matrix of all experts after the other.

    Args:
        packer: of quantised matrices; None where Triton multiplies them, row by row.
        progress: called with the bytes of what is done.
    """

    def __init__(
        self, tensors: WeightTensors, device: torch.device, packer: Packer | None, progress: Callable[[int], None]
    ) -> None:
        self._tensors, self._device, self._packer, self._progress = tensors, device, packer, progress

    def load(self, experts: Experts, *, shared: bool = False) -> ExpertMatrices:
        """The matrices of a mixture.

        Args:
            shared: True if the shared expert is the last of each stack; see `fits_stacks`.

        Raises:
            CheckpointError: a weight is NaN or infinite.
            UnsupportedModelError: no kernel reads a matrix's layout.
        """
        assert experts.gate is not None  # `SUPPORTED` lists no experts without
        gate, up, down = (self._tensors.layout(linear.weight) for linear in experts.expert_linears())
        floats, last_one = packs_floats(experts, gate, up, down), experts.shared if shared else None
        if self._packer is not None and (floats or not gate.is_float) and is_interleaved(experts, gate, up):
            gate_up: tuple[Stack, ...] = (
                self._stack(
                    experts.gate, experts.up, packs_floats=floats, last=last_one.linears()[:-1] if last_one else ()
                ),
            )
            biases: tuple[torch.Tensor | None, ...] = (self._biases(experts.gate, experts.up),)
        else:
            gate_up = self._stack(experts.gate), self._stack(experts.up)
            biases = self._biases(experts.gate), self._biases(experts.up)
        down_stack = self._stack(experts.down, packs_floats=floats, last=(last_one.down,) if last_one else ())
        return ExpertMatrices(gate_up, down_stack, biases, self._biases(experts.down))

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

    def _stack(self, *linears: ExpertLinear, packs_floats: bool = False, last: Sequence[Linear] = ()) -> Stack:
        """The matrices of one layout of all experts, as one stack; two are interleaved.

        Args:
            last: the matrices of one expert more.
        """
        layout = self._tensors.layout(linears[0].weight)
        parts = [self._sources(linear) for linear in linears]
        shared = [self._tensors.matrix(linear.weight) for linear in last]
        check_finite(source for part in (*parts, shared) for source in part)
        if layout.is_float and not (packs_floats and self._packer is not None):
            made: Stack = self._floats(parts[0], FLOAT_TYPES[layout.float_type or "f32"])
        elif self._packer is None:
            made = stack_plain([pack_plain(source, self._device) for source in parts[0]])
        else:
            made = self._packed(self._packer, linears, list(zip(*parts, strict=True)), shared)
        for source in (source for part in (*parts, shared) for source in part):
            source.release(0, source.out_features)
            self._progress(source.size_bytes)
        return made

    def _sources(self, linear: ExpertLinear) -> list[MatrixSource]:
        """One for all experts, if they lie one below the other in the file and end with a block; or one for each."""
        whole = self._tensors.stack(linear.weight) if linear.out_features % BLOCK == 0 else None
        if whole is not None:
            return [whole]
        return [self._tensors.expert(linear.weight, expert) for expert in range(linear.num_experts)]

    def _packed(
        self, packer: Packer, linears: Sequence[ExpertLinear], runs: Sequence[Sequence[MatrixSource]],
        last: Sequence[MatrixSource],
    ) -> PackedExperts:  # fmt: skip
        """Pack runs of experts, of each the sources that interleave; a run is one expert or all.

        Args:
            last: the sources of one expert behind them, or none.
        """
        routed, cols, out_features = (
            linears[0].num_experts,
            linears[0].in_features,
            sum(one.out_features for one in linears),
        )
        count, of_run = routed + bool(last), routed // len(runs)
        weight_format = fragment_format(runs[0][0].layout)
        stride, strips = weight_format.size_bytes(out_features, cols), -(-out_features // BLOCK)
        size = count * stride
        memory = torch.empty(aligned(size) + 4 * count * strips, dtype=torch.uint8, device=self._device)
        weights, block_scales = memory[:size], memory[aligned(size) :].view(torch.float32)
        table, interleaved = None, len(linears) == 2
        for index, run in enumerate((*runs, last) if last else runs):
            first = index * of_run  # all runs are as long but the last, which may be the one more
            end = count if index == len(runs) else first + of_run
            place = weights[first * stride : end * stride], block_scales[first * strips : end * strips]
            table = packer.pack(run, place, interleaved=interleaved).table
        return PackedExperts(
            count, out_features, cols, weight_format, weights, block_scales, table, interleaved, int(bool(last))
        )

    def _floats(self, sources: Sequence[MatrixSource], dtype: torch.dtype) -> torch.Tensor:
        """Float matrices one below the other, as they are stored: [experts * out_features, in_features]."""
        memory = torch.empty(sum(s.size_bytes for s in sources), dtype=torch.uint8, device=self._device)
        at = 0
        for source in sources:
            assert source.raw is not None  # float matrices have their bytes
            memory[at : at + source.size_bytes].copy_(torch.from_numpy(np.array(source.raw, copy=True).reshape(-1)))
            at += source.size_bytes
        return memory.view(dtype).view(-1, sources[0].in_features)
