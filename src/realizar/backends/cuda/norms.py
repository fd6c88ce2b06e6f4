"""Norms and residual adds between two matmuls, bound to kernels and buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from realizar.backends.cuda.kernel_sizes import norm_blocks, norm_square_parts, whole_width
from realizar.backends.cuda.kernels import store_inputs as formats
from realizar.backends.cuda.kernels.normalize import normalize, normalize_block
from realizar.backends.cuda.kernels.normalize_parallel import normalize_parallel, normalize_twice
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.experts import ExpertsInput, ExpertsOutput
from realizar.backends.cuda.matmul.inputs import CHUNK, ActivationBuffer, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.residual import Residual
from realizar.backends.cuda.ranks.peers import Sums
from realizar.backends.cuda.ranks.sums import RankSums
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import Join
from realizar.models.expert_norms import ExpertNorms
from realizar.models.parts import Norm, PairedInputs
from realizar.models.spec import ModelSpec

NORM_KINDS = {"rms": 1, "layer": 2, "scale": 3}

Run = Callable[[StepKind], None]
Consumer: TypeAlias = MergedLinear | ExpertsInput
"""A reader of a norm."""
Folded = Callable[[StepKind], FoldedNorm | None]
"""The norm scale that the consuming matmul must still apply, by kind of step; None when nothing is left."""
ResidualAdd = Callable[[StepKind], Residual]
"""The operands of a residual-add epilogue, by kind of step."""


@dataclass(frozen=True, slots=True)
class ParallelOutput:
    """Outputs of experts and of a dense feed-forward parallel to them, each of which has a norm before they are added.

    `shared` is the last matmul of the feed-forward, `sums` its sums by kind of step: float32 [splits, tokens, width].
    """

    experts: ExpertsOutput
    shared: MergedLinear
    sums: Callable[[StepKind], torch.Tensor]
    norms: ExpertNorms

    def adds_residual(self, kind: StepKind) -> bool:
        """No matmul's epilogue has it."""
        return False


@dataclass(frozen=True, slots=True)
class Branch:
    """A matmul, or experts, whose output is added to the residual stream, with the norm and scale of `join`.

    `turn` counts a program's branches that ranks add up.
    """

    linear: MergedLinear | ExpertsOutput | ParallelOutput
    join: Join
    turn: int = 0


def _is_folded(branch: Branch, consumer: Consumer) -> bool:
    """True if the consumer may apply the scale of the norm after a branch, in steps where its kernels can."""
    return branch.join.folds_next_norm and consumer.all_packed and not isinstance(branch.linear, ParallelOutput)


def _applies_scale(branch: Branch, consumer: Consumer, kind: StepKind) -> bool:
    """True if the consumer applies it: a residual-add epilogue begins norms in integers alone."""
    if not consumer.applies_norm_scale(kind):
        return False
    return not branch.linear.adds_residual(kind) or consumer.input_formats(kind)[0].kind == "int8"


