"""Matmuls and the activations of dense feed-forwards bound to kernels and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, activation_blocks
from realizar.backends.cuda.kernels.activate import activate
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.matmul.linears import Buffers, MergedLinear
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.norms import Folded, ResidualAdd, Run
from realizar.backends.cuda.workspace import Workspace
from realizar.models.parts import Activation
from realizar.models.spec import FeedForward


class DenseBinder:
    """Binds matmuls, and what makes the input of a feed-forward's last one."""

    def __init__(self, space: Workspace) -> None:
        self._space, self._none = space, torch.zeros(1, device=space.hidden.device)

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
    ) -> Run:
        """Return a function that starts a matmul, with the epilogue that it has for a number of tokens.

        Args:
            folded: the scale of the norm of its input which the matmul must apply.
            consumer: the matmul that reads the activation of a feed-forward which begins with this one, from `target`.
            residual: operands of the residual-add epilogue, by number of tokens, if the matmul adds to the stream.
            sums: where its partial sums go; None for the beginning of their memory.
        """
        space = self._space

        def run(kind: StepKind) -> None:
            norm = folded(kind) if folded else None
            if consumer is not None and target is not None and linear.is_gated(kind):
                (input_format,) = consumer.input_formats(kind)
                linear.launch_gated(kind, source, target(input_format, consumer.cols), norm)
            elif residual is not None and linear.adds_residual(kind):
                linear.launch_residual(kind, source, residual(kind))
            else:
                partials = (
                    space.partials(linear.splits(kind), kind.tokens, linear.width, linear.sum_type(kind))
                    if sums is None
                    else sums(kind)
                )
                linear.launch(kind, source, partials, norm)

        return run

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
