"""A mixture's grouped matmuls, for steps in which several tokens go to one expert: kernels, buffers and launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from realizar.backends.cuda.matmul.expert_lines import ExpertShape
from realizar.backends.cuda.matmul.experts import ExpertMatmuls, Pairs, gated_activation
from realizar.backends.cuda.matmul.grouped import GroupedBuffers, GroupedConfig, GroupedMatmuls
from realizar.backends.cuda.matmul.grouped_tiles import StepTiles
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.quantized import HalfActivations, MatmulKernels
from realizar.backends.cuda.weights.experts import ExpertMatrices, PackedExperts, Stack
from realizar.models.spec import Experts
from realizar.models.tensor_source import TensorName

_Key = tuple[int, ExpertShape, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A mixture's tiles and kernels in steps of one number of tokens."""

    step: StepTiles
    gate_up: GroupedConfig
    down: GroupedConfig


class GroupedExperts:
    """Grouped matmuls of all mixtures of a model.

    Args:
        matmuls: of dense matrices, on the same device.
        pairs: says which mixtures have grouped matmuls, and from which number of tokens on.
        rows: of the largest step.
    """

    def __init__(self, matmuls: MatmulKernels, pairs: ExpertMatmuls, rows: int) -> None:
        self._matmuls, self._pairs, self._rows = matmuls, pairs, rows
        self._grouped = GroupedMatmuls(matmuls, pairs.experts_read)
        self._buffers: dict[_Key, GroupedBuffers] = {}
        self._plans: dict[tuple[TensorName, int], _Plan] = {}

    def input_format(self, tokens: int) -> InputFormat:
        """The format of the tokens that gate and up read."""
        return InputFormat("half", self._matmuls.tuning.block_tokens(tokens))

    def prepare(self, mixtures: Iterable[tuple[Experts, ExpertMatrices]], counts: Iterable[int]) -> None:
        """Compile and load kernels for these numbers of tokens, and allocate what they leave for each other.

        Raises:
            KernelError: one does not compile or does not fit the device.
        """
        sizes = sorted(counts)
        for experts, matrices in mixtures:
            if not matrices.ends_with_activation:
                continue
            self._buffers_of(experts, matrices)
            least = self._pairs.pair_tokens(experts, matrices)
            plans = [self._plan(experts, matrices, tokens) for tokens in sizes if tokens > least]
            wanted = {config for plan in plans for config in (plan.gate_up, plan.down)}
            self._grouped.prepare(wanted, matrices.count(experts))

    def launch_gate_up(
        self, experts: Experts, matrices: ExpertMatrices, source: ActivationBuffer, pairs: Pairs, tokens: int
    ) -> None:
        """Sort the pairs of `tokens` tokens by expert, and start gate and up, with the activation."""
        plan, buffers = self._plan(experts, matrices, tokens), self._buffers_of(experts, matrices)
        self._grouped.sort(pairs.chosen, plan.step, matrices.count(experts), buffers)
        x = HalfActivations(source.values, source.scales)
        (stack,), (bias,) = matrices.gate_up, matrices.gate_up_biases
        self._grouped.launch_gated(_packed(stack), x, pairs.per_token, plan.step, buffers, plan.gate_up, bias)

    def launch_down(
        self, experts: Experts, matrices: ExpertMatrices, pairs: Pairs, out: torch.Tensor, tokens: int
    ) -> None:
        """Start out [pairs, out_features] = weights of the pairs times down, of what gate and up left."""
        plan, buffers = self._plan(experts, matrices, tokens), self._buffers_of(experts, matrices)
        self._grouped.launch_pairs(
            _packed(matrices.down), None, 1, plan.step, buffers, plan.down, out, pairs.weights, matrices.down_bias
        )

    def _plan(self, experts: Experts, matrices: ExpertMatrices, tokens: int) -> _Plan:
        """Tiles and kernels of a step, made once: steps without a graph ask for them layer by layer."""
        key = experts.up.weight, tokens
        if key not in self._plans:
            step = self._grouped.step(tokens, experts.experts_per_token, ExpertShape.of(experts), matrices.shared)
            gate_up = self._grouped.route(step, _packed(matrices.gate_up[0]), gated_activation(experts))
            down = self._grouped.route(step, _packed(matrices.down), tiled=True)
            self._plans[key] = _Plan(step, gate_up, down)
        return self._plans[key]

    def _buffers_of(self, experts: Experts, matrices: ExpertMatrices) -> GroupedBuffers:
        """The buffers that layers of one shape share."""
        per_token, shape, shared = key = experts.experts_per_token, ExpertShape.of(experts), matrices.shared
        if key not in self._buffers:
            wgmma = self._matmuls.tuning.wgmma
            self._buffers[key] = GroupedBuffers(
                self._matmuls.device, self._rows, per_token, shape, wgmma, self._grouped.lines, shared
            )
        return self._buffers[key]


def _packed(stack: Stack) -> PackedExperts:
    assert isinstance(stack, PackedExperts)
    return stack