class NormBinder:
    """Binds a program's norms of the residual stream, in their order.

    A norm whose scale its consumer can apply runs in blocks of columns. Any other norm takes a token at once, as all do
    in steps in 8-bit floats. Each norm leaves the partial sums of a token's squares for the next
    one, in one of two buffers alternately. A matmul with the residual-add epilogue begins the norm after it as well,
    with its partial sums in `Workspace.epilogue_square_sums`; where the consumer can't apply the scale, the norm reads
    the stream.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, workspace: Workspace, ranks: RankSums | None = None) -> None:
        self._cols, self._weights, self._space, self._ranks = spec.hidden_size, weights, workspace, ranks
        self._none = torch.zeros(1, device=workspace.hidden.device)
        self._written = 0

    def bind_apart(self, source: torch.Tensor, norm: Norm | None, consumer: Consumer) -> Run:
        """Norm float32 [tokens, features] that are not the stream, for the consumer."""
        return self._whole(None, norm, consumer, source=source)

    def bind_in_place(self, norm: Norm) -> Run:
        """Norm the stream where it lies."""
        return self._whole(None, norm, None, plain=self._space.hidden)

    def bind_pair(self, pair: PairedInputs) -> list[Run]:
        """Norm embeddings, which are in the stream, and states into `Workspace.pair`; the stream is then the states'.

        The norm that is bound next reads its partial sums of squares.
        """
        space, cols = self._space, self._cols
        of_token, of_state = space.pair[:, :cols], space.pair[:, cols:]
        begins_with = of_state if pair.normed_stream else space.states

        def begin(kind: StepKind) -> None:
            space.hidden[: kind.tokens].copy_(begins_with[: kind.tokens])

        self._written = 1 - self._written
        return [
            self._whole(None, pair.token_norm, None, plain=of_token),
            self._whole(None, pair.state_norm, None, source=space.states, plain=of_state),
            begin,
            self._whole(None, None, None, square_sums=space.square_sums[1 - self._written]),
        ]

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

        def run(kind: StepKind) -> None:
            (blocks if _applies_scale(branch, consumer, kind) else whole)(kind)

        by_kernel, by_matmul = (
            FoldedNorm(kept, self._cols, float(norm.eps)) for kept in (square_sums, self._space.epilogue_square_sums)
        )

        def folded(kind: StepKind) -> FoldedNorm | None:
            if not _applies_scale(branch, consumer, kind):
                return None
            return by_matmul if branch.linear.adds_residual(kind) else by_kernel

        return run, folded

    def bind_last(self, branch: Branch) -> Run:
        join = branch.join
        if join.norm is not None or join.output_scale is not None or isinstance(branch.linear, ParallelOutput):
            return self._whole(branch, None, None)
        return self._blocks(branch, None, None, self._none, self._none)

    def bind_residual_add(self, branch: Branch, consumer: Consumer | None) -> ResidualAdd:
        """The operands of a branch's residual-add epilogue, by kind of step; it begins the norm where it can."""
        space, linear = self._space, branch.linear
        assert not isinstance(linear, ParallelOutput)  # no matmul's epilogue adds it
        following = branch.join.next
        begins = following is not None and consumer is not None and _is_folded(branch, consumer)
        norm_weight = self.arguments(following.norm)[0] if following is not None and begins else None
        adds = Residual(space.hidden, linear.bias, float(branch.join.scale), None, None, space.epilogue_square_sums)

        def residual(kind: StepKind) -> Residual:
            if consumer is None or norm_weight is None or not _applies_scale(branch, consumer, kind):
                return adds
            target = space.activations.normed(consumer.input_formats(kind)[0], self._cols)
            return replace(adds, norm_weight=norm_weight, target=target)

        return residual

    def bind_selected(self, norm: Norm | None, consumer: Consumer | None) -> Run:
        """Norm the selected tokens, for the consumer or, without one, into `final_states`."""
        plain = self._space.final_states if consumer is None else None
        return self._whole(None, norm, consumer, gather=True, plain=plain)

    def _whole(
        self,
        branch: Branch | None,
        norm: Norm | None,
        consumer: Consumer | None,
        gather: bool = False,
        square_sums: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
        plain: torch.Tensor | None = None,
    ) -> Run:
        space, cols = self._space, self._cols if source is None else source.shape[1]
        cut = whole_width(cols)
        own, added_as, stream = self.arguments(norm), self._added(branch), space.hidden if source is None else source
        selected, sums_of = space.arrays["selected"], self._none if square_sums is None else square_sums

        def start(kind: StepKind, added: Branch | None, target: ActivationBuffer | None) -> None:
            tokens = kind.tokens
            pointers, stored = self._target(target, plain)
            ends = *added_as, stream, *own, *pointers, cols, sums_of
            constants = {
                **norm_constants("", norm), **norm_constants("BRANCH_", added.join.norm if added else None),
                **stored, "PARTS": 0 if square_sums is None else norm_square_parts(cols), "BLOCK": cut.block,
                "num_warps": cut.warps, **space.launching(kind),
            }  # fmt: skip
            if added is not None and isinstance(added.linear, ParallelOutput):
                sums, sum_constants = self._both_sums(added, added.linear, kind)
                normalize_parallel[(tokens,)](*sums, *ends, **sum_constants, **constants)
            else:
                sums, sum_constants = self._sums(added, kind, by_blocks=False)
                normalize[(tokens,)](*sums, selected, *ends, GATHER=gather, **sum_constants, **constants)

        def inputs(input_format: InputFormat) -> ActivationBuffer:
            buffers = space.activations
            return (
                buffers.get(input_format, cols, space.arrays.sizes.selected)
                if gather
                else buffers.normed(input_format, cols)
            )

        def run(kind: StepKind) -> None:
            added = None if branch is None or branch.linear.adds_residual(kind) else branch
            for input_format in consumer.input_formats(kind) if consumer else ():
                start(kind, added, inputs(input_format))
                added = None
            if consumer is None:
                start(kind, added, None)

        return run

    def bind_two(self, before: Branch | None, first: tuple[Norm, Consumer], second: tuple[Norm, Consumer]) -> Run:
        """Add a branch to the stream, norm it twice, and write inputs of two consumers, of the second in `parallel`."""
        space, cols, cut, buffers = self._space, self._cols, whole_width(self._cols), self._space.activations
        added_as = self._added(before)
        constants = {**norm_constants("", first[0]), **norm_constants("SECOND_", second[0])}
        constants |= norm_constants("BRANCH_", before.join.norm if before else None)
        assert before is None or not isinstance(before.linear, ParallelOutput)  # attention lies between two mixtures

        def run(kind: StepKind) -> None:
            tokens = kind.tokens
            added = None if before is None or before.linear.adds_residual(kind) else before
            both = first[1].input_formats(kind), second[1].input_formats(kind)
            for one, other in itertools.zip_longest(*both):
                sums, sum_constants = self._sums(added, kind, by_blocks=False)
                pointers, stored = self._target(buffers.normed(one, cols) if one else None)
                second_pointers, stored_second = self._target(buffers.parallel(other, cols) if other else None)
                normalize_twice[(tokens,)](
                    *sums, *added_as, space.hidden, *self.arguments(first[0]), *pointers,
                    *self.arguments(second[0]), *second_pointers, cols, **sum_constants, **constants,
                    **stored | {"CHUNKS": -(-cols // CHUNK)}, SECOND_FORMAT=stored_second["FORMAT"],
                    SECOND_BLOCK_TOKENS=stored_second["BLOCK_TOKENS"], BLOCK=cut.block, num_warps=cut.warps,
                    **space.launching(kind),
                )  # fmt: skip
                added = None

        return run

    def _blocks(
        self, branch: Branch, norm: Norm | None, consumer: Consumer | None, square_sums: torch.Tensor,
        before: torch.Tensor,
    ) -> Run:  # fmt: skip
        """Several programs per token; the scale is left to the consumer. None where the matmul adds to the stream."""
        space, cols, cut = self._space, self._cols, norm_blocks(self._cols)
        weight, _, _ = self.arguments(norm)

        def run(kind: StepKind) -> None:
            if branch.linear.adds_residual(kind):
                return
            tokens = kind.tokens
            sums, sum_constants = self._sums(branch, kind, by_blocks=True)
            target = space.activations.normed(consumer.input_formats(kind)[0], cols) if consumer else None
            pointers, stored = self._target(target)
            normalize_block[(tokens, cut.blocks)](
                *sums, float(branch.join.scale), space.hidden, cols, weight, *pointers, cols, square_sums, before,
                PARTS=norm_square_parts(cols), BLOCK=cut.block, num_warps=cut.warps, **sum_constants, **stored,
                **space.launching(kind),
            )  # fmt: skip

        return run

    def _added(self, branch: Branch | None) -> tuple[Any, ...]:
        if branch is None:
            return *self.arguments(None), 0.0, 1.0
        join = branch.join
        factor = 1.0 if join.output_scale is None else float(self._weights.vector_values(join.output_scale)[0])
        return *self.arguments(join.norm), float(join.scale), factor

    def _sums(
        self, branch: Branch | None, kind: StepKind, *, by_blocks: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        if branch is None:
            return (self._none, 0, 0, self._none), {"SPLITS": 0, "MATMUL_BIAS": False}
        linear = branch.linear
        assert not isinstance(linear, ParallelOutput)
        own = Sums(self._partials(linear, kind), linear.splits(kind), linear.bias)
        sums = self._of_ranks(branch, 0, own, kind, by_blocks=by_blocks)
        pointers = *self._pointers(sums), self._none if sums.bias is None else sums.bias
        return pointers, {"SPLITS": sums.splits, "MATMUL_BIAS": sums.bias is not None, **sums.shared}

    def _both_sums(
        self, branch: Branch, output: ParallelOutput, kind: StepKind
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        own, dense = (
            self._of_ranks(branch, place, sums, kind, by_blocks=False)
            for place, sums in enumerate((
                Sums(self._partials(output.experts, kind), output.experts.splits(kind)),
                Sums(output.sums(kind), len(output.sums(kind)), output.shared.bias),
            ))
        )  # fmt: skip
        norm, dense_norm = output.norms.experts_output, output.norms.shared_output
        pointers = (
            *self._pointers(own), self._none, *self.arguments(norm), *self._pointers(dense),
            self._none if dense.bias is None else dense.bias, *self.arguments(dense_norm),
        )  # fmt: skip
        shared = own.shared | {f"dense_{name}": dense.shared[name] for name in dense.shared if name == "exchange"}
        return pointers, {
            "SPLITS": own.splits, "MATMUL_BIAS": False, **norm_constants("OWN_", norm),
            "DENSE_SPLITS": dense.splits, "DENSE_MATMUL_BIAS": dense.bias is not None,
            **norm_constants("DENSE_", dense_norm), **shared,
        }  # fmt: skip

    def _of_ranks(self, branch: Branch, place: int, own: Sums, kind: StepKind, *, by_blocks: bool) -> Sums:
        if self._ranks is None or not branch.join.reduce:
            return own
        return self._ranks.of_branch(place, branch.turn, own, self._space.launching(kind), by_blocks=by_blocks)

    @staticmethod
    def _pointers(sums: Sums) -> tuple[torch.Tensor, int, int]:
        return sums.partials, sums.partials.stride(0), sums.partials.stride(1)

    def _partials(self, linear: MergedLinear | ExpertsOutput, kind: StepKind) -> torch.Tensor:
        """A branch's sums: float32 [splits, tokens, hidden_size], or float16, divided by `HALF_FACTOR`."""
        if isinstance(linear, ExpertsOutput):
            return linear.partials(self._space.partial_sums, kind.tokens)
        return self._space.partials(linear.splits(kind), kind.tokens, self._cols, linear.sum_type(kind))

    def _target(
        self, target: ActivationBuffer | None, plain: torch.Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if target is not None:
            return target.pointers(), target.constants()
        stored = formats.NOTHING if plain is None else formats.PLAIN
        values, stride = (self._none, 0) if plain is None else (plain, plain.stride(0))
        pointers = values, stride, self._none, self._none, self._none
        return pointers, {"FORMAT": stored.value, "BLOCK_TOKENS": 1, "CHUNKS": 1}

    def arguments(self, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor, float]:
        if norm is None:
            return self._none, self._none, 0.0
        bias = self._weights.vector(norm.bias) if norm.bias else self._none
        return self._weights.norm_weight(norm), bias, float(norm.eps)


def norm_constants(prefix: str, norm: Norm | None) -> dict[str, Any]:
    """A kernel's constants of one of its norms: `NORM` and `NORM_BIAS`, or `{prefix}NORM` and `{prefix}BIAS`."""
    kind, bias = NORM_KINDS[norm.kind] if norm else 0, bool(norm and norm.bias)
    return {f"{prefix}NORM": kind, f"{prefix}BIAS" if prefix else "NORM_BIAS": bias}
