"""Timing tiles and splits on the device at hand, and writing the table that `matmul.tuning_table` reads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.layouts.activations import padded_cols
from realizar.backends.cuda.layouts.fragments import BLOCK, fragment_format
from realizar.backends.cuda.matmul.experts import INTEGERS, ExpertMatmuls, Key, Pairs
from realizar.backends.cuda.matmul.grouped import GroupedBuffers, GroupedConfig, GroupedMatmuls
from realizar.backends.cuda.matmul.grouped_tiles import StepTiles, most_tiles
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, ActivationBuffers, InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.matmul.tuning_table import (
    ExpertLine,
    ExpertShape,
    Line,
    is_laid,
    own_table,
    updated_expert_lines,
    updated_lines,
    write_table,
)
from realizar.backends.cuda.native.experts.source import expert_source
from realizar.backends.cuda.native.grouped.source import AnyTiles, sum_words
from realizar.backends.cuda.native.sources import GatedActivation, MatvecTiles
from realizar.backends.cuda.tuning.experts import TunedExperts
from realizar.backends.cuda.tuning.sweep import Shape, sweep
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads, table_of
from realizar.errors import CapacityError
from realizar.quantization.layout import WeightLayout
from realizar.quantization.source import random_source

_CACHE_TIMES = 4  # what is read for a time is this many times the last-level cache


def copies(out_features: int, cols: int, count: int, layout: WeightLayout) -> list[PackedMatrix]:
    """Random matrices of one shape, each in memory of its own; rows repeat after 64, which no kernel notices."""
    one = pack_by_threads([random_source(layout, BLOCK, cols, np.random.default_rng(1), 0.02)], "cuda")
    strips = -(-out_features // BLOCK)
    scales = one.block_scales.repeat(strips)
    return [
        dataclasses.replace(one, out_features=out_features, weights=one.weights.repeat(strips), block_scales=scales)
        for _ in range(count)
    ]


class DeviceMeter:
    """Times matmuls on the device at hand; matrices of a shape together do not fit its cache."""

    def __init__(self, matmuls: MatmulKernels) -> None:
        self._matmuls = matmuls
        self._matrices: list[PackedMatrix] = []
        self._inputs: dict[tuple[int, InputFormat], ActivationBuffer] = {}

    def take(self, work: Shape) -> None:
        self._matrices, self._inputs = [], {}  # freed before others are made
        one = copies(work.out_features, work.cols, 1, work.layout)[0]
        count = max(2, _CACHE_TIMES * _cache_bytes(self._matmuls) // one.size_bytes)
        self._matrices = copies(work.out_features, work.cols, count, work.layout)

    def prepare(self, candidates: Sequence[Line]) -> None:
        self._matmuls.prepare([(self._matrices[0].format, self._config(each)) for each in candidates])

    def ms(self, candidate: Line) -> float:
        config, first, tokens = self._config(candidate), self._matrices[0], candidate.tokens
        key = tokens, config.format
        if key not in self._inputs:
            x = torch.randn(tokens, first.in_features, device=self._matmuls.device)
            self._inputs = {key: self._matmuls.written(x, config.format)}
        x_written = self._inputs[key]
        partials = torch.empty((config.splits, tokens, first.out_features), device=self._matmuls.device)

        def run() -> None:
            for matrix in self._matrices:
                self._matmuls.launch(matrix, x_written, partials, tokens, config)

        return replay_ms(run, 3) / len(self._matrices)

    def _config(self, candidate: Line) -> MatmulConfig:
        """As a matmul of a candidate's tiles runs: in long steps by blocks that stay."""
        first = self._matrices[0]
        tiles = self._matmuls.tuning.staying(candidate.tiles, candidate.tokens, first.in_features, first.format)
        input_format = INTEGERS if isinstance(tiles, MatvecTiles) else InputFormat("half", tiles.tokens)
        return MatmulConfig(tiles, input_format, candidate.splits, self._matmuls.is_dependent(candidate.tokens))


def _cache_bytes(matmuls: MatmulKernels) -> int:
    return int(torch.cuda.get_device_properties(matmuls.device).L2_cache_size)


