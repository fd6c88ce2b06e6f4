"""A mixture of experts bound to kernels: its router, the experts of each token, and what every token goes through.

What every token goes through is a dense feed-forward: a shared expert, whose output joins that of a token's last
expert, or, where the mixture has norms of its own, a feed-forward parallel to the experts, which the norm after them
adds. Its activations are made before the experts, whose matmuls take the memory of partial sums from its beginning;
its last matmul comes after them and takes it from behind their outputs. A shared expert that is the last of the
experts' stacks has no launches of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from realizar.backends.cuda.bind_dense import DenseBinder
from realizar.backends.cuda.kernel_sizes import whole_width
from realizar.backends.cuda.kernels.experts import choose_experts
from realizar.backends.cuda.kernels.shared_expert import add_shared
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
from realizar.backends.cuda.matmul.grouped import GroupedExperts
from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.matmul.linears import Buffers, MergedLinear, Merger, partial_floats
from realizar.backends.cuda.matmul.routing import Router, RouterKernels
from realizar.backends.cuda.norms import (
    Branch,
    Consumer,
    Folded,
    NormBinder,
    ParallelOutput,
    ResidualAdd,
    Run,
    norm_constants,
)
from realizar.backends.cuda.weights.experts import ExpertMatrices, PackedExperts, Stack, matrix_bytes
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.parts import SHARED_PART
from realizar.backends.program import ExpertsBlock, Inputs, Join
from realizar.models.parts import Linear, Norm
from realizar.models.spec import Experts, ModelSpec
from realizar.models.tensor_source import TensorName

_GATE_COLUMNS = 512  # of a shared expert's gate, that are multiplied at once


def shared_floats(spec: ModelSpec, weights: Weights, merger: Merger, token_counts: Collection[int]) -> int:
    """float32 of the largest partial sums, or outputs of shared experts, behind those of the pairs that are chosen."""
    downs = [one.shared.down for _, one in spec.mixtures() if one.shared is not None]
    stacked = [down.out_features * max(token_counts) for down in downs if down.weight in weights.stacked]
    apart = [merger.merge((down,)) for down in downs if down.weight not in weights.stacked]
    return max([*stacked, partial_floats(apart, token_counts) if apart else 0])


@dataclass(frozen=True, slots=True)
class _Mixture:
    """A mixture, and what its launches share; a pair is a token and one expert that it goes through.

    `dense` has the first and the last matmul of the feed-forward that every token goes through; None where there is
    none, or where it lies in the stacks.
    """

    matrices: ExpertMatrices
    router: MergedLinear
    pairs: Pairs
    dense: tuple[MergedLinear, MergedLinear] | None
    input: ExpertsInput

    @property
    def experts(self) -> Experts:
        return self.matrices.experts


class MixtureBinder:
    """Binds mixtures; `matmuls` and `grouped` are prepared, the latter None where Triton's kernels run alone.

    `norms` is the binder of all other norms of the program, in whose order a mixture's are.
    """

    def __init__(
        self, weights: Weights, space: Workspace, merger: Merger, matmuls: ExpertMatmuls, routers: RouterKernels | None,
        grouped: GroupedExperts | None, norms: NormBinder, dense: DenseBinder,
    ) -> None:  # fmt: skip
        self._weights, self._space, self._merger, self._norms, self._dense = weights, space, merger, norms, dense
        self._matmuls, self._routers, self._grouped = matmuls, routers, grouped
        self._mixtures: dict[TensorName, _Mixture] = {}
        self._none = torch.zeros(1, device=space.hidden.device)

    def input(self, inputs: Inputs, experts: Experts) -> ExpertsInput:
        return self._mixture(inputs, experts).input

    def branch(self, block: ExpertsBlock) -> Branch:
        """Where a mixture's outputs are, for the norm that adds them to the stream."""
        one, norms = self._mixture(block.inputs, block.experts), block.experts.norms
        if norms is None:
            return Branch(self._output(one, block.join), block.join)
        assert one.dense is not None
        output = ParallelOutput(self._output(one, None), one.dense[1], partial(self._dense_sums, one), norms)
        return Branch(output, block.join)

    def bind(self, block: ExpertsBlock, before: Branch | None, following: Consumer | None) -> Iterator[Launch]:
        """The first launch adds `before` to the stream; `following` reads the stream after the block."""
        one, norms, folded, added = self._mixture(block.inputs, block.experts), block.experts.norms, None, None
        source = self._space.activations.normed
        if norms is None:
            normalize, folded = self._norms.bind(before, block.inputs.norm, one.input)
            added = self._norms.bind_residual_add(self.branch(block), following)
        else:
            assert one.dense is not None
            normalize = self._norms.bind_two(before, (norms.shared, one.dense[0]), (norms.experts, one.input))
        yield Launch("norm", normalize)
        yield from self._bind_dense(one, folded)
        if norms is not None:
            normalize = self._norms.bind(None, norms.router, one.router)[0]
            yield Launch("norm", partial(self._unless_routed, one, normalize))
        score = self._dense.project(one.router, source)
        yield Launch("router", partial(self._route, one, score), one.router.weight_bytes)
        yield Launch("choice of experts", self._choose(one))
        yield from self._bind_experts(one, folded, self._output(one, block.join if norms is None else None), added)
        if one.dense is not None:
            last, shared = one.dense[1], self._space.activations.shared
            project = self._dense.project(last, shared, sums=partial(self._dense_sums, one))
            yield Launch(SHARED_PART, project, last.weight_bytes)
            if norms is None:
                yield Launch(SHARED_PART, self._add(one, last, block.inputs.norm))

    def _mixture(self, inputs: Inputs, experts: Experts) -> _Mixture:
        if experts.up.weight not in self._mixtures:
            matrices, shared = self._weights.experts[experts.up.weight], experts.shared
            dense, apart = None, experts.norms is not None
            if shared is not None and shared.up.weight not in self._weights.stacked:
                dense = self._merger.merge(shared.linears()[:-1]), self._merger.merge((shared.down,))
            at_once, grouped, router = matrices.ends_with_activation, self._grouped, self._router(inputs.norm, experts)
            read = ExpertsInput(
                tuple(dict.fromkeys(map(input_format, matrices.gate_up))),
                partial(grouped.input_format, matrices) if grouped is not None and at_once else None,
                self._matmuls.pair_tokens(matrices), router, not apart and at_once and router is not None,
                None if apart or dense is None else dense[0], apart,
            )  # fmt: skip
            pairs = Pairs(self._space.chosen, self._space.expert_weights, matrices.per_token)
            merged = self._merger.merge(inputs.linears)
            self._mixtures[experts.up.weight] = _Mixture(matrices, merged, pairs, dense, read)
        return self._mixtures[experts.up.weight]

    def _output(self, one: _Mixture, join: Join | None) -> ExpertsOutput:
        """The experts' outputs; `join`: how they are added to the stream, None where something else reads them."""
        directly = join is not None and join.norm is None and join.output_scale is None and not join.reduce
        most = self._matmuls.residual_tokens(one.matrices) if directly else 0
        halves = None
        if self._grouped is not None and one.input.grouped is not None:
            halves = partial(self._grouped.writes_halves, one.matrices)
        return ExpertsOutput(one.pairs.per_token, one.experts.down.out_features, most, halves)

    def _bind_dense(self, one: _Mixture, folded: Folded | None) -> Iterator[Launch]:
        """The launches of the dense feed-forward before the experts; `folded`: the norm scale that is still missing."""
        if one.dense is None or one.experts.shared is None:
            return
        (first, last), buffers = one.dense, self._space.activations
        project = self._dense.project(first, buffers.normed, folded=folded, consumer=last, target=buffers.shared)
        yield Launch(SHARED_PART, project, first.weight_bytes)
        yield Launch(SHARED_PART, self._dense.activate(one.experts.shared, first, last, buffers.shared))

    def _bind_experts(
        self, one: _Mixture, folded: Folded | None, output: ExpertsOutput, added: ResidualAdd | None
    ) -> Iterator[Launch]:
        """The launches of the chosen experts, whose outputs then lie at the beginning of the partial sums.

        `folded` is the scale of the norm that is still missing. `output` says in which steps down adds to the stream,
        with the operands `added`.
        """
        if one.matrices.ends_with_activation:
            run = partial(self._activate_at_once, one, folded)
            yield self._launch("expert gate and up", run, one.matrices.gate_up[0], one)
        else:
            for part, stack in enumerate(one.matrices.gate_up):
                yield self._launch("expert gate and up", partial(self._gate_or_up, one, part), stack, one)
            yield Launch("expert activation", partial(self._activate, one))
        yield self._launch("expert down", partial(self._down, one, output, added), one.matrices.down, one)

    def _unless_routed(self, one: _Mixture, normalize: Run, kind: StepKind) -> None:
        """The norm that the router's matmul reads where it does not read the stream."""
        if not one.input.reads_stream(kind):
            normalize(kind)

    def _router(self, norm: Norm | None, experts: Experts) -> Router | None:
        if self._routers is None or norm is None or not self._routers.runs(experts, norm):
            return None
        (weights,) = self._weights.groups[(experts.router.weight,)]
        assert isinstance(weights, torch.Tensor)
        bias, selection, scales = (
            None if name is None else self._weights.vector(name)
            for name in (experts.router.bias, experts.selection_bias, experts.expert_scales)
        )
        shared = self._weights.experts[experts.up.weight].shared_choice
        if shared == 2:
            weights, bias = self._with_gate(experts, weights, bias)
        weights = weights * self._weights.norm_weight(norm)
        halves = self._routers.halves(experts, weights)
        router = Router(weights, bias, experts, float(norm.eps), selection, scales, shared=shared, halves=halves)
        router = replace(router, columns=self._routers.columns(router.key, router.weights))
        self._routers.prepare([router])
        return router

    def _with_gate(
        self, experts: Experts, weights: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert experts.shared_gate is not None
        row, own = self._gate(experts.shared_gate)
        if bias is not None or own is not None:
            bias = weights.new_zeros(experts.num_experts) if bias is None else bias
            bias = torch.cat([bias, weights.new_zeros(1) if own is None else own])
        return torch.cat([weights, row]), bias

    def _gate(self, gate: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights of a shared expert's gate, float32 [1, width], and its bias, [1] or None."""
        (matrix,) = self._weights.groups[(gate.weight,)]
        assert isinstance(matrix, torch.Tensor)
        return matrix, self._merger.merge((gate,)).bias

    def _route(self, one: _Mixture, score: Run, kind: StepKind) -> None:
        space, router = self._space, one.input.router
        if router is None or self._routers is None or not one.input.reads_stream(kind):
            score(kind)
            return
        if not one.input.is_routed(kind):
            (scores,) = space.partials(1, kind.tokens, router.experts.num_experts)
            self._routers.score(router, space.hidden[: kind.tokens], scores)
            return
        scores = space.partials(1, kind.tokens, len(router.weights))
        self._routers.launch(
            router, space.hidden, space.arrays["header"], scores, space.chosen, space.expert_weights, kind.tokens
        )

    def _launch(self, name: str, run: Run, stack: Stack, one: _Mixture) -> Launch:
        share = one.pairs.per_token / one.matrices.count
        return Launch(name, run, matrix_bytes(stack), share_of_token=share)

    def _choose(self, one: _Mixture) -> Run:
        experts, router, shared = one.experts, one.router, one.matrices.shared_choice
        space, count, per_token = self._space, experts.num_experts, experts.experts_per_token
        biased, selects = router.bias is not None, experts.selection_bias
        bias = self._none if router.bias is None else router.bias
        selection = self._none if selects is None else self._weights.vector(selects)
        scales = self._none if experts.expert_scales is None else self._weights.vector(experts.expert_scales)
        width, slots, gate, gate_bias = experts.up.in_features, one.pairs.per_token, self._none, None
        if shared == 2 and experts.shared_gate is not None:
            gate, gate_bias = self._gate(experts.shared_gate)

        def run(kind: StepKind) -> None:
            if one.input.is_routed(kind):
                return
            scores = space.partials(router.splits(kind), kind.tokens, router.width)
            x, eps, row, streams = self._none, 0.0, gate, one.input.reads_stream(kind)
            if shared == 2 and streams and one.input.router is not None:
                x, eps, row = space.hidden, one.input.router.eps, one.input.router.weights[count:]
            elif shared == 2:
                x = space.activations.normed(FLOATS, width).values
            choose_experts[(kind.tokens,)](
                scores, scores.stride(1), bias, selection, scales, space.arrays["header"], space.chosen,
                space.expert_weights, float(experts.scale), count,
                x, eps, row, self._none if gate_bias is None else gate_bias, width, PER_TOKEN=per_token, SHARED=shared,
                STREAM=streams,
                GATE_BIAS=gate_bias is not None, COLUMNS=_GATE_COLUMNS, GROUPS=experts.num_groups,
                GROUPS_PER_TOKEN=experts.groups_per_token, BIAS=biased,
                SIGMOID=experts.scoring == "sigmoid", SELECTION=selects is not None,
                SCALED=experts.expert_scales is not None, NORMALIZED=experts.normalized,
                SLOTS=triton.next_power_of_2(slots), BLOCK=triton.next_power_of_2(count), num_warps=1,
                **space.launching(kind),
            )  # fmt: skip

        return run

    def _activate_at_once(self, one: _Mixture, folded: Folded | None, kind: StepKind) -> None:
        (stack,), (bias,), inputs = one.matrices.gate_up, one.matrices.gate_up_biases, self._inputs_of(one)
        assert isinstance(stack, PackedExperts)
        if self._grouped is not None and one.input.is_grouped(kind):
            source = inputs(self._grouped.input_format(one.matrices, kind.tokens), stack.in_features)
            self._grouped.launch_gate_up(one.matrices, source, one.pairs, kind.tokens)
            return
        source, target = inputs(input_format(stack), stack.in_features), self._activated(one)
        norm, activation = folded(kind) if folded else None, gated_activation(one.experts)
        self._matmuls.activate(stack, bias, activation, source, one.pairs, target, kind.tokens, norm)

    def _inputs_of(self, one: _Mixture) -> Buffers:
        return self._space.activations.parallel if one.input.apart else self._space.activations.normed

    def _gate_or_up(self, one: _Mixture, part: int, kind: StepKind) -> None:
        """Sums of gate, of up, or of both interleaved, one stack after the other in the memory of partial sums."""
        up, stacks, bias = one.experts.up, one.matrices.gate_up, one.matrices.gate_up_biases[part]
        source = self._inputs_of(one)(input_format(stacks[part]), up.in_features)
        pairs, width = kind.tokens * one.pairs.per_token, 2 * up.out_features // len(stacks)
        out = self._space.partials(len(stacks), pairs, width)[part]
        self._matmuls.multiply(stacks[part], bias, source, one.pairs, out, kind.tokens)

    def _activate(self, one: _Mixture, kind: StepKind) -> None:
        width, interleaved = one.experts.up.out_features, len(one.matrices.gate_up) == 1
        strides, activation = (0, 2 * width if interleaved else width), gated_activation(one.experts)
        pairs = kind.tokens * one.experts.experts_per_token  # of stacks without a shared expert
        up_at = 64 if interleaved else pairs * width
        self._dense.start_activation(
            kind, pairs, self._space.partial_sums, strides, up_at, width, self._activated(one), activation, gated=True,
            interleaved=interleaved,
        )  # fmt: skip

    def _down(self, one: _Mixture, output: ExpertsOutput, added: ResidualAdd | None, kind: StepKind) -> None:
        stack, bias = one.matrices.down, one.matrices.down_bias
        if added is not None and output.adds_residual(kind):
            assert isinstance(stack, PackedExperts)
            self._matmuls.add(stack, bias, self._activated(one), one.pairs, added(kind), kind.tokens)
            return
        out = output.rows(self._space.partial_sums, kind.tokens)
        if self._grouped is not None and one.input.is_grouped(kind):
            cols = one.experts.up.in_features
            inputs = self._inputs_of(one)(self._grouped.input_format(one.matrices, kind.tokens), cols)
            self._grouped.launch_down(one.matrices, inputs, one.pairs, out, kind.tokens)
            return
        source = self._activated(one)
        self._matmuls.multiply(stack, bias, source, one.pairs, out, kind.tokens, of_pairs=True)

    def _activated(self, one: _Mixture) -> ActivationBuffer:
        """The input of the last matrix, a row for each pair of the largest step that multiplies pairs."""
        tokens = self._space.arrays.sizes.tokens
        if self._grouped is not None and one.matrices.ends_with_activation:
            tokens = min(tokens, one.input.pair_tokens)
        rows, cols = tokens * one.pairs.per_token, one.experts.down.in_features
        return self._space.activations.get(input_format(one.matrices.down), cols, rows)

    def _dense_sums(self, one: _Mixture, kind: StepKind) -> torch.Tensor:
        """Sums of the dense feed-forward: float32 [splits, tokens, width], behind the outputs of the step's pairs."""
        assert one.dense is not None
        last, tokens = one.dense[1], kind.tokens
        first, splits = tokens * one.experts.experts_per_token * last.width, last.splits(kind)
        return self._space.partial_sums[first : first + splits * tokens * last.width].view(splits, tokens, last.width)

    def _add(self, one: _Mixture, last: MergedLinear, norm: Norm | None) -> Run:
        """Add a shared expert's output to that of a token's last expert; `norm`: before the mixture."""
        space, width, per_token = self._space, last.width, one.experts.experts_per_token
        cut, none, gate = whole_width(width), self._none, one.experts.shared_gate
        of_norm, constants = self._norms.arguments(norm), norm_constants("", norm)
        rows, gate_bias = (none, None) if gate is None else self._gate(gate)

        def run(kind: StepKind) -> None:
            partials = self._dense_sums(one, kind)
            add_shared[(kind.tokens,)](
                partials, partials.stride(0), partials.stride(1), none if last.bias is None else last.bias,
                space.partial_sums[(per_token - 1) * width :], per_token * width, space.hidden, width, *of_norm, rows,
                none if gate_bias is None else gate_bias, width, SPLITS=partials.shape[0], BIAS=last.bias is not None,
                GATED=gate is not None, GATE_BIAS=gate_bias is not None, **constants, BLOCK=cut.block,
                num_warps=cut.warps, **space.launching(kind),
            )  # fmt: skip

        return run
