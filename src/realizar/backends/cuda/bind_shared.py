"""Shared experts bound to kernels: dense feed-forwards, whose output joins that of a token's last expert.

Those that are the last of the experts' stacks have no launches of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, activation_blocks, whole_width
from realizar.backends.cuda.kernels.activate import activate
from realizar.backends.cuda.kernels.shared_expert import add_shared
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.linears import MergedLinear, partial_floats
from realizar.backends.cuda.matmul.merging import Merger
from realizar.backends.cuda.norms import NORM_KINDS, Folded, Run
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.parts import SHARED_PART
from realizar.models.parts import Linear, Norm
from realizar.models.spec import Experts, FeedForward, ModelSpec


def shared_floats(spec: ModelSpec, weights: Weights, merger: Merger, token_counts: Collection[int]) -> int:
    """float32 of the largest partial sums, or outputs of shared experts, behind those of the pairs that are chosen."""
    downs = [one.shared.down for _, one in spec.mixtures() if one.shared is not None]
    stacked = [down.out_features * max(token_counts) for down in downs if down.weight in weights.stacked]
    apart = [merger.merge((down,)) for down in downs if down.weight not in weights.stacked]
    return max([*stacked, partial_floats(apart, token_counts) if apart else 0])


class SharedBinder:
    """Binds the shared experts of mixtures.

    The activations are made before the experts beside them, whose matmuls take the memory of partial sums from its
    beginning; the last matmul comes after them and takes it from behind their outputs.
    """

    def __init__(self, weights: Weights, space: Workspace, merger: Merger) -> None:
        self._weights, self._space, self._merger = weights, space, merger
        self._none = torch.zeros(1, device=space.hidden.device)

    def first(self, experts: Experts) -> MergedLinear | None:
        """The matmul that reads the norm before a mixture; None where there is no shared expert apart."""
        shared = experts.shared
        return None if shared is None or self._is_stacked(shared) else self._merger.merge(shared.linears()[:-1])

    def _is_stacked(self, shared: FeedForward) -> bool:
        """True if it is one of a stack of experts."""
        return shared.up.weight in self._weights.stacked

    def gate(self, gate: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights of a shared expert's gate, float32 [1, width], and its bias, [1] or None."""
        (matrix,) = self._weights.groups[(gate.weight,)]
        assert isinstance(matrix, torch.Tensor)
        return matrix, self._merger.merge((gate,)).bias

    def bind_first(self, experts: Experts, folded: Folded | None) -> Iterator[Launch]:
        """The launches before the experts.

        Args:
            folded: the scale of the norm that is still missing.
        """
        first, shared = self.first(experts), experts.shared
        if first is None or shared is None:
            return
        last = self.last(shared)
        yield Launch(SHARED_PART, self._multiply(first, last, folded), first.weight_bytes)
        yield Launch(SHARED_PART, self._activate(shared, first, last))

    def bind_last(self, experts: Experts, norm: Norm | None) -> Iterator[Launch]:
        """The launches after the experts, whose outputs lie at the beginning of the partial sums.

        Args:
            norm: before the mixture.
        """
        if experts.shared is not None and not self._is_stacked(experts.shared):
            last = self.last(experts.shared)
            yield self.bind_down(experts)
            yield Launch(SHARED_PART, self._add(experts, last, norm))

    def last(self, shared: FeedForward) -> MergedLinear:
        """The last matmul of a shared expert."""
        return self._merger.merge((shared.down,))

    def bind_down(self, experts: Experts) -> Launch:
        """The last matmul's launch, after the experts; its sums are where `partials` says."""
        assert experts.shared is not None
        last = self.last(experts.shared)
        return Launch(SHARED_PART, self._project(experts, last), last.weight_bytes)

    def _multiply(self, first: MergedLinear, last: MergedLinear, folded: Folded | None) -> Run:
        space, buffers = self._space, self._space.activations

        def inputs(input_format: InputFormat) -> ActivationBuffer:
            return buffers.normed(input_format, first.cols)

        def run(kind: StepKind) -> None:
            tokens, norm = kind.tokens, folded(kind) if folded else None
            if first.is_gated(kind):
                (input_format,) = last.input_formats(kind)
                first.launch_gated(kind, inputs, buffers.shared(input_format, last.cols), norm)
            else:
                first.launch(kind, inputs, space.partials(first.splits(kind), tokens, first.width), norm)

        return run

    def _activate(self, part: FeedForward, first: MergedLinear, last: MergedLinear) -> Run:
        space, width, gated = self._space, part.up.out_features, part.gate is not None
        up_at = 64 if first.interleaved else width if gated else 0

        def run(kind: StepKind) -> None:
            tokens = kind.tokens
            if first.is_gated(kind):  # the matmul has activated already
                return
            splits = first.splits(kind)
            partials = space.partials(splits, tokens, first.width)
            for input_format in last.input_formats(kind):
                target = space.activations.shared(input_format, width)
                cut = whole_width(width) if input_format.kind == "fp8" else activation_blocks(width, tokens)
                activate[(tokens, cut.blocks)](
                    partials, partials.stride(0), partials.stride(1), self._none if first.bias is None else first.bias,
                    up_at, width, *target.pointers(), *space.token_state, SPLITS=splits, BIAS=first.bias is not None,
                    KIND=ACTIVATIONS[part.activation], GATED=gated, INTERLEAVED=first.interleaved, BLOCK=cut.block,
                    num_warps=cut.warps, **target.constants(), **space.launching(kind),
                )  # fmt: skip

        return run

    def partials(self, experts: Experts, kind: StepKind) -> torch.Tensor:
        """Sums of the last matmul: float32 [splits, tokens, width], behind the outputs of the step's pairs."""
        assert experts.shared is not None
        last = self.last(experts.shared)
        tokens, splits = kind.tokens, last.splits(kind)
        first = tokens * experts.experts_per_token * last.width
        end = first + splits * tokens * last.width
        return self._space.partial_sums[first:end].view(splits, tokens, last.width)

    def _project(self, experts: Experts, last: MergedLinear) -> Run:
        shared = self._space.activations.shared

        def run(kind: StepKind) -> None:
            partials = self.partials(experts, kind)
            last.launch(kind, lambda input_format: shared(input_format, last.cols), partials)

        return run

    def _add(self, experts: Experts, last: MergedLinear, norm: Norm | None) -> Run:
        space, width, per_token = self._space, last.width, experts.experts_per_token
        cut, none, gate = whole_width(width), self._none, experts.shared_gate
        weight = none if norm is None else self._weights.norm_weight(norm)
        norm_bias = none if norm is None or norm.bias is None else self._weights.vector(norm.bias)
        rows, gate_bias = (none, None) if gate is None else self.gate(gate)

        def run(kind: StepKind) -> None:
            partials = self.partials(experts, kind)
            add_shared[(kind.tokens,)](
                partials, partials.stride(0), partials.stride(1), none if last.bias is None else last.bias,
                space.partial_sums[(per_token - 1) * width :], per_token * width, space.hidden, width, weight,
                norm_bias, float(norm.eps) if norm else 0.0, rows, none if gate_bias is None else gate_bias, width,
                SPLITS=partials.shape[0], BIAS=last.bias is not None, GATED=gate is not None,
                GATE_BIAS=gate_bias is not None, NORM=NORM_KINDS[norm.kind] if norm else 0,
                NORM_BIAS=bool(norm and norm.bias), BLOCK=cut.block, num_warps=cut.warps,
                **space.launching(kind),
            )  # fmt: skip

        return run
