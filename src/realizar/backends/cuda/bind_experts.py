"""A mixture of experts bound to kernels: from its router's scores to the outputs of the chosen experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton

from realizar.backends.cuda.bind_shared import SharedBinder
from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, activation_blocks
from realizar.backends.cuda.kernels.activate import activate
from realizar.backends.cuda.kernels.experts import choose_experts
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.experts import (
    FLOATS,
    ExpertMatmuls,
    ExpertsInput,
    ExpertsOutput,
    Pairs,
    gated_activation,
    input_format,
)
from realizar.backends.cuda.matmul.grouped_experts import GroupedExperts
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.routing import Router, RouterKernels
from realizar.backends.cuda.norms import Folded, ResidualAdd, Run
from realizar.backends.cuda.weights.experts import ExpertMatrices, PackedExperts, Stack, matrix_bytes
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import Inputs, Join
from realizar.models.parts import Norm
from realizar.models.spec import Experts
from realizar.models.tensor_source import TensorName

_GATE_COLUMNS = 512  # of a shared expert's gate, that are multiplied at once


@dataclass(frozen=True, slots=True)
class Added:
    """How a mixture's outputs are added to the stream.

    Attributes:
        output: says in which steps down does it.
        residual: the operands of its epilogue then.
    """

    output: ExpertsOutput
    residual: ResidualAdd


class ExpertsBinder:
    """Binds mixtures. A pair is a token and one expert that it goes through.

    Args:
        weights: with the matrices of mixtures.
        matmuls: of pairs, prepared.
        routers, grouped: the latter prepared; None where Triton's kernels run alone.
        shared: of the experts that every token goes through.
    """

    def __init__(
        self, weights: Weights, space: Workspace, matmuls: ExpertMatmuls, routers: RouterKernels | None,
        grouped: GroupedExperts | None, shared: SharedBinder,
    ) -> None:  # fmt: skip
        self._weights, self._matrices, self._space = weights, weights.experts, space
        self._matmuls, self._routers, self._grouped, self.shared = matmuls, routers, grouped, shared
        self._inputs: dict[TensorName, ExpertsInput] = {}
        self._none = torch.zeros(1, device=space.hidden.device)

    def input(self, inputs: Inputs, experts: Experts) -> ExpertsInput:
        """The consumer of the norm before a mixture."""
        if experts.up.weight not in self._inputs:
            matrices = self._matrices[experts.up.weight]
            router, apart = self._router(inputs.norm, experts), experts.norms is not None
            at_once, grouped = matrices.ends_with_activation, self._grouped
            pairs = tuple(dict.fromkeys(map(input_format, matrices.gate_up)))
            self._inputs[experts.up.weight] = ExpertsInput(
                pairs, grouped.input_format if grouped is not None and at_once else None,
                self._matmuls.pair_tokens(experts, matrices), router, not apart and at_once and router is not None,
                None if apart else self.shared.first(experts), apart,
            )  # fmt: skip
        return self._inputs[experts.up.weight]

    def output(self, experts: Experts, join: Join | None = None) -> ExpertsOutput:
        """Where a mixture's outputs are, for the norm that adds them to the stream.

        Args:
            join: how they are added; None where something else reads them.
        """
        directly = join is not None and join.norm is None and join.output_scale is None
        matrices = self._matrices[experts.up.weight]
        most = self._matmuls.residual_tokens(experts, matrices) if directly else 0
        return ExpertsOutput(matrices.per_token(experts), experts.down.out_features, most)

    def bind(
        self, experts: Experts, norm: Norm | None, consumer: ExpertsInput, router: MergedLinear, score: Run,
        folded: Folded | None, added: Added,
    ) -> Iterator[Launch]:  # fmt: skip
        """The launches after the norm.

        Args:
            consumer: from `input`. router, score: its matmul, and the start of it, for steps of many tokens.
            folded: the scale of the norm that is still missing.
            added: how the outputs are added to the stream.
        """
        yield from self.shared.bind_first(experts, folded)
        yield from self.bind_choice(experts, consumer, router, score)
        yield from self.bind_matmuls(experts, consumer, folded, added)
        yield from self.shared.bind_last(experts, norm)

    def bind_choice(
        self, experts: Experts, consumer: ExpertsInput, router: MergedLinear, score: Run
    ) -> Iterator[Launch]:
        """The launches of the router; see `bind`."""
        yield Launch("router", self._route(consumer, score), router.weight_bytes)
        yield Launch("choice of experts", self._choose(experts, consumer, router))

    def bind_matmuls(
        self, experts: Experts, consumer: ExpertsInput, folded: Folded | None, added: Added | None
    ) -> Iterator[Launch]:
        """The launches of the chosen experts, whose outputs then lie at the beginning of the partial sums.

        Args:
            added: how they are added to the stream; in some steps that is done then. None where something else reads
                them.
        """
        matrices = self._matrices[experts.up.weight]
        pairs = Pairs(self._space.chosen, self._space.expert_weights, matrices.per_token(experts))
        if matrices.ends_with_activation:
            run = self._activate_at_once(experts, matrices, pairs, consumer, folded)
            yield self._launch("expert gate and up", run, matrices.gate_up[0], experts)
        else:
            for part, stack in enumerate(matrices.gate_up):
                run = self._gate_or_up(experts, matrices, pairs, consumer, part)
                yield self._launch("expert gate and up", run, stack, experts)
            yield Launch("expert activation", self._activate(experts, matrices))
        yield self._launch("expert down", self._down(experts, matrices, pairs, consumer, added), matrices.down, experts)

    def _router(self, norm: Norm | None, experts: Experts) -> Router | None:
        """The router of few tokens, where its kernel runs."""
        if self._routers is None or norm is None or not self._routers.runs(experts, norm):
            return None
        (weights,) = self._weights.groups[(experts.router.weight,)]
        assert isinstance(weights, torch.Tensor)
        bias, selection, scales = (
            None if name is None else self._weights.vector(name)
            for name in (experts.router.bias, experts.selection_bias, experts.expert_scales)
        )
        shared = self._shared(experts)
        if shared == 2:
            weights, bias = self._with_gate(experts, weights, bias)
        weights = weights * self._weights.norm_weight(norm)
        router = Router(weights, bias, experts, float(norm.eps), selection, scales, shared=shared)
        router = replace(router, columns=self._routers.columns(router.key, router.weights))
        self._routers.prepare([router])
        return router

    def _shared(self, experts: Experts) -> int:
        """Whether a token's last expert is the shared one, as in `ChoiceShape`."""
        return self._matrices[experts.up.weight].shared * (1 if experts.shared_gate is None else 2)

    def _with_gate(
        self, experts: Experts, weights: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The router's weights and biases, and those of the shared expert's gate behind them."""
        assert experts.shared_gate is not None
        row, own = self.shared.gate(experts.shared_gate)
        if bias is not None or own is not None:
            bias = weights.new_zeros(experts.num_experts) if bias is None else bias
            bias = torch.cat([bias, weights.new_zeros(1) if own is None else own])
        return torch.cat([weights, row]), bias

    def _route(self, consumer: ExpertsInput, score: Run) -> Run:
        """Scores: with few tokens, choices too."""
        space, router = self._space, consumer.router

        def run(kind: StepKind) -> None:
            if router is None or self._routers is None or not consumer.is_routed(kind):
                score(kind)
                return
            scores = space.partials(1, kind.tokens, len(router.weights))
            self._routers.launch(
                router, space.hidden, space.arrays["header"], scores, space.chosen, space.expert_weights, kind.tokens
            )

        return run

    def _launch(self, name: str, run: Run, stack: Stack, experts: Experts) -> Launch:
        """A launch that reads at most `per_token` experts for each token."""
        matrices = self._matrices[experts.up.weight]
        return Launch(
            name, run, matrix_bytes(stack), share_of_token=matrices.per_token(experts) / matrices.count(experts)
        )

    def _choose(self, experts: Experts, consumer: ExpertsInput, router: MergedLinear) -> Run:
        space, count, per_token = self._space, experts.num_experts, experts.experts_per_token
        biased, selects = router.bias is not None, experts.selection_bias
        bias = self._none if router.bias is None else router.bias
        selection = self._none if selects is None else self._weights.vector(selects)
        scales = self._none if experts.expert_scales is None else self._weights.vector(experts.expert_scales)
        shared, width = self._shared(experts), experts.up.in_features
        slots, gate, gate_bias = self._matrices[experts.up.weight].per_token(experts), self._none, None
        if shared == 2 and experts.shared_gate is not None:
            gate, gate_bias = self.shared.gate(experts.shared_gate)

        def run(kind: StepKind) -> None:
            if consumer.is_routed(kind):
                return
            scores = space.partials(router.splits(kind), kind.tokens, router.width)
            choose_experts[(kind.tokens,)](
                scores, scores.stride(1), bias, selection, scales, space.arrays["header"], space.chosen,
                space.expert_weights, float(experts.scale), count,
                space.activations.normed(FLOATS, width).values if shared == 2 else self._none, gate,
                self._none if gate_bias is None else gate_bias, width, PER_TOKEN=per_token, SHARED=shared,
                GATE_BIAS=gate_bias is not None, COLUMNS=_GATE_COLUMNS, GROUPS=experts.num_groups,
                GROUPS_PER_TOKEN=experts.groups_per_token, BIAS=biased,
                SIGMOID=experts.scoring == "sigmoid", SELECTION=selects is not None,
                SCALED=experts.expert_scales is not None, NORMALIZED=experts.normalized,
                SLOTS=triton.next_power_of_2(slots), BLOCK=triton.next_power_of_2(count), num_warps=1,
                **space.launching(kind),
            )  # fmt: skip

        return run

    def _activate_at_once(
        self, experts: Experts, matrices: ExpertMatrices, pairs: Pairs, consumer: ExpertsInput, folded: Folded | None
    ) -> Run:
        (stack,), (bias,) = matrices.gate_up, matrices.gate_up_biases
        assert isinstance(stack, PackedExperts)
        inputs = self._inputs_of(consumer)

        def run(kind: StepKind) -> None:
            if self._grouped is not None and consumer.is_grouped(kind):
                source = inputs(self._grouped.input_format(kind.tokens), stack.in_features)
                self._grouped.launch_gate_up(experts, matrices, source, pairs, kind.tokens)
                return
            source = inputs(input_format(stack), stack.in_features)
            target = self._activated(experts)
            norm = folded(kind) if folded else None
            activation = gated_activation(experts)
            self._matmuls.activate(stack, bias, activation, source, pairs, target, kind.tokens, norm)

        return run

    def _inputs_of(self, consumer: ExpertsInput) -> Callable[[InputFormat, int], ActivationBuffer]:
        """The buffers, by format and columns, of the norm that experts read."""
        return self._space.activations.beside if consumer.apart else self._space.activations.normed

    def _gate_or_up(
        self, experts: Experts, matrices: ExpertMatrices, pairs: Pairs, consumer: ExpertsInput, part: int
    ) -> Run:
        """Sums of gate, of up, or of both interleaved, one stack after the other in the memory of partial sums."""
        inputs, space, parts = self._inputs_of(consumer), self._space, len(matrices.gate_up)
        width, stack, bias = 2 * experts.up.out_features // parts, matrices.gate_up[part], matrices.gate_up_biases[part]

        def run(kind: StepKind) -> None:
            source = inputs(input_format(stack), experts.up.in_features)
            out = space.partials(parts, kind.tokens * pairs.per_token, width)[part]
            self._matmuls.multiply(stack, bias, source, pairs, out, kind.tokens)

        return run

    def _activate(self, experts: Experts, matrices: ExpertMatrices) -> Run:
        space, width = self._space, experts.up.out_features
        interleaved = len(matrices.gate_up) == 1
        stride = 2 * width if interleaved else width

        def run(kind: StepKind) -> None:
            pairs = kind.tokens * experts.experts_per_token  # of stacks without a shared expert
            target, cut = self._activated(experts), activation_blocks(width, kind.tokens)
            activate[(pairs, cut.blocks)](
                space.partial_sums, 0, stride, self._none, 64 if interleaved else pairs * width, width,
                *target.pointers(), *space.token_state, SPLITS=1, BIAS=False,
                KIND=ACTIVATIONS[gated_activation(experts)], GATED=True, INTERLEAVED=interleaved, BLOCK=cut.block,
                num_warps=cut.warps, **target.constants(), **space.launching(kind),
            )  # fmt: skip

        return run

    def _down(
        self, experts: Experts, matrices: ExpertMatrices, pairs: Pairs, consumer: ExpertsInput, added: Added | None
    ) -> Run:  # fmt: skip
        space, stack, bias = self._space, matrices.down, matrices.down_bias

        def run(kind: StepKind) -> None:
            if added is not None and added.output.adds_residual(kind):
                assert isinstance(stack, PackedExperts)
                residual = added.residual(kind)
                self._matmuls.add(stack, bias, self._activated(experts), pairs, residual, kind.tokens)
                return
            out = space.partials(1, kind.tokens * pairs.per_token, experts.down.out_features)[0]
            if self._grouped is not None and consumer.is_grouped(kind):
                self._grouped.launch_down(experts, matrices, pairs, out, kind.tokens)
                return
            source = self._activated(experts)
            self._matmuls.multiply(stack, bias, source, pairs, out, kind.tokens, of_pairs=True)

        return run

    def _activated(self, experts: Experts) -> ActivationBuffer:
        """The input of the last matrix, a row for each pair of the largest step that multiplies pairs."""
        matrices, tokens = self._matrices[experts.up.weight], self._space.arrays.sizes.tokens
        if self._grouped is not None and matrices.ends_with_activation:
            tokens = min(tokens, self._matmuls.pair_tokens(experts, matrices))
        pairs = tokens * matrices.per_token(experts)
        return self._space.activations.get(input_format(matrices.down), experts.down.in_features, pairs)
