"""Matmuls of rows with the experts that each goes to: launches of the kernels in `native/grouped`.

    grouped = GroupedMatmuls(matmuls)
    places = GroupedBuffers(device, rows, per_token, shape, wgmma)   # once, for the largest step
    step = grouped.step(rows, per_token, shape)                      # places of a tile: by rows alone
    gate_up, down = grouped.route(step, stack, activation), grouped.route(step, down_stack, tiled=True)
    grouped.prepare([gate_up, down], experts)                                 # compiles; before a capture
    grouped.sort(chosen, step, experts, places)
    grouped.launch_gated(stack, x, step, places, gate_up)
    grouped.launch_pairs(down_stack, places.gated, step, places, down, out, weights)

`sort` sorts pairs (row * per_token + slot) by expert, in each by pair, and pads an expert's to whole tiles. Nothing
returns to the host: the kernels read the number of tiles, so a captured graph serves any choice of experts. A choice
below 0 or beyond the experts goes nowhere: no weights are read for it and no output is written.

Rows of x are read where they lie. Gate and up of an expert are interleaved by 64 out_features, as of a dense
feed-forward; activation(gate) * up goes to `places.gated` in the order of tiles, from where down reads it. Matrices
without an activation write float32 rows of pairs. A row's products are added in one order, whatever the tiles,
but those of `DirectTiles`, which have orders of their own. Where tiles are large or a measured line says so, a kernel
lays the rows in tiles first (`places.laid`), and gate and up read whole tiles as down does; so do those in 8-bit floats
(`matmul.fp8`), where a step has enough pairs of each expert. Where `fuse` has a kernel for a step, `launch_fused`
stands for all three launches, with the same bits.

With programmatic dependent launch each kernel waits itself for what it reads. Down reads the list of tiles and its
first weights before it waits for the kernel before it, which must be `launch_gated`, after `sort`; so do gate and up
where rows are laid in tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from realizar.backends.cuda.layouts.activations import padded_cols
from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.experts import ExpertMatmuls, Pairs, gated_activation
from realizar.backends.cuda.matmul.fp8 import FP8_ROWS, decoded_bytes, expert_tiles, laid_bytes, launch_fp8_experts
from realizar.backends.cuda.matmul.grouped_tiles import (
    MOST_STAGES,
    StepTiles,
    fits,
    fitted,
    fused_tiles,
    grouped_tiles,
    lays_rows,
    step_tiles,
)
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.matmul.routing import MANY_TOKENS, ExpertsRead
from realizar.backends.cuda.matmul.tuning_table import (
    ExpertLine,
    ExpertShape,
    ExpertTiles,
    is_laid,
    measured_tiles,
)
from realizar.backends.cuda.native.compiler import Source
from realizar.backends.cuda.native.grouped.source import (
    LAID_CHUNKS,
    AnyTiles,
    DirectTiles,
    FusedTiles,
    GroupedTiles,
    block_pairs,
    fused_source,
    fused_words,
    grouped_source,
    lay_source,
    route_many_sources,
    route_source,
    route_warps,
    sum_words,
)
from realizar.backends.cuda.native.sources import FP8Tiles, GatedActivation, fp8_experts_source, fp8_weights_source
from realizar.backends.cuda.weights.experts import ExpertMatrices, PackedExperts, Stack
from realizar.models.tensor_source import TensorName

_SIZES, _SORT_SIZES, _LAY_SIZES = "pppppppppppiiii", "pppppii", "ppppppiii"  # of parameters
_SORT_MANY_SIZES, _FUSED_SIZES = "pppppppii", "pppppii" * 2 + "p" * 8 + "iii"


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """The kernel of a grouped matmul.

    Attributes:
        tiled: its input is what `launch_gated` writes.
        activation: of gate and up; None where sums go to rows of pairs.
        chunks: of a row of weights.
        halves: sums leave as halves, divided by `HALF_FACTOR` of `kernels.reduce`.
    """

    format: FragmentFormat
    tiles: AnyTiles | FP8Tiles
    tiled: bool
    activation: GatedActivation | None
    chunks: int
    halves: bool = False

    @property
    def lays(self) -> bool:
        """True if rows of x are laid in tiles first."""
        return not self.tiled and (isinstance(self.tiles, FP8Tiles) or is_laid(self.tiles))

    @property
    def gathers(self) -> bool:
        """True if rows of x are found by their pairs, False if they lie in tiles."""
        return not self.tiled and not self.lays

    @property
    def sources(self) -> list[Source]:
        """Kernels of the matmul, the last its own."""
        laid = [lay_source(self.tiles.tokens, isinstance(self.tiles, FP8Tiles))] if self.lays else []
        if isinstance(self.tiles, FP8Tiles):
            decode = [] if self.tiles.stored else [fp8_weights_source(self.format)]
            return [*laid, *decode, fp8_experts_source(self.tiles, self.activation, self.halves)]
        own = grouped_source(self.format, self.tiles, self.gathers, self.activation, self.chunks, self.halves)
        return [*laid, own]


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """The kernel of gate and up and of down in one launch.

    Attributes:
        formats: of gate and up, and of down. chunks: of a row of theirs.
        experts: of a layer.
    """

    formats: tuple[FragmentFormat, FragmentFormat]
    tiles: FusedTiles
    activation: GatedActivation
    chunks: tuple[int, int]
    experts: int

    @property
    def sources(self) -> list[Source]:
        return [fused_source(self.formats, self.tiles, self.activation, self.chunks, self.experts)]


class GroupedBuffers:
    """Memory in which the kernels of a layer leave results for each other, for steps of up to `rows`; layers share it.

    Attributes:
        slots: int32 [places], the pair of each place of a tile, or -1.
        work: int32 [1 + tiles], the number of tiles, then each one's expert times two, plus one if it has several.
        starts: int32 [experts + 1], the first pair of each expert among all that go somewhere.
        sums: int32, what the launches of a sort of many pairs leave for each other. arrivals: int32 [1], 0 between
            sorts.
        gated: float16 [places * padded width], outputs of gate and up in the order of tiles; or, as many bytes as they
            take, 8-bit floats and behind those of all places their scales.
        laid: float16 [places * padded hidden], rows of x in the order of tiles, for steps that lay them; or likewise.
        progress: int32 of zeros, in which blocks of `launch_fused` tell each other how far they are.
    """

    def __init__(
        self, device: torch.device | str, rows: int, per_token: int, shape: ExpertShape, wgmma: bool,
        lines: Sequence[ExpertLine] = (), shared: int = 0, fp8_pairs: int = 0,
    ) -> None:  # fmt: skip
        """Allocate for the largest step, of `rows`.

        Args:
            shape: of the mixture; its width is a multiple of 64, or 0 where nothing is written in tiles.
            wgmma: whether the Hopper kernel runs. lines: measured on the device.
            shared, fp8_pairs: as in `step_tiles`.
        """
        own = [line for line in lines if line.shape == shape]  # once, since thousands of steps look through them
        steps = [step_tiles(each, per_token, shape, wgmma, own, shared, fp8_pairs) for each in range(1, rows + 1)]
        places = max(step.places for step in steps)
        self.slots = torch.full((places,), -1, dtype=torch.int32, device=device)
        self.work = torch.zeros(1 + max(step.count for step in steps), dtype=torch.int32, device=device)
        experts, pairs = shape.experts + shared, max(step.pairs for step in steps)
        self.starts = torch.zeros(experts + 1, dtype=torch.int32, device=device)
        self.sums = torch.zeros(sum_words(pairs, experts), dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        gated = max(_tile_halves(step, shape.width) for step in steps)
        self.gated = torch.zeros(gated, dtype=torch.float16, device=device)
        laid = max((_tile_halves(step, shape.hidden) for step in steps if _lays(own, step, shape, wgmma)), default=0)
        self.laid = torch.zeros(laid, dtype=torch.float16, device=device)
        self.progress = torch.zeros(fused_words(experts), dtype=torch.int32, device=device)


class GroupedMatmuls:
    """Chooses, compiles and launches one device's, by its measured `lines`. Used by one thread, in one context."""

    def __init__(self, matmuls: MatmulKernels, experts_read: ExpertsRead | None = None, fp8_pairs: int = 0) -> None:
        """Share device and tuning with the dense matmuls; sorts add what they find to `experts_read`.

        `fp8_pairs`: as in `step_tiles`.
        """
        self._matmuls, self._tuning, self.fp8_pairs = matmuls, matmuls.tuning, fp8_pairs
        self.lines = self._tuning.grouped_lines(in_order=matmuls.batch_invariant)
        self._experts_read, self._dependent = experts_read, matmuls.capability >= (9, 0)

    def step(self, rows: int, per_token: int, shape: ExpertShape, shared: int = 0) -> StepTiles:
        """See `step_tiles`."""
        return step_tiles(rows, per_token, shape, self._tuning.wgmma, self.lines, shared, self.fp8_pairs)

    def route(
        self, step: StepTiles, stack: PackedExperts, activation: GatedActivation | None = None, tiled: bool = False,
        halves: bool = False,
    ) -> GroupedConfig:  # fmt: skip
        """Choose the kernel of a grouped matmul.

        An `activation` is of interleaved gate and up, None writes rows of pairs, with `halves` as float16 where the
        Hopper kernel runs; `tiled` reads what `launch_gated` writes.
        """
        gated, shared = activation is not None, self._tuning.shared_bytes
        chunks = stack.format.chunks(stack.in_features)
        shape = ExpertShape.of_stack(stack.routed, stack.out_features, stack.in_features, gated)
        if step.in_fp8:
            halves = halves and stack.out_features % 8 == 0
            return GroupedConfig(stack.format, expert_tiles(stack), tiled, activation, chunks, halves)
        measured = _measured(self.lines, step, shape, gated)
        tiles: AnyTiles
        if isinstance(measured, DirectTiles) and fits(measured, stack.format, chunks, shared):
            tiles = measured
        elif isinstance(measured, GroupedTiles):
            tiles = fitted(replace(measured, stages=MOST_STAGES), stack.format, gated, shared)
        else:
            tiles = grouped_tiles(step.tokens, stack.format, gated, self._tuning.wgmma, shared)
        halves = halves and tiles.kind == "wgmma" and stack.out_features % 4 == 0
        return GroupedConfig(stack.format, tiles, tiled, activation, chunks, halves)

    def fuse(
        self, step: StepTiles, gate_up: PackedExperts, down: PackedExperts, activation: GatedActivation
    ) -> FusedConfig | None:
        """Choose the kernel of a step that multiplies gate and up and down in one launch; None where two do."""
        routes = self.route(step, gate_up, activation), self.route(step, down, tiled=True)
        if any(route.tiles.kind != "wgmma" or is_laid(route.tiles) for route in routes):
            return None
        formats, chunks = (gate_up.format, down.format), (routes[0].chunks, routes[1].chunks)
        tiles = fused_tiles(step, formats, gate_up.count, self._tuning.shared_bytes)
        return None if tiles is None else FusedConfig(formats, tiles, activation, chunks, gate_up.count)

    def prepare(self, wanted: Iterable[GroupedConfig | FusedConfig], experts: int) -> None:
        """Compile and load kernels and the sort, in parallel where they are not on disk; not during a capture.

        `experts` are those of a layer, with the shared one where it is among them. Raises KernelError where a kernel
        does not compile or does not fit the device.
        """
        sources = [source for config in wanted for source in config.sources]
        self._matmuls.kernels.prepare([*sources, route_source(experts), *route_many_sources(experts)])

    def sort(self, chosen: torch.Tensor, step: StepTiles, experts: int, buffers: GroupedBuffers) -> None:
        """Start the sort of a step's pairs by expert into `slots`, `work` and `starts`; KernelError as of
        `launch_gated`.

        `chosen` is int32 [rows, per_token], contiguous, an expert each, or below 0 in rows that go nowhere.
        """
        addresses = [each.data_ptr() for each in (chosen, buffers.slots, buffers.work, buffers.starts)]
        counts = self._counts(step)
        sizes, threads = [step.pairs, step.tokens], route_warps(experts) * 32
        blocks = -(-step.pairs // block_pairs(experts))
        if blocks == 1:
            arguments = [*addresses, counts, *sizes]
            self._matmuls.start(route_source(experts), (1, 1, 1), threads, arguments, _SORT_SIZES, self._dependent)
            return
        arguments = [*addresses, counts, buffers.sums.data_ptr(), buffers.arrivals.data_ptr(), *sizes]
        for source in route_many_sources(experts):
            self._matmuls.start(source, (blocks, 1, 1), threads, arguments, _SORT_MANY_SIZES, self._dependent)

    def _counts(self, step: StepTiles) -> int:
        return 0 if self._experts_read is None else self._experts_read.address(int(step.shared > 0))

    def launch_fused(
        self, stacks: tuple[PackedExperts, PackedExperts], biases: tuple[torch.Tensor | None, torch.Tensor | None],
        x: ActivationBuffer, pairs: Pairs, step: StepTiles, buffers: GroupedBuffers, config: FusedConfig,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Start out[pair] = (down @ (activation(gate) * up) + bias) * weight of each pair that goes somewhere.

        Args:
            stacks: gate and up, interleaved, and down. biases: theirs, float32 [experts, out_features].
            x: the step's rows; a norm must be applied already.
            step, config: from `step` and `fuse`.
            out: float32 [pairs, out_features], contiguous; rows of pairs that go nowhere are not written.

        Raises:
            KernelError: the kernel can't be compiled, loaded or launched.
        """
        matrices: list[int] = []
        for stack, bias, chunks in zip(stacks, biases, config.chunks, strict=True):
            matrices += [*stack.addresses, _address(bias), stack.stride, stack.out_features, chunks]
        memory = x.values, x.scales, buffers.gated, out, pairs.weights, pairs.chosen
        addresses = [*(each.data_ptr() for each in memory), self._counts(step), buffers.progress.data_ptr()]
        arguments = [*matrices, *addresses, pairs.per_token, x.format.block_tokens, step.pairs]
        each = zip(config.tiles.matrices, stacks, strict=True)
        items = sum(tiles.items(stack.out_features) for tiles, stack in each)
        grid = min(step.count * items, config.tiles.blocks * self._tuning.processors), 1, 1
        (source,) = config.sources
        self._matmuls.start(source, grid, config.tiles.threads, arguments, _FUSED_SIZES, self._dependent)

    def launch_gated(
        self, stack: PackedExperts, x: ActivationBuffer, per_token: int, step: StepTiles, buffers: GroupedBuffers,
        config: GroupedConfig, bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start buffers.gated = activation(gate) * up of each pair, in the order of tiles.

        Args:
            stack: gate and up, interleaved. x: the step's rows; a norm must be applied already.
            step, buffers: as `sort` had them. config: from `route` with an activation.
            bias: float32 [experts, out_features], in the order in which gate and up are interleaved.

        Raises:
            KernelError: the kernel can't be compiled, loaded or launched.
        """
        values, scales = x.addresses
        if config.lays:
            self._lay(x, per_token, step, buffers, config)
            values = buffers.laid.data_ptr()
        if isinstance(config.tiles, FP8Tiles):
            laid = _addresses(buffers.laid, step, stack.in_features)
            gated = _addresses(buffers.gated, step, stack.out_features // 2)
            self._multiply_fp8(stack, (_address(bias), *gated, 0, *laid), step, buffers, config)
            return
        inputs = values, scales, per_token, x.format.block_tokens
        self._multiply(stack, inputs, step, buffers, config, buffers.gated, bias, None)

    def _lay(
        self, x: ActivationBuffer, per_token: int, step: StepTiles, buffers: GroupedBuffers, config: GroupedConfig,
    ) -> None:  # fmt: skip
        (values, _), chunks, laid, scales = x.addresses, config.chunks, buffers.laid.data_ptr(), (0, 0)
        if isinstance(config.tiles, FP8Tiles):
            chunks, (laid, laid_scales) = -(-chunks // 2), _addresses(buffers.laid, step, x.cols)
            scales = x.terms.data_ptr(), laid_scales
        lists = [buffers.slots.data_ptr(), buffers.work.data_ptr()]
        arguments = [values, laid, *lists, *scales, chunks, per_token, x.format.block_tokens]
        grid, (source, *_) = (step.count, -(-chunks // LAID_CHUNKS), 1), config.sources
        self._matmuls.start(source, grid, step.tokens * 8, arguments, _LAY_SIZES, self._dependent)

    def _multiply_fp8(
        self, stack: PackedExperts, addresses: Sequence[int], step: StepTiles, buffers: GroupedBuffers,
        config: GroupedConfig,
    ) -> None:  # fmt: skip
        """`addresses`: of biases, outputs and their scales, weights of pairs, and rows in tiles and their scales."""
        lists = buffers.slots.data_ptr(), buffers.work.data_ptr()
        launch_fp8_experts(
            self._matmuls, stack, (*addresses, *lists), step.count, config.activation, config.halves
        )  # fmt: skip

    def launch_pairs(
        self, stack: PackedExperts, x: ActivationBuffer | None, per_token: int, step: StepTiles,
        buffers: GroupedBuffers, config: GroupedConfig, out: torch.Tensor, weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start out[pair] = (x[pair] @ matrix.T + bias) * weights[pair] for each pair that goes somewhere.

        Args:
            x: rows, or None for `buffers.gated`.
            per_token: pairs that share a row of x: experts of a row, or 1 where x has a row for each pair.
            step, buffers: as `sort` had them. config: from `route` without an activation, `tiled` where x is None.
            out: float32, or float16 with halves, [pairs, out_features], contiguous; rows of pairs that go nowhere are
                not written.
            weights: float32 [pairs]. bias: float32 [experts, out_features].

        Raises:
            KernelError: the kernel can't be compiled, loaded or launched.
        """
        if isinstance(config.tiles, FP8Tiles):
            gated = _addresses(buffers.gated, step, stack.in_features)
            outputs = _address(bias), out.data_ptr(), 0, _address(weights)
            self._multiply_fp8(stack, (*outputs, *gated), step, buffers, config)
            return
        inputs = buffers.gated.data_ptr(), 0, 1, 1
        if x is not None:
            inputs = x.values.data_ptr(), x.scales.data_ptr(), per_token, x.format.block_tokens
        self._multiply(stack, inputs, step, buffers, config, out, bias, weights)

    def _multiply(
        self, stack: PackedExperts, inputs: tuple[int, int, int, int], step: StepTiles, buffers: GroupedBuffers,
        config: GroupedConfig, out: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None,
    ) -> None:  # fmt: skip
        assert not isinstance(config.tiles, FP8Tiles)
        x, scales, share, block = inputs
        lists = [x, scales, buffers.slots.data_ptr(), buffers.work.data_ptr()]
        sizes = [stack.stride, stack.out_features, stack.format.chunks(stack.in_features), share, block]
        arguments = [*stack.addresses, _address(bias), out.data_ptr(), _address(weights), *lists, *sizes]
        blocks = min(step.count * config.tiles.items(stack.out_features), config.tiles.blocks * self._tuning.processors)
        grid, threads = (blocks, 1, 1), config.tiles.threads
        self._matmuls.start(config.sources[-1], grid, threads, arguments, _SIZES, self._dependent)


def _measured(lines: Sequence[ExpertLine], step: StepTiles, shape: ExpertShape, gated: bool) -> ExpertTiles | None:
    return measured_tiles(lines, step.pairs - step.shared, shape, gated, step.tokens)


def _lays(lines: Sequence[ExpertLine], step: StepTiles, shape: ExpertShape, wgmma: bool) -> bool:
    if step.in_fp8:
        return True
    measured = _measured(lines, step, shape, True)
    return lays_rows(step.tokens, wgmma) if measured is None else is_laid(measured)


def _tile_halves(step: StepTiles, cols: int) -> int:
    """float16 of a step's rows of so many columns in tiles, or the bytes of 8-bit floats in as many."""
    return step.places * (sum(laid_bytes(cols)) // 2 if step.in_fp8 else padded_cols(cols))


def _addresses(rows: torch.Tensor, step: StepTiles, cols: int) -> tuple[int, int]:
    """Addresses of the 8-bit floats of a step's rows in tiles, and of their scales."""
    codes, _ = laid_bytes(cols)
    return rows.data_ptr(), rows.data_ptr() + step.places * codes


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_Key = tuple[int, ExpertShape, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    step: StepTiles
    gate_up: GroupedConfig
    down: GroupedConfig
    fused: FusedConfig | None  # where both are one launch


class GroupedExperts:
    """Grouped matmuls of all mixtures of a model, for steps of up to `rows`.

    `pairs` says which mixtures have grouped matmuls, and from which number of tokens on; `fp8_pairs` is as in
    `step_tiles`.
    """

    def __init__(self, matmuls: MatmulKernels, pairs: ExpertMatmuls, rows: int, fp8_pairs: int = 0) -> None:
        self._matmuls, self._pairs, self._rows = matmuls, pairs, rows
        self._grouped = GroupedMatmuls(matmuls, pairs.experts_read, fp8_pairs)
        self._buffers: dict[_Key, GroupedBuffers] = {}
        self._plans: dict[tuple[TensorName, int], _Plan] = {}

    def input_format(self, matrices: ExpertMatrices, tokens: int) -> InputFormat:
        """What `launch_gate_up` reads: row by row where they are laid in tiles, else as dense matmuls do."""
        plan = self._plan(matrices, tokens)
        if plan.step.in_fp8:
            return FP8_ROWS
        return InputFormat("half", 1 if plan.gate_up.lays else self._matmuls.tuning.block_tokens(tokens))

    def prepare(self, mixtures: Iterable[ExpertMatrices], counts: Iterable[int]) -> None:
        """Compile and load kernels for these numbers of tokens, and allocate what they leave for each other.

        But for decoded weights, whose memory `MatmulKernels.decoded` makes.

        Raises KernelError where one does not compile or does not fit the device.
        """
        sizes = sorted(counts)
        for matrices in mixtures:
            if not matrices.ends_with_activation:
                continue
            self._buffers_of(matrices)
            least = self._pairs.pair_tokens(matrices)
            plans = [self._plan(matrices, tokens) for tokens in sizes if tokens > least]
            wanted: set[GroupedConfig | FusedConfig] = set()
            for plan in plans:
                wanted |= {plan.gate_up, plan.down} if plan.fused is None else {plan.fused}
            self._grouped.prepare(wanted, matrices.count)
            if any(plan.step.in_fp8 for plan in plans):
                self._matmuls.expect_decoded(max(decoded_bytes([_packed(stack)]) for stack in matrices.stacks))

    def launch_gate_up(self, matrices: ExpertMatrices, source: ActivationBuffer, pairs: Pairs, tokens: int) -> None:
        """Sort the pairs of `tokens` tokens by expert, and start gate and up, with the activation.

        Nothing where `launch_down` starts all of it.
        """
        plan, buffers = self._plan(matrices, tokens), self._buffers_of(matrices)
        if plan.fused is not None:
            return
        self._grouped.sort(pairs.chosen, plan.step, matrices.count, buffers)
        (stack,), (bias,) = matrices.gate_up, matrices.gate_up_biases
        self._grouped.launch_gated(_packed(stack), source, pairs.per_token, plan.step, buffers, plan.gate_up, bias)

    def launch_down(
        self, matrices: ExpertMatrices, source: ActivationBuffer, pairs: Pairs, out: torch.Tensor, tokens: int
    ) -> None:
        """Start out [pairs, out_features] = weights of the pairs times down, of what gate and up left or make of
        `source`.

        `out` is float16 where `writes_halves`, else float32.
        """
        plan, buffers = self._plan(matrices, tokens), self._buffers_of(matrices)
        if plan.fused is not None:
            stacks = _packed(matrices.gate_up[0]), _packed(matrices.down)
            biases = matrices.gate_up_biases[0], matrices.down_bias
            self._grouped.launch_fused(stacks, biases, source, pairs, plan.step, buffers, plan.fused, out)
            return
        assert out.dtype == (torch.float16 if plan.down.halves else torch.float32)
        self._grouped.launch_pairs(
            _packed(matrices.down), None, 1, plan.step, buffers, plan.down, out, pairs.weights, matrices.down_bias
        )

    def writes_halves(self, matrices: ExpertMatrices, tokens: int) -> bool:
        """True if down's outputs are halves in a step of so many tokens."""
        return tokens > MANY_TOKENS and self._plan(matrices, tokens).down.halves

    def _plan(self, matrices: ExpertMatrices, tokens: int) -> _Plan:
        """Tiles and kernels of a step, made once: steps without a graph ask for them layer by layer."""
        experts = matrices.experts
        key = experts.up.weight, tokens
        if key not in self._plans:
            step = self._grouped.step(tokens, experts.experts_per_token, ExpertShape.of(experts), matrices.shared)
            gate_up = self._grouped.route(step, _packed(matrices.gate_up[0]), gated_activation(experts))
            added_later = experts.shared is not None and experts.norms is None and not matrices.shared
            halves = tokens > MANY_TOKENS and not added_later and not self._matmuls.batch_invariant
            down = self._grouped.route(step, _packed(matrices.down), tiled=True, halves=halves)
            stacks = _packed(matrices.gate_up[0]), _packed(matrices.down)
            fused = self._grouped.fuse(step, *stacks, gated_activation(experts))
            self._plans[key] = _Plan(step, gate_up, down, fused)
        return self._plans[key]

    def _buffers_of(self, matrices: ExpertMatrices) -> GroupedBuffers:
        experts = matrices.experts
        per_token, shape, shared = key = experts.experts_per_token, ExpertShape.of(experts), matrices.shared
        if key not in self._buffers:
            wgmma = self._matmuls.tuning.wgmma
            grouped = self._grouped
            self._buffers[key] = GroupedBuffers(
                self._matmuls.device, self._rows, per_token, shape, wgmma, grouped.lines, shared, grouped.fp8_pairs
            )
        return self._buffers[key]


def _packed(stack: Stack) -> PackedExperts:
    assert isinstance(stack, PackedExperts)
    return stack
