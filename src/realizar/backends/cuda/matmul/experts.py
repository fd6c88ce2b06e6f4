"""Matmuls of pairs with the experts that tokens chose: a token and one expert that it goes through make a pair.

Each matmul is one launch for all pairs of a step, whose experts it reads on the device. Matrices in fragment order have
the mat-vec of integers, whatever the number of tokens; others have a kernel in Triton that reads float32. A pair's sums
have one order, so they have the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from realizar.backends.cuda.kernels.experts import multiply_float_pairs, multiply_plain_pairs
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.inputs import NO_NORM, ActivationBuffer, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.matmul.residual import EPILOGUE_COLUMNS, Residual
from realizar.backends.cuda.matmul.routing import ExpertsRead, Router
from realizar.backends.cuda.matmul.tuning_table import ExpertShape, measured_tiles
from realizar.backends.cuda.native.compiler import Source
from realizar.backends.cuda.native.experts.source import (
    EXPERT_SIZES,
    EXPERT_SUM_SIZES,
    expert_source,
    expert_sums_source,
)
from realizar.backends.cuda.native.sources import GatedActivation, MatvecTiles
from realizar.backends.cuda.weights.experts import ExpertMatrices, PackedExperts, Stack
from realizar.backends.cuda.weights.plain import PlainMatrix
from realizar.models.spec import Experts, ModelSpec

PAIR_TOKENS = 8
"""The most tokens of a step whose pairs are multiplied one by one; with more, experts are read once for several."""
_HOPPER_PAIRS = 48  # multiplied one by one there at the most, since gate and up and down of more are one launch
INTEGERS, FLOATS = InputFormat("int8"), InputFormat("f32")
_WARPS, _MOST_PARTS = 24, 6  # of a multiprocessor, by registers; that share a tile's columns
_SUM_BLOCKS, _SUM_WARPS = 2, 18  # of a multiprocessor, where a block has all of a token's experts; of such a block
_MOST_TILED = 4  # tokens, from which on tiles stay the same
_OUT_FEATURES, _COLUMNS = 16, 128  # of a block of Triton's kernels

Key = tuple[FragmentFormat, MatvecTiles, GatedActivation | None]
SumKey = tuple[FragmentFormat, MatvecTiles, int]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a step: number token * per_token + slot.

    Attributes:
        chosen: int32 [>= tokens * per_token], the expert of each, or -1.
        weights: float32, of as many, by which the outputs of experts are multiplied.
        per_token: experts that a token goes through, the shared one among them where the stacks have it.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    per_token: int


@dataclass(frozen=True, slots=True)
class ExpertsInput:
    """The readers of the norm before a mixture: its experts, and its router where that does not read the stream itself.

    Attributes:
        pairs: formats that the matmuls of pairs read.
        grouped: the format that grouped matmuls read, by number of tokens; None where pairs are multiplied in any step.
        pair_tokens: the most tokens of a step that multiplies pairs beside grouped matmuls.
        router: None where the router is a matmul of the norm in any step.
        folds: the mat-vec applies the norm's scale, in steps of few tokens.
        shared: the first matmul of the shared expert, where there is one beside the stacks.
        apart: the experts have a norm of their own, which nothing else reads.
    """

    pairs: tuple[InputFormat, ...]
    grouped: Callable[[int], InputFormat] | None = None
    pair_tokens: int = 0
    router: Router | None = None
    folds: bool = False
    shared: MergedLinear | None = None
    apart: bool = False

    @property
    def all_packed(self) -> bool:
        """True if the norm's scale may be left to the mat-vec."""
        return self.folds

    def is_routed(self, kind: StepKind) -> bool:
        """True if one kernel scores and chooses."""
        return self.router is not None and kind.tokens <= self.router.most_tokens

    def reads_stream(self, kind: StepKind) -> bool:
        """True if the router reads the stream itself."""
        return self.router is not None and (self.is_routed(kind) or self.router.halves is not None)

    def is_grouped(self, kind: StepKind) -> bool:
        """True if rows are multiplied expert by expert."""
        return self.grouped is not None and kind.tokens > self.pair_tokens

    def input_formats(self, kind: StepKind) -> tuple[InputFormat, ...]:
        formats = self.pairs
        if self.grouped is not None and self.is_grouped(kind):
            formats = (self.grouped(kind.tokens),)
        if not self.apart and not self.reads_stream(kind):
            formats = FLOATS, *formats
        if self.shared is not None:
            formats = *formats, *self.shared.input_formats(kind)
        return tuple(dict.fromkeys(formats))

    def applies_norm_scale(self, kind: StepKind) -> bool:
        """True if the norm's scale is left to the mat-vec."""
        if not self.folds or not self.is_routed(kind) or self.is_grouped(kind):
            return False
        shared = self.shared
        return shared is None or (shared.applies_norm_scale(kind) and shared.input_formats(kind) == (INTEGERS,))


