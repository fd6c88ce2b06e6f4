"""Norms and residual adds between two matmuls, bound to kernels and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from realizar.backends.cuda.kernel_sizes import norm_blocks, norm_square_parts, whole_width
from realizar.backends.cuda.kernels import store_inputs as formats
from realizar.backends.cuda.kernels.normalize import normalize, normalize_block
from realizar.backends.cuda.matmul.experts import ExpertsInput, ExpertsOutput
from realizar.backends.cuda.matmul.folded_norm import FoldedNorm
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.quantized import Int8Activations
from realizar.backends.cuda.matmul.residual import Residual
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import Join
from realizar.models.parts import Norm
from realizar.models.spec import ModelSpec

NORM_KINDS = {"rms": 1, "layer": 2}

Run = Callable[[StepShape], None]
Consumer: TypeAlias = MergedLinear | ExpertsInput
"""A reader of a norm."""
Folded = Callable[[int], FoldedNorm | None]
"""The norm scale that the consuming matmul must still apply, by number of tokens; None when nothing is left."""
ResidualAdd = Callable[[int], Residual]
"""The operands of a residual-add epilogue, by number of tokens."""


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """An output that is whole already.

    Attributes:
        values: float32 [>= tokens, width], contiguous.
    """

    values: torch.Tensor
    bias: None = None

    def splits(self, tokens: int) -> int:
        """One: there is nothing to sum."""
        return 1

    def adds_residual(self, tokens: int) -> bool:
        """False: no matmul's epilogue has it."""
        return False


@dataclass(frozen=True, slots=True)
class Branch:
    """A matmul, or experts, whose output is added to the residual stream, with the norm and scale of `join`."""

    linear: MergedLinear | ExpertsOutput | StoredOutput
    join: Join


def _is_folded(branch: Branch, consumer: Consumer) -> bool:
    """True if the consumer may apply the scale of the norm after a branch, in steps where its kernels can."""
    return branch.join.folds_next_norm and consumer.all_packed


def _applies_scale(branch: Branch, consumer: Consumer, tokens: int) -> bool:
    """True if the consumer applies it in a step of `tokens`: a residual-add epilogue begins norms in integers alone."""
    if not consumer.applies_norm_scale(tokens):
        return False
    return not branch.linear.adds_residual(tokens) or consumer.input_formats(tokens)[0].kind == "int8"


