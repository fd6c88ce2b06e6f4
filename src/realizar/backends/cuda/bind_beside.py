"""Mixtures whose parts have norms of their own bound to kernels: experts beside a dense feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from realizar.backends.cuda.bind_experts import ExpertsBinder
from realizar.backends.cuda.kernel_sizes import whole_width
from realizar.backends.cuda.kernels.normalize import normalize_sums
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.matmul.experts import ExpertsInput, ExpertsOutput
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.merging import Merger
from realizar.backends.cuda.norms import NORM_KINDS, Branch, NormBinder, Run, StoredOutput
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.parts import SHARED_PART
from realizar.backends.program import ExpertsBlock
from realizar.models.parts import Norm
from realizar.models.spec import FeedForward


@dataclass(frozen=True, slots=True)
class BesideBinder:
    """Binds mixtures with `ExpertNorms`.

    The dense feed-forward goes first, and its normed output into `Workspace.beside`; that of the experts is added to it
    there, and the norm after the mixture adds the sum to the stream.

    Attributes:
        norms: the binder of all other norms of the program, in whose order these are.
    """

    weights: Weights
    space: Workspace
    merger: Merger
    norms: NormBinder
    experts: ExpertsBinder

    def output(self) -> StoredOutput:
        """Where a mixture's output is, for the norm that adds it to the stream."""
        return StoredOutput(self.space.beside)

    def bind(self, block: ExpertsBlock, before: Branch | None, router: MergedLinear, score: Run) -> Iterator[Launch]:
        """All launches of a block.

        Args:
            before: what is added to the stream first. router, score: the router's matmul, and the start of it.
        """
        part, norms = block.experts, block.experts.norms
        assert norms is not None
        assert part.shared is not None
        first, last = self.merger.merge(part.shared.linears()[:-1]), self.merger.merge((part.shared.down,))
        yield Launch("norm", self.norms.bind(before, norms.shared, first)[0])
        yield from self.experts.shared.bind_first(part, None)
        yield Launch(SHARED_PART, self._project(part.shared, last), last.weight_bytes)
        yield Launch("norm", self._store(norms.shared_output, last, adds=False))
        consumer = self.experts.input(block.inputs, part)
        yield Launch("norm", self._unless_routed(consumer, self.norms.bind(None, norms.router, router)[0]))
        yield from self.experts.bind_choice(part, consumer, router, score)
        yield Launch("norm", self.norms.bind(None, norms.experts, consumer)[0])
        yield from self.experts.bind_matmuls(part, consumer, None, None)
        yield Launch("norm", self._store(norms.experts_output, self.experts.output(part), adds=True))

    def _unless_routed(self, consumer: ExpertsInput, normalize: Run) -> Run:
        """The norm that the router's matmul reads: with few tokens its kernel reads the stream."""

        def run(shape: StepShape) -> None:
            if not consumer.is_routed(shape.tokens):
                normalize(shape)

        return run

    def _project(self, part: FeedForward, last: MergedLinear) -> Run:
        space, buffers = self.space, self.space.activations

        def run(shape: StepShape) -> None:
            partials = space.partials(last.splits(shape.tokens), shape.tokens, last.width)
            last.launch(shape.tokens, lambda each: buffers.shared(each, part.down.in_features), partials)

        return run

    def _store(self, norm: Norm, source: MergedLinear | ExpertsOutput, *, adds: bool) -> Run:
        """beside = norm(sums), or beside += norm(sums)."""
        space, bias = self.space, source.bias
        none = torch.zeros(1, device=space.hidden.device)
        weight, norm_bias = (
            self.weights.norm_weight(norm),
            none if norm.bias is None else self.weights.vector(norm.bias),
        )

        def run(shape: StepShape) -> None:
            tokens, width = shape.tokens, source.width
            if isinstance(source, ExpertsOutput):
                partials = source.partials(space.partial_sums, tokens)
            else:
                partials = space.partials(source.splits(tokens), tokens, width)
            cut = whole_width(width)
            normalize_sums[(tokens,)](
                partials, partials.stride(0), partials.stride(1), none if bias is None else bias, weight, norm_bias,
                float(norm.eps), space.beside, width, SPLITS=source.splits(tokens), MATMUL_BIAS=bias is not None,
                NORM=NORM_KINDS[norm.kind], NORM_BIAS=norm.bias is not None, ADDS=adds, BLOCK=cut.block,
                num_warps=cut.warps, **space.launching(tokens),
            )  # fmt: skip

        return run