@dataclass(frozen=True, slots=True)
class ExpertsOutput:
    """The outputs of a token's experts, which the norm after them adds up in the order of slots, as it does splits.

    In steps of up to `residual_tokens` down adds them up, and to the stream. `writes_halves` says by number of tokens
    whether they are float16, divided by `HALF_FACTOR` of `kernels.reduce`; None where they never are. Padding's keep
    what memory had, which may be NaN.
    """

    per_token: int
    width: int
    residual_tokens: int = 0
    writes_halves: Callable[[int], bool] | None = None
    bias: None = None

    def splits(self, kind: StepKind) -> int:
        return self.per_token

    def adds_residual(self, kind: StepKind) -> bool:
        """True if down adds to the stream; then no outputs are written."""
        return kind.tokens <= self.residual_tokens

    def rows(self, memory: torch.Tensor, tokens: int) -> torch.Tensor:
        """float32 or float16 [pairs, width], a view of `memory`, float32."""
        if self.writes_halves is not None and self.writes_halves(tokens):
            memory = memory.view(torch.float16)
        return memory[: tokens * self.per_token * self.width].view(-1, self.width)

    def partials(self, memory: torch.Tensor, tokens: int) -> torch.Tensor:
        """The rows as [slots, tokens, width]."""
        return self.rows(memory, tokens).view(tokens, self.per_token, -1).transpose(0, 1)


