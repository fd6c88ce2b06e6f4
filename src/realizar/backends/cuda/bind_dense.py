"""Matmuls and the activations of dense feed-forwards bound to kernels and buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, activation_blocks
from realizar.backends.cuda.kernels.activate import activate
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.chain import Link, chain_kernel, is_link, launch_chain
from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.matmul.linears import Buffers, MergedLinear
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.norms import Folded, ResidualAdd, Run
from realizar.backends.cuda.workspace import Workspace
from realizar.models.parts import Activation
from realizar.models.spec import FeedForward


@dataclass(frozen=True, slots=True)
class _Matmul:
    """A bound matmul: the arguments of `DenseBinder.project`."""

    linear: MergedLinear
    source: Buffers
    folded: Folded | None
    consumer: MergedLinear | None
    target: Buffers | None
    residual: ResidualAdd | None
    sums: Callable[[StepKind], torch.Tensor]

    def link(self, kind: StepKind) -> Link | None:
        """What it is in a chain in steps of this kind; None where a kernel of its own follows or goes before."""
        linear, norm = self.linear, self.folded(kind) if self.folded else None
        if not linear.all_packed or (self.folded is not None and norm is None):
            return None
        (input_format,) = linear.input_formats(kind)
        source = self.source(input_format, linear.cols).with_norm(norm)
        if self.consumer is not None and self.target is not None:
            if not linear.is_gated(kind):
                return None
            (next_format,) = self.consumer.input_formats(kind)
            return Link(linear.packed, source, self.target(next_format, self.consumer.cols))
        if self.residual is not None:
            return Link(linear.packed, source, self.residual(kind)) if linear.adds_residual(kind) else None
        return Link(linear.packed, source, self.sums(kind))

    def start(self, kind: StepKind) -> None:
        """Start it alone, with the epilogue that it has."""
        linear, norm = self.linear, self.folded(kind) if self.folded else None
        if self.consumer is not None and self.target is not None and linear.is_gated(kind):
            (input_format,) = self.consumer.input_formats(kind)
            linear.launch_gated(kind, self.source, self.target(input_format, self.consumer.cols), norm)
        elif self.residual is not None and linear.adds_residual(kind):
            linear.launch_residual(kind, self.source, self.residual(kind))
        else:
            linear.launch(kind, self.source, self.sums(kind), norm)


def _links(chain: Sequence[_Matmul], kind: StepKind) -> tuple[list[Link], int, GatedActivation | None]:
    """Arguments of a chain: its links, tokens, and the activation of those that end with one."""
    links = [link for bound in chain if (link := bound.link(kind)) is not None]
    activations = (bound.linear.activation(kind) for bound in chain)
    return links, kind.tokens, next((each for each in activations if each is not None), None)


class DenseBinder:
    """Binds matmuls, and what makes the input of a feed-forward's last one."""

    def __init__(self, space: Workspace, matmuls: MatmulKernels | None) -> None:
        self._space, self._none = space, torch.zeros(1, device=space.hidden.device)
        self._matmuls = matmuls
        self._rows: list[list[_Matmul]] = []

    def project(
        self,
        linear: MergedLinear,
        source: Buffers,
        *,
        folded: Folded | None = None,
        consumer: MergedLinear | None = None,
        target: Buffers | None = None,
        residual: ResidualAdd | None = None,
        sums: Callable[[StepKind], torch.Tensor] | None = None,
        follows: bool = False,
    ) -> Run:
        """Return a function that starts a matmul, with the epilogue that it has for a number of tokens.

        Args:
            folded: the scale of the norm of its input which the matmul must apply.
            consumer: the matmul that reads the activation of a feed-forward which begins with this one, from `target`.
            residual: operands of the residual-add epilogue, by number of tokens, if the matmul adds to the stream.
            sums: where its partial sums go; None for the beginning of their memory.
            follows: nothing runs between the matmul bound before and this one, where both have their epilogues. Such
                matmuls start together with the first of them, where a chain may have them.
        """

        def first_sums(kind: StepKind) -> torch.Tensor:
            return self._space.partials(linear.splits(kind), kind.tokens, linear.width, linear.sum_type(kind))

        bound = _Matmul(linear, source, folded, consumer, target, residual, sums or first_sums)
        if not follows:
            self._rows.append([])
        row, index = self._rows[-1], len(self._rows[-1])
        row.append(bound)

        def run(kind: StepKind) -> None:
            chain = self._chain(row, index, kind)
            if len(chain) < 2:
                bound.start(kind)
            elif chain[0] == index:
                self._start_chain([row[each] for each in chain], kind)

        return run

    def prepare(self, kinds: Iterable[StepKind]) -> None:
        """Compile and load the kernels of chains in steps of these kinds; raises what `MatmulKernels.prepare` does."""
        if self._matmuls is None:
            return
        sources = []
        for kind, row in itertools.product(kinds, self._rows):
            for index in range(len(row)):
                chain = self._chain(row, index, kind)
                if len(chain) > 1 and chain[0] == index:
                    sources.append(chain_kernel(*_links([row[each] for each in chain], kind))[0])
        self._matmuls.kernels.prepare(sources)

    def _chain(self, row: Sequence[_Matmul], index: int, kind: StepKind) -> range:
        """Of a row of matmuls that follow each other, the places of those that start with the one at `index`."""
        if self._matmuls is None or not self._links(row[index], kind):
            return range(index, index + 1)
        first, end = index, index + 1
        while first > 0 and self._links(row[first - 1], kind):
            first -= 1
        while end < len(row) and self._links(row[end], kind):
            end += 1
        return range(first, end)

    def _links(self, bound: _Matmul, kind: StepKind) -> bool:
        assert self._matmuls is not None
        config = bound.linear.route(kind)
        return is_link(self._matmuls, bound.linear.packed, config) and bound.link(kind) is not None

    def _start_chain(self, chain: Sequence[_Matmul], kind: StepKind) -> None:
        assert self._matmuls is not None
        launch_chain(self._matmuls, *_links(chain, kind), self._space.units_done)

    def activate(self, part: FeedForward, first: MergedLinear, last: MergedLinear, target: Buffers) -> Run:
        """Return a function that writes the input of `last` from the sums of `first`, where that has not done so."""
        space, width, gated = self._space, part.up.out_features, part.gate is not None
        up_at = 64 if first.interleaved else width if gated else 0

        def run(kind: StepKind) -> None:
            if first.is_gated(kind):  # the matmul has activated already
                return
            splits = first.splits(kind)
            partials = space.partials(splits, kind.tokens, first.width)
            for input_format in last.input_formats(kind):
                self.start_activation(
                    kind, kind.tokens, partials, partials.stride()[:2], up_at, width, target(input_format, width),
                    part.activation, gated=gated, interleaved=first.interleaved, splits=splits, bias=first.bias,
                )  # fmt: skip

        return run

    def start_activation(
        self, kind: StepKind, rows: int, sums: torch.Tensor, strides: Sequence[int], up_at: int, width: int,
        target: ActivationBuffer, activation: Activation | GatedActivation, *, gated: bool, interleaved: bool,
        splits: int = 1, bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start target = activation(gate) * up, or activation(up), of so many rows.

        `sums` are float32 that begin with gate, and with up at `up_at`; `strides` are those of a split and of a row.
        """
        cut = activation_blocks(width, kind.tokens)
        activate[(rows, cut.blocks)](
            sums, *strides, self._none if bias is None else bias, up_at, width, *target.pointers(),
            *self._space.token_state, SPLITS=splits, BIAS=bias is not None, KIND=ACTIVATIONS[activation], GATED=gated,
            INTERLEAVED=interleaved, BLOCK=cut.block, num_warps=cut.warps, **target.constants(),
            **self._space.launching(kind),
        )  # fmt: skip