class NormBinder:
    """Binds a program's norms of the residual stream, in their order.

    A norm whose scale its consumer can apply runs in blocks of columns. Any other norm takes a token at once, as all do
    in steps for which consumers have FP8 copies. Each norm leaves the partial sums of a token's squares for the next
    one, in one of two buffers alternately. A matmul with the residual-add epilogue begins the norm after it as well,
    with its partial sums in `Workspace.epilogue_square_sums`; where the consumer can't apply the scale, the norm reads
    the stream.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, workspace: Workspace) -> None:
        self._cols, self._weights, self._space = spec.hidden_size, weights, workspace
        self._none = torch.zeros(1, device=workspace.hidden.device)
        self._written = 0

    def bind(self, branch: Branch | None, norm: Norm | None, consumer: Consumer) -> tuple[Run, Folded | None]:
        """Add a branch to the stream, norm it, and write the consumer's input; returns the folded scale as well.

        Blocks must be bound in the order of the program, each once: a norm reads the partial sums of squares that the
        norm bound before it writes, and the two buffers of them alternate from call to call.
        """
        before, square_sums = self._space.square_sums[1 - self._written], self._space.square_sums[self._written]
        self._written = 1 - self._written
        whole = self._whole(branch, norm, consumer, square_sums=square_sums)
        if branch is None or norm is None or not _is_folded(branch, consumer):
            return whole, None
        blocks = self._blocks(branch, norm, consumer, square_sums, before)

        def run(shape: StepShape) -> None:
            (blocks if _applies_scale(branch, consumer, shape.tokens) else whole)(shape)

        by_kernel, by_matmul = (
            FoldedNorm(kept, self._cols, float(norm.eps)) for kept in (square_sums, self._space.epilogue_square_sums)
        )

        def folded(tokens: int) -> FoldedNorm | None:
            if not _applies_scale(branch, consumer, tokens):
                return None
            return by_matmul if branch.linear.adds_residual(tokens) else by_kernel

        return run, folded

    def bind_last(self, branch: Branch) -> Run:
        """Add the body's last branch to the stream."""
        if branch.join.norm is not None or branch.join.output_scale is not None:
            return self._whole(branch, None, None)
        return self._blocks(branch, None, None, self._none, self._none)

    def bind_residual_add(self, branch: Branch, consumer: Consumer | None) -> ResidualAdd:
        """The operands of a branch's residual-add epilogue, by number of tokens; it begins the norm where it can."""
        space, linear = self._space, branch.linear
        following = branch.join.next
        begins = following is not None and consumer is not None and _is_folded(branch, consumer)
        norm_weight = self._arguments(following.norm)[0] if following is not None and begins else None
        adds = Residual(space.hidden, linear.bias, float(branch.join.scale), None, None, space.epilogue_square_sums)

        def residual(tokens: int) -> Residual:
            if consumer is None or norm_weight is None or not _applies_scale(branch, consumer, tokens):
                return adds
            target = space.activations.normed(consumer.input_formats(tokens)[0], self._cols)
            return replace(adds, norm_weight=norm_weight, target=Int8Activations(target.codes, target.terms))

        return residual

    def bind_selected(self, norm: Norm | None, consumer: Consumer | None) -> Run:
        """Norm the selected tokens, for the consumer or, without one, into `pooled`."""
        return self._whole(None, norm, consumer, gather=True)

    def _whole(
        self,
        branch: Branch | None,
        norm: Norm | None,
        consumer: Consumer | None,
        gather: bool = False,
        square_sums: torch.Tensor | None = None,
    ) -> Run:
        """One program per token."""
        space, cols, cut = self._space, self._cols, whole_width(self._cols)
        own = self._arguments(norm)
        branch_arguments = self._arguments(branch.join.norm if branch else None)
        output_scale = self._output_scale(branch)
        selected = space.arrays["selected"]
        unread = formats.PLAIN if gather else formats.NOTHING
        to_pooled = (space.pooled, cols, self._none, self._none, self._none)

        def start(shape: StepShape, added: Branch | None, target: ActivationBuffer | None) -> None:
            tokens = shape.tokens
            splits = added.linear.splits(tokens) if added else 0
            partials = self._partials(added, tokens) if added else self._none.view(1, 1, 1)
            bias = added.linear.bias if added else None
            pointers = target.pointers() if target else to_pooled
            constants = target.constants() if target else {"FORMAT": unread.value, "BLOCK_TOKENS": 1, "CHUNKS": 1}
            normalize[(tokens,)](
                partials, partials.stride(0), partials.stride(1), self._none if bias is None else bias,
                *branch_arguments, float(added.join.scale) if added else 0.0, output_scale, space.hidden, cols,
                selected, *own, *pointers, cols, self._none if square_sums is None else square_sums,
                SPLITS=splits, MATMUL_BIAS=bias is not None,
                BRANCH_NORM=NORM_KINDS[added.join.norm.kind] if added and added.join.norm else 0,
                BRANCH_BIAS=bool(added and added.join.norm and added.join.norm.bias),
                NORM=NORM_KINDS[norm.kind] if norm else 0, NORM_BIAS=bool(norm and norm.bias), GATHER=gather,
                PARTS=0 if square_sums is None else norm_square_parts(cols), BLOCK=cut.block, num_warps=cut.warps,
                **constants, **space.launching(tokens),
            )  # fmt: skip

        def inputs(input_format: InputFormat) -> ActivationBuffer:
            buffers = space.activations
            return (
                buffers.get(input_format, cols, space.arrays.sizes.selected)
                if gather
                else buffers.normed(input_format, cols)
            )

        def run(shape: StepShape) -> None:
            added = None if branch is None or branch.linear.adds_residual(shape.tokens) else branch
            for input_format in consumer.input_formats(shape.tokens) if consumer else ():
                start(shape, added, inputs(input_format))
                added = None
            if consumer is None:
                start(shape, added, None)

        return run

    def _blocks(
        self, branch: Branch, norm: Norm | None, consumer: Consumer | None, square_sums: torch.Tensor,
        before: torch.Tensor,
    ) -> Run:  # fmt: skip
        """Several programs per token; the scale is left to the consumer. None where the matmul adds to the stream."""
        space, cols, cut = self._space, self._cols, norm_blocks(self._cols)
        weight, _, _ = self._arguments(norm)
        nowhere = (self._none, cols, self._none, self._none, self._none)
        nothing = {"FORMAT": formats.NOTHING.value, "BLOCK_TOKENS": 1, "CHUNKS": 1}

        def run(shape: StepShape) -> None:
            if branch.linear.adds_residual(shape.tokens):
                return
            tokens = shape.tokens
            splits, bias = branch.linear.splits(tokens), branch.linear.bias
            partials = self._partials(branch, tokens)
            target = space.activations.normed(consumer.input_formats(tokens)[0], cols) if consumer else None
            normalize_block[(tokens, cut.blocks)](
                partials, partials.stride(0), partials.stride(1), self._none if bias is None else bias,
                float(branch.join.scale), space.hidden, cols, weight, *(target.pointers() if target else nowhere), cols,
                square_sums, before, SPLITS=splits, MATMUL_BIAS=bias is not None, PARTS=norm_square_parts(cols),
                BLOCK=cut.block, num_warps=cut.warps, **(target.constants() if target else nothing),
                **space.launching(tokens),
            )  # fmt: skip

        return run

    def _output_scale(self, branch: Branch | None) -> float:
        """The factor of the stream once a branch is added."""
        name = None if branch is None else branch.join.output_scale
        return 1.0 if name is None else float(self._weights.vector_values(name)[0])

    def _partials(self, branch: Branch, tokens: int) -> torch.Tensor:
        """A branch's sums: float32 [splits, tokens, hidden_size]."""
        if isinstance(branch.linear, ExpertsOutput):
            return branch.linear.partials(self._space.partial_sums, tokens)
        if isinstance(branch.linear, StoredOutput):
            return branch.linear.values[:tokens][None]
        return self._space.partials(branch.linear.splits(tokens), tokens, self._cols)

    def _arguments(self, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Weight, bias and epsilon."""
        if norm is None:
            return self._none, self._none, 0.0
        bias = self._weights.vector(norm.bias) if norm.bias else self._none
        return self._weights.norm_weight(norm), bias, float(norm.eps)