class ExpertMatmuls:
    """Multiplies pairs; `matmuls` is None where Triton's kernels run alone.

    `experts_read` counts the experts that mat-vecs of down read, and grouped matmuls.
    """

    def __init__(self, matmuls: MatmulKernels | None) -> None:
        self._matmuls = matmuls
        self.experts_read = ExpertsRead("cpu" if matmuls is None else matmuls.device)

    def pair_tokens(self, matrices: ExpertMatrices) -> int:
        """The most tokens of a step that multiplies pairs, where there are grouped matmuls.

        Matrices of floats have no mat-vec, and none for pairs; with `batch_invariant` one kind of matmul does all.
        """
        halves = any(isinstance(stack, PackedExperts) and not stack.format.has_matvec for stack in matrices.stacks)
        if halves or (self._matmuls is not None and self._matmuls.batch_invariant):
            return 0
        hopper = self._matmuls is not None and self._matmuls.tuning.wgmma
        return most_pair_tokens(matrices.experts.num_experts, matrices.experts.experts_per_token, hopper)

    def prepare(self, mixtures: Iterable[ExpertMatrices]) -> None:
        """Compile and load the kernels of mixtures; KernelError: one does not compile or does not fit the device."""
        if self._matmuls is None:
            return
        sources = [source for matrices in mixtures for source in self._sources(matrices)]
        self._matmuls.kernels.prepare(sources)

    def residual_tokens(self, matrices: ExpertMatrices) -> int:
        """The most tokens of a step in which `add` multiplies down; 0 where it never does.

        Shared experts that are not among them come after these and are added to their outputs.
        """
        down = matrices.down
        if not isinstance(down, PackedExperts) or not matrices.ends_with_activation:
            return 0
        if (matrices.experts.shared is not None and not matrices.shared) or matrices.per_token > _WARPS:
            return 0
        if down.out_features % EPILOGUE_COLUMNS:
            return 0
        counts = range(1, self.pair_tokens(matrices) + 1)
        return sum(self._sum_blocks(down, tokens) <= _SUM_BLOCKS for tokens in counts)

    def _sum_blocks(self, stack: PackedExperts, tokens: int) -> int:
        assert self._matmuls is not None
        return -(-stack.out_features // 16 * tokens // self._matmuls.tuning.processors)

    def _sum_key(self, stack: PackedExperts, tokens: int, per_token: int) -> SumKey:
        """The kernel of `add`: warps of a block share the columns of a token's experts evenly.

        They leave room for the blocks of the kernel after it, which asks for its first weights meanwhile.
        """
        at_once, chunks = self._sum_blocks(stack, tokens), stack.format.chunks(stack.in_features)
        most = min(_WARPS // at_once, _SUM_WARPS) // per_token
        parts = per_token * max(1, min(most, _MOST_PARTS, chunks // 2))
        return stack.format, MatvecTiles(1, 1, parts, 2, max(1, min(at_once, _WARPS // parts))), per_token

    def _sources(self, matrices: ExpertMatrices) -> Iterator[Source]:
        activation = gated_activation(matrices.experts) if matrices.ends_with_activation else None
        for stack, gated in (*((each, activation) for each in matrices.gate_up), (matrices.down, None)):
            if isinstance(stack, PackedExperts) and stack.format.has_matvec:
                for tokens in range(1, PAIR_TOKENS + 2):  # with more than the last they stay the same
                    yield expert_source(*self._key(stack, tokens, matrices.per_token, gated))
        for tokens in range(1, self.residual_tokens(matrices) + 1):
            assert isinstance(matrices.down, PackedExperts)
            yield expert_sums_source(*self._sum_key(matrices.down, tokens, matrices.per_token))

    def _key(self, stack: PackedExperts, tokens: int, per_token: int, activation: GatedActivation | None) -> Key:
        """The kernel of a step of `tokens`, by measured tiles or by rule; with `batch_invariant` one order of sums.

        What was measured counts the experts that routers choose, and their pairs.
        """
        assert self._matmuls is not None
        gated, tokens = activation is not None, 1 if self._matmuls.batch_invariant else tokens
        shape = ExpertShape.of_stack(stack.routed, stack.out_features, stack.in_features, gated)
        pairs, lines = tokens * per_token, self._matmuls.tuning.pair_lines if tokens <= PAIR_TOKENS else ()
        measured = measured_tiles(lines, pairs - tokens * stack.shared, shape, gated, 1)
        if isinstance(measured, MatvecTiles):
            return stack.format, measured, activation
        return stack.format, self._tiles(stack, min(pairs, _MOST_TILED * per_token), gated), activation

    def _tiles(self, stack: PackedExperts, pairs: int, gated: bool) -> MatvecTiles:
        """Tiles that give all warps of the device work with so many pairs, and each as many columns as it can have.

        Gate and up that end with the activation are two tiles of a block.
        """
        assert self._matmuls is not None
        tiles = 2 if gated else 1
        blocks = -(-stack.out_features // (16 * tiles)) * pairs
        at_once = -(-blocks // self._matmuls.tuning.processors)
        chunks = stack.format.chunks(stack.in_features)
        parts = max(1, min(_WARPS // (tiles * at_once), _MOST_PARTS, chunks // 2))
        resident = max(1, min(at_once, _WARPS // (tiles * parts)))
        return MatvecTiles(1, tiles, parts, 2, resident)

    def activate(
        self, stack: PackedExperts, bias: torch.Tensor | None, activation: GatedActivation, source: ActivationBuffer,
        pairs: Pairs, target: ActivationBuffer, tokens: int, norm: FoldedNorm | None = None,
    ) -> None:  # fmt: skip
        """Start target [pairs] = activation(gate) * up, of gate and up = source [tokens] times the pairs' experts.

        Args:
            stack: gate and up, interleaved. bias: theirs, as in `ExpertMatrices`.
            target: codes and terms of as many columns as gate has.
            norm: of `source`, where its scale is still missing.
        """
        self._launch(
            stack, bias, activation, source, pairs, (target.codes.data_ptr(), target.terms.data_ptr(), 0), tokens,
            pairs.per_token, norm,
        )  # fmt: skip

    def multiply(
        self, stack: Stack, bias: torch.Tensor | None, source: ActivationBuffer, pairs: Pairs, out: torch.Tensor,
        tokens: int, *, of_pairs: bool = False,
    ) -> None:  # fmt: skip
        """Start out [pairs] = source times the pairs' experts, with their biases.

        Args:
            bias: of the stack, as in `ExpertMatrices`.
            source: a row for each token, in the format of `input_format`.
            out: float32 [pairs, >= out_features], contiguous; gets columns from 0 on.
            of_pairs: `source` has a row for each pair; then the outputs are multiplied by the pairs' weights.
        """
        per_input, stride = 1 if of_pairs else pairs.per_token, out.stride(0)
        if isinstance(stack, PackedExperts):
            assert stride == stack.out_features
            factors = pairs.weights.data_ptr() if of_pairs else 0
            self._launch(stack, bias, None, source, pairs, (out.data_ptr(), 0, factors), tokens, per_input, None)
            return
        width, cols = out.shape[1], int(stack.shape[1]) if isinstance(stack, torch.Tensor) else stack.in_features
        grid = tokens * pairs.per_token, -(-width // _OUT_FEATURES)
        biases = pairs.weights if bias is None else bias  # anything: it is not read
        shared = source.values, source.cols, pairs.chosen, pairs.weights, biases, out, stride
        constants = {
            "PER_INPUT": per_input, "WEIGHED": of_pairs, "BIAS": bias is not None, "DEPENDENT": False,
            "OUT_FEATURES": _OUT_FEATURES, "COLUMNS": _COLUMNS,
        }  # fmt: skip
        if isinstance(stack, PlainMatrix):
            multiply_plain_pairs[grid](*shared, width, cols, **stack.arrays, **stack.constants, **constants)
        else:
            multiply_float_pairs[grid](*shared, stack, width, cols, **constants)

    def add(
        self, stack: PackedExperts, bias: torch.Tensor | None, source: ActivationBuffer, pairs: Pairs,
        residual: Residual, tokens: int,
    ) -> None:  # fmt: skip
        """Start hidden += scale * (the tokens' weighted sums of source times their experts), and begin the next norm.

        Args:
            stack: down, of as many out_features as the stream has. bias: of the stack, as in `ExpertMatrices`.
            source: a row for each pair.
            residual: without a bias.
            tokens: at most `residual_tokens`.
        """
        assert self._matmuls is not None
        assert residual.bias is None
        key = self._sum_key(stack, tokens, pairs.per_token)
        tiles = key[1]
        blocks = tiles.grid(stack.out_features, 1, 1)[0]
        target, weight = residual.target, residual.norm_weight
        arguments = [
            *stack.addresses, residual.hidden.data_ptr(),
            0 if bias is None else bias.data_ptr(), pairs.weights.data_ptr(), pairs.chosen.data_ptr(),
            source.codes.data_ptr(), source.terms.data_ptr(), self.experts_read.address(stack.shared),
            stack.stride, stack.strips, stack.out_features, stack.format.chunks(stack.in_features), blocks,
            residual.scale, 0 if weight is None else weight.data_ptr(),
            *((0, 0) if target is None else target.addresses),
            residual.square_sums.data_ptr(), int(residual.square_sums.shape[1]),
        ]  # fmt: skip
        grid, dependent = (blocks * tokens, 1, 1), self._matmuls.is_dependent(tokens)
        self._matmuls.start(expert_sums_source(*key), grid, tiles.threads, arguments, EXPERT_SUM_SIZES, dependent)

    def _launch(
        self, stack: PackedExperts, bias: torch.Tensor | None, activation: GatedActivation | None,
        source: ActivationBuffer, pairs: Pairs, target: tuple[int, int, int], tokens: int, per_input: int,
        norm: FoldedNorm | None,
    ) -> None:  # fmt: skip
        """Start the mat-vec; `target` has the addresses of output, its terms and factors."""
        assert self._matmuls is not None
        key = self._key(stack, tokens, pairs.per_token, activation)
        tiles = key[1]
        blocks = tiles.grid(stack.out_features, 1, 1)[0]
        arguments = [
            *stack.addresses, *target,
            0 if bias is None else bias.data_ptr(), pairs.chosen.data_ptr(), source.codes.data_ptr(),
            source.terms.data_ptr(), self.experts_read.address(stack.shared),
            stack.stride, stack.strips, stack.out_features, stack.format.chunks(stack.in_features), blocks, per_input,
            *(NO_NORM if norm is None else norm.arguments()),
        ]  # fmt: skip
        grid, dependent = (blocks * tokens * pairs.per_token, 1, 1), self._matmuls.is_dependent(tokens)
        self._matmuls.start(expert_source(*key), grid, tiles.threads, arguments, EXPERT_SIZES, dependent)


def most_pair_tokens(experts: int, per_token: int, hopper: bool) -> int:
    """The most tokens of a step that multiplies pairs: those whose pairs are up to half as many as the experts.

    `hopper`: the Hopper kernels run, by which fewer pairs pay.
    """
    pairs = min(experts // 2, _HOPPER_PAIRS) if hopper else experts // 2
    return min(PAIR_TOKENS, max(1, pairs // per_token))


def gated_activation(experts: Experts) -> GatedActivation:
    return "clamped" if experts.clamped else experts.activation


def input_format(stack: Stack) -> InputFormat:
    return INTEGERS if isinstance(stack, PackedExperts) else FLOATS


def expert_floats(spec: ModelSpec, tokens: int) -> int:
    """float32 of the largest sums of a step's pairs: gate's and up's, or the last matrix's."""
    sizes = (one.experts_per_token * max(2 * one.up.out_features, one.down.out_features) for _, one in spec.mixtures())
    return tokens * max(sizes, default=0)
