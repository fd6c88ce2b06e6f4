"""A mixture of experts bound to kernels: from its router's scores to the outputs of the chosen experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton

from realizar.backends.cuda.kernel_sizes import activation_blocks
from realizar.backends.cuda.kernels.activate import activate
from realizar.backends.cuda.kernels.experts import choose_experts
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.matmul.experts import (
    FLOATS,
    ExpertMatmuls,
    ExpertsInput,
    ExpertsOutput,
    Pairs,
    input_format,
)
from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.weights.experts import ExpertMatrices, PackedExperts, Stack, stack_bytes
from realizar.backends.cuda.workspace import Workspace
from realizar.models.spec import Activation, Experts

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
Run = Callable[[StepShape], None]


class ExpertsBinder:
    """Binds mixtures. A pair is a token and one expert that it goes through.

    Args:
        matrices: of mixtures, by the name of their gate.
        hidden_size: of the residual stream.
    """

    def __init__(
        self, matrices: dict[str, ExpertMatrices], space: Workspace, matmuls: ExpertMatmuls, hidden_size: int
    ) -> None:
        self._matrices, self._space, self._matmuls, self._hidden_size = matrices, space, matmuls, hidden_size
        self._none = torch.zeros(1, device=space.hidden.device)

    def input(self, experts: Experts) -> ExpertsInput:
        """The consumer of the norm before a mixture."""
        gate_up = self._matrices[experts.gate.weight].gate_up
        return ExpertsInput(tuple(dict.fromkeys((FLOATS, *map(input_format, gate_up)))))

    def output(self, experts: Experts) -> ExpertsOutput:
        """Where a mixture's outputs are, for the norm that adds them to the stream."""
        return ExpertsOutput(experts.experts_per_token, self._hidden_size)

    def bind(self, experts: Experts, router: MergedLinear) -> Iterator[Launch]:
        """The launches from scores on, which lie where the router's matmul leaves its sums."""
        matrices, matmuls = self._matrices[experts.gate.weight], self._matmuls
        pairs = Pairs(self._space.chosen, self._space.expert_weights, experts.experts_per_token)
        yield Launch("choice of experts", self._choose(experts, router))
        if matmuls.ends_with_activation(matrices):
            run = self._activate_at_once(experts, matrices, pairs)
            yield self._launch("expert gate and up", run, matrices.gate_up[0], experts)
        else:
            for part, stack in enumerate(matrices.gate_up):
                run = self._gate_or_up(experts, stack, pairs, part, len(matrices.gate_up))
                yield self._launch("expert gate and up", run, stack, experts)
            yield Launch("expert activation", self._activate(experts, matrices))
        yield self._launch("expert down", self._down(experts, matrices.down, pairs), matrices.down, experts)

    def _launch(self, name: str, run: Run, stack: Stack, experts: Experts) -> Launch:
        """A launch that reads at most `per_token` experts for each token."""
        return Launch(name, run, stack_bytes(stack), share_of_token=experts.experts_per_token / experts.num_experts)

    def _choose(self, experts: Experts, router: MergedLinear) -> Run:
        space, count, per_token = self._space, experts.num_experts, experts.experts_per_token

        def run(shape: StepShape) -> None:
            scores = space.partials(router.splits(shape.tokens), shape.tokens, router.width)
            choose_experts[(shape.tokens,)](
                scores, scores.stride(1), space.arrays["header"], space.chosen, space.expert_weights,
                float(experts.scale), count, PER_TOKEN=per_token, NORMALIZED=experts.normalized,
                SLOTS=triton.next_power_of_2(per_token), BLOCK=triton.next_power_of_2(count), num_warps=1,
                **space.launching(shape.tokens),
            )  # fmt: skip

        return run

    def _activate_at_once(self, experts: Experts, matrices: ExpertMatrices, pairs: Pairs) -> Run:
        buffers, (stack,) = self._space.activations, matrices.gate_up
        assert isinstance(stack, PackedExperts)

        def run(shape: StepShape) -> None:
            source = buffers.normed(input_format(stack), stack.in_features)
            target = self._activated(experts, matrices.down)
            self._matmuls.activate(stack, experts.activation, source, pairs, target, shape.tokens)

        return run

    def _gate_or_up(self, experts: Experts, stack: Stack, pairs: Pairs, part: int, parts: int) -> Run:
        """Sums of gate, of up, or of both interleaved, one stack after the other in the memory of partial sums."""
        space, width = self._space, 2 * experts.up.out_features // parts

        def run(shape: StepShape) -> None:
            source = space.activations.normed(input_format(stack), experts.up.in_features)
            out = space.partials(parts, shape.tokens * pairs.per_token, width)[part]
            self._matmuls.multiply(stack, source, pairs, out, shape.tokens)

        return run

    def _activate(self, experts: Experts, matrices: ExpertMatrices) -> Run:
        space, width = self._space, experts.up.out_features
        interleaved = len(matrices.gate_up) == 1
        stride = 2 * width if interleaved else width

        def run(shape: StepShape) -> None:
            pairs = shape.tokens * experts.experts_per_token
            target, cut = self._activated(experts, matrices.down), activation_blocks(width, shape.tokens)
            activate[(pairs, cut.blocks)](
                space.partial_sums, 0, stride, self._none, 64 if interleaved else pairs * width, width,
                *target.pointers(), *space.token_state, SPLITS=1, BIAS=False, KIND=ACTIVATIONS[experts.activation],
                GATED=True, INTERLEAVED=interleaved, BLOCK=cut.block, num_warps=cut.warps, **target.constants(),
                **space.launching(shape.tokens),
            )  # fmt: skip

        return run

    def _down(self, experts: Experts, stack: Stack, pairs: Pairs) -> Run:
        space = self._space

        def run(shape: StepShape) -> None:
            out = space.partials(1, shape.tokens * pairs.per_token, self._hidden_size)[0]
            source = self._activated(experts, stack)
            self._matmuls.multiply(stack, source, pairs, out, shape.tokens, of_pairs=True)

        return run

    def _activated(self, experts: Experts, down: Stack) -> ActivationBuffer:
        """The input of the last matrix, a row for each pair of the largest step."""
        pairs = self._space.arrays.sizes.tokens * experts.experts_per_token
        return self._space.activations.get(input_format(down), experts.down.in_features, pairs)