def tune_device(
    device: DeviceProfile, shapes: Sequence[Shape], token_counts: Sequence[int],
    measured: Callable[[Line | ExpertLine], None], mixtures: Sequence[TunedExperts] = (),
) -> Path:  # fmt: skip
    """Measure the matmuls of a model here, and write this machine's table; its lines of other matmuls stay.

    `measured` is called with each candidate's line. Returns the path of the table.

    Raises:
        CapacityError: the card runs no CUDA matmuls, or has too little memory.
        KernelError: no kernel compiles.
    """
    if not device.has_cuda_kernels:
        raise CapacityError(f"{device.name} can't run the kernels that are tuned: they need compute capability 8.0")
    with device_errors():
        matmuls = MatmulKernels(device.torch_device)
        tuning = matmuls.tuning
        lines = sweep(tuning, shapes, token_counts, DeviceMeter(matmuls), measured)
        of_experts = sweep(tuning, mixtures, token_counts, ExpertDeviceMeter(matmuls), measured)
    path = own_table(device.name)
    write_table(path, updated_lines(tuning.lines, lines), updated_expert_lines(tuning.expert_lines, of_experts))
    return path


_MOST_LAUNCHES = 48  # of a graph


def random_experts(count: int, out_features: int, cols: int, layout: WeightLayout) -> PackedExperts:
    """Experts of random bytes, which no kernel's time depends on."""
    weight_format = fragment_format(layout)
    weights = torch.randint(
        0, 60, (count * weight_format.size_bytes(out_features, cols),), dtype=torch.uint8, device="cuda"
    )
    scales = torch.full((count * -(-out_features // BLOCK),), 1e-3, device="cuda")
    return PackedExperts(out_features, cols, weight_format, weights, scales, table_of(layout, "cuda"), count=count)


def random_choices(rows: int, per_token: int, experts: int, layers: int, skew: float = 0.0) -> list[torch.Tensor]:
    """Experts of each row, for each of some layers: int32 [rows, per_token]; `skew`: the exponent of Zipf's law."""
    rng = np.random.default_rng(rows)
    law = skew * np.log(np.arange(1, experts + 1))
    noise = [rng.gumbel(size=(rows, experts)) - rng.permutation(law) for _ in range(layers)]
    return [torch.from_numpy(np.argsort(-each, axis=1)[:, :per_token].astype(np.int32).copy()).cuda() for each in noise]


def step_of(pairs: int, experts: int, places: int) -> StepTiles:
    """The tiles of a step of so many pairs, with any number of places."""
    return StepTiles(pairs, places, most_tiles(pairs, experts, places))


def buffers_of(step: StepTiles, experts: int, width: int, hidden: int) -> GroupedBuffers:
    """Buffers for the tiles of a step, whose rows any kernel may lay."""
    buffers = GroupedBuffers("cuda", 1, 1, ExpertShape(experts, BLOCK, BLOCK), True)
    buffers.slots = torch.full((step.places,), -1, dtype=torch.int32, device="cuda")
    buffers.work = torch.zeros(1 + step.count, dtype=torch.int32, device="cuda")
    buffers.sums = torch.zeros(sum_words(step.pairs, experts), dtype=torch.int32, device="cuda")
    buffers.gated = torch.zeros(step.places * width, dtype=torch.float16, device="cuda")
    buffers.laid = torch.zeros(step.places * padded_cols(hidden), dtype=torch.float16, device="cuda")
    return buffers


@dataclass(slots=True)
class _Step:
    tiles: StepTiles
    x: ActivationBuffer
    rows: ActivationBuffer  # the same, each for itself, as kernels read them that lay them in tiles
    buffers: list[GroupedBuffers]
    out: torch.Tensor
    weights: torch.Tensor


class _PairMatmuls(ExpertMatmuls):
    def __init__(self, matmuls: MatmulKernels, tiles: MatvecTiles) -> None:
        super().__init__(matmuls)
        self._given = tiles

    def _key(self, stack: PackedExperts, tokens: int, per_token: int, activation: GatedActivation | None) -> Key:
        return stack.format, self._given, activation


class ExpertDeviceMeter:
    """Times matmuls over experts on the device at hand; what the launches of a graph read does not fit its cache."""

    def __init__(self, matmuls: MatmulKernels) -> None:
        self._matmuls, self._grouped = matmuls, GroupedMatmuls(matmuls)
        self._stacks: dict[bool, list[PackedExperts]] = {}
        self._per_token, self._shape = 1, ExpertShape(1, BLOCK, BLOCK)
        self._step: tuple[int, int, _Step] | None = None

    def take(self, work: TunedExperts) -> None:
        self._stacks, self._step = {}, None  # freed before others are made
        self._per_token, self._shape = work.per_token, work.shape
        count, hidden, width = work.shape.experts, work.shape.hidden, work.shape.width
        for gated, sizes, layout in ((True, (2 * width, hidden), work.gate_up), (False, (hidden, width), work.down)):
            first = random_experts(count, *sizes, layout)
            layers = max(2, -(-_CACHE_TIMES * _cache_bytes(self._matmuls) // first.size_bytes))
            self._stacks[gated] = [first, *(random_experts(count, *sizes, layout) for _ in range(layers - 1))]

    def prepare(self, candidates: Sequence[ExpertLine]) -> None:
        of_groups = [(one.gated, one.tiles) for one in candidates if not isinstance(one.tiles, MatvecTiles)]
        self._grouped.prepare([self._config(*each) for each in of_groups], self._shape.experts)
        of_pairs = [(one.gated, one.tiles) for one in candidates if isinstance(one.tiles, MatvecTiles)]
        self._matmuls.kernels.prepare(expert_source(*self._key(*each)) for each in of_pairs)

    def ms(self, candidate: ExpertLine) -> float:
        gated, tiles, tokens = candidate.gated, candidate.tiles, candidate.pairs // self._per_token
        stacks = self._stacks[gated]
        read = min(candidate.pairs, self._shape.experts) * stacks[0].stride
        launches = max(len(stacks), min(_MOST_LAUNCHES, -(-_CACHE_TIMES * _cache_bytes(self._matmuls) // read)))
        ordered = [stacks[index % len(stacks)] for index in range(launches)]
        if isinstance(tiles, MatvecTiles):
            return replay_ms(self._of_pairs(tokens, gated, tiles, ordered), 5) / launches
        return replay_ms(self._of_groups(tokens, gated, tiles, ordered), 5) / launches

    def _of_groups(
        self, tokens: int, gated: bool, tiles: AnyTiles, stacks: Sequence[PackedExperts]
    ) -> Callable[[], None]:
        step, config = self._made(tokens, tiles.tokens, len(stacks)), self._config(gated, tiles)
        x = step.rows if is_laid(tiles) else step.x

        def run() -> None:
            for stack, buffers in zip(stacks, step.buffers, strict=False):
                if gated:
                    self._grouped.launch_gated(stack, x, self._per_token, step.tiles, buffers, config)
                else:
                    self._grouped.launch_pairs(stack, None, 1, step.tiles, buffers, config, step.out, step.weights)

        return run

    def _of_pairs(
        self, tokens: int, gated: bool, tiles: MatvecTiles, stacks: Sequence[PackedExperts]
    ) -> Callable[[], None]:
        shape, device = self._shape, self._matmuls.device
        matmuls, count = _PairMatmuls(self._matmuls, tiles), tokens * self._per_token
        weights = torch.rand(count, device=device)
        chosen = random_choices(tokens, self._per_token, shape.experts, len(stacks))
        buffers = ActivationBuffers(count, torch.device(device))
        source, target = buffers.get(INTEGERS, shape.hidden), buffers.get(INTEGERS, shape.width)
        out = torch.zeros(count, shape.hidden, device=device)

        def run() -> None:
            for stack, each in zip(stacks, chosen, strict=True):
                pairs = Pairs(each, weights, self._per_token)
                if gated:
                    matmuls.activate(stack, None, "silu", source, pairs, target, tokens)
                else:
                    matmuls.multiply(stack, None, target, pairs, out, tokens, of_pairs=True)

        return run

    def _key(self, gated: bool, tiles: MatvecTiles) -> Key:
        return self._stacks[gated][0].format, tiles, "silu" if gated else None

    def _config(self, gated: bool, tiles: AnyTiles) -> GroupedConfig:
        step, stack = step_of(self._per_token, self._shape.experts, tiles.tokens), self._stacks[gated][0]
        chosen = self._grouped.route(step, stack, "silu" if gated else None, tiled=not gated)
        return replace(chosen, tiles=tiles)

    def _made(self, tokens: int, places: int, layers: int) -> _Step:
        if self._step is None or self._step[:2] != (tokens, places) or len(self._step[2].buffers) < layers:
            shape = self._shape
            step = step_of(tokens * self._per_token, shape.experts, places)
            chosen = random_choices(tokens, self._per_token, shape.experts, layers)
            buffers = [buffers_of(step, shape.experts, shape.width, shape.hidden) for _ in range(layers)]
            for one, each in zip(chosen, buffers, strict=True):
                self._grouped.sort(one, step, shape.experts, each)
            rows = torch.randn(tokens, shape.hidden, device=self._matmuls.device)
            blocks = self._matmuls.tuning.block_tokens(tokens), 1
            x, alone = (self._matmuls.written(rows, InputFormat("half", block)) for block in blocks)
            out = torch.zeros(step.pairs, shape.hidden, device=self._matmuls.device)
            weights = torch.rand(step.pairs, device=self._matmuls.device)
            self._step = tokens, places, _Step(step, x, alone, buffers, out, weights)
        return self._step[2]


def replay_ms(run: Callable[[], None], repeats: int = 7) -> float:
    """Median time of a CUDA graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return median_ms(graph.replay, repeats)


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time on the device of what `run` launches."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
