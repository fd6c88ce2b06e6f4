"""Mixtures whose parts have norms of their own bound to kernels: experts beside a dense feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from realizar.backends.cuda.bind_experts import ExpertsBinder
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.experts import ExpertsInput
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.norms import BesideOutput, Branch, NormBinder, Run
from realizar.backends.program import ExpertsBlock
from realizar.models.spec import Experts


@dataclass(frozen=True, slots=True)
class BesideBinder:
    """Binds mixtures with `ExpertNorms`.

    One kernel writes the norms of the stream that the dense feed-forward and the experts read. The feed-forward's last
    matmul comes after the experts, and its sums lie behind theirs; the norm after the mixture norms both, and adds them
    to the stream.

    Attributes:
        norms: the binder of all other norms of the program, in whose order these are.
    """

    norms: NormBinder
    experts: ExpertsBinder

    def output(self, experts: Experts) -> BesideOutput:
        """Where a mixture's outputs are, for the norm that adds them to the stream."""
        assert experts.norms is not None
        assert experts.shared is not None
        last = self.experts.shared.last(experts.shared)
        sums = partial(self.experts.shared.partials, experts)
        return BesideOutput(self.experts.output(experts), last, sums, experts.norms)

    def bind(self, block: ExpertsBlock, before: Branch | None, router: MergedLinear, score: Run) -> Iterator[Launch]:
        """All launches of a block.

        Args:
            before: what is added to the stream first. router, score: the router's matmul, and the start of it.
        """
        part, norms = block.experts, block.experts.norms
        first, consumer = self.experts.shared.first(part), self.experts.input(block.inputs, part)
        assert norms is not None
        assert first is not None
        yield Launch("norm", self.norms.bind_two(before, (norms.shared, first), (norms.experts, consumer)))
        yield from self.experts.shared.bind_first(part, None)
        yield Launch("norm", self._unless_routed(consumer, self.norms.bind(None, norms.router, router)[0]))
        yield from self.experts.bind_choice(part, consumer, router, score)
        yield from self.experts.bind_matmuls(part, consumer, None, None)
        yield self.experts.shared.bind_down(part)

    def _unless_routed(self, consumer: ExpertsInput, normalize: Run) -> Run:
        """The norm that the router's matmul reads: with few tokens its kernel reads the stream."""

        def run(kind: StepKind) -> None:
            if not consumer.is_routed(kind):
                normalize(kind)

        return run
