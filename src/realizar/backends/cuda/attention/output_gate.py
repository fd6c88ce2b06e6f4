"""Starts the gate of a layer's heads, or of its own input, which makes the input of its last projection."""

from __future__ import annotations

import torch

from realizar.backends.cuda.kernel_sizes import gate_blocks
from realizar.backends.cuda.kernels.activate import SIGMOID
from realizar.backends.cuda.kernels.gate_heads import gate_heads
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.workspace import Workspace


def start_gate(
    space: Workspace, kind: StepKind, linear: MergedLinear, gate_at: int, head: int, consumer: MergedLinear,
    norm: tuple[torch.Tensor, float] | None = None, summed: bool = False, source: torch.Tensor | None = None,
    activation: int = SIGMOID.value,
) -> None:  # fmt: skip
    """Write what is gated times its gate in the formats that `consumer` reads.

    Args:
        linear: whose output has the gate from column `gate_at` on. head: features of a head.
        norm: weight float32 [head] and eps of the norm of heads before a gate of silu; None has a gate of sigmoid.
        summed: the splits of `linear` have been summed into the first, with its bias.
        source: what is gated, float32 [>= tokens, >= width], columns side by side; None gates `attended`.
        activation: the gate's, as of `kernels.activate`.
    """
    width, splits = consumer.cols, linear.splits(kind)
    partials = space.partials(splits, kind.tokens, linear.width)
    has_bias = linear.bias is not None and not summed
    weight, eps = norm or (space.hidden, 0.0)
    gated = space.attended if source is None else source
    for input_format in consumer.input_formats(kind):
        target = space.activations.get(input_format, width)
        cut = gate_blocks(width, kind.tokens)
        gate_heads[(kind.tokens, cut.blocks)](
            gated, gated.stride(0), partials, partials.stride(0), partials.stride(1),
            space.hidden if linear.bias is None else linear.bias, gate_at, weight, eps, width, *target.pointers(),
            *space.token_state, SPLITS=1 if summed else splits, BIAS=has_bias, NORM=norm is not None, HEAD=head,
            KIND=activation, WHOLE=cut.blocks == 1, BLOCK=cut.block, num_warps=cut.warps, **target.constants(),
            **space.launching(kind),
        )  # fmt: skip
