"""Timing grouped matmuls over experts on the device at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat, fragment_format
from realizar.backends.cuda.matmul.expert_lines import ExpertShape
from realizar.backends.cuda.matmul.grouped import GroupedBuffers, GroupedConfig, GroupedMatmuls
from realizar.backends.cuda.matmul.grouped_tiles import StepTiles, most_tiles
from realizar.backends.cuda.matmul.quantized import HalfActivations, MatmulKernels
from realizar.backends.cuda.native.grouped.source import GroupedTiles
from realizar.backends.cuda.tuning.experts import TunedExperts
from realizar.backends.cuda.tuning.replay import replay_ms
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.pack import codebook_table
from realizar.quantization import WeightLayout

_CACHE_TIMES = 4  # matrices together are this many times the last-level cache


def random_experts(
    count: int, out_features: int, cols: int, layout: WeightLayout, compact: bool = False
) -> PackedExperts:
    """Experts of random bytes, which no kernel's time depends on."""
    weight_format = fragment_format(layout, compact)
    weights = torch.randint(
        0, 60, (count * weight_format.size_bytes(out_features, cols),), dtype=torch.uint8, device="cuda"
    )
    scales = torch.full((count * -(-out_features // BLOCK),), 1e-3, device="cuda")
    book = codebook_table(layout)
    table = None if book is None else torch.from_numpy(book).cuda()
    return PackedExperts(count, out_features, cols, weight_format, weights, scales, table)


def random_choices(rows: int, per_token: int, experts: int, layers: int, skew: float = 0.0) -> list[torch.Tensor]:
    """Experts of each row, for each of some layers: int32 [rows, per_token]; `skew`: the exponent of Zipf's law."""
    rng = np.random.default_rng(rows)
    law = skew * np.log(np.arange(1, experts + 1))
    noise = [rng.gumbel(size=(rows, experts)) - rng.permutation(law) for _ in range(layers)]
    return [torch.from_numpy(np.argsort(-each, axis=1)[:, :per_token].astype(np.int32).copy()).cuda() for each in noise]


def step_of(pairs: int, experts: int, places: int) -> StepTiles:
    """The tiles of a step of so many pairs, with any number of places."""
    return StepTiles(pairs, places, most_tiles(pairs, experts, places))


def buffers_of(step: StepTiles, experts: int, width: int) -> GroupedBuffers:
    """Buffers for the tiles of a step."""
    buffers = GroupedBuffers("cuda", 1, 1, experts, BLOCK, True)
    buffers.slots = torch.full((step.places,), -1, dtype=torch.int32, device="cuda")
    buffers.work = torch.zeros(1 + step.count, dtype=torch.int32, device="cuda")
    buffers.gated = torch.zeros(step.places * width, dtype=torch.float16, device="cuda")
    return buffers


@dataclass(slots=True)
class _Step:
    """What the kernels of a step with tiles of one size read: rows, and sorted pairs of each layer."""

    tiles: StepTiles
    x: HalfActivations
    buffers: list[GroupedBuffers]
    out: torch.Tensor
    weights: torch.Tensor


class ExpertDeviceMeter:
    """Times grouped matmuls on the device at hand; the layers of a mixture together do not fit its cache.

    Args:
        matmuls: of the device.
    """

    def __init__(self, matmuls: MatmulKernels) -> None:
        self._matmuls, self._grouped = matmuls, GroupedMatmuls(matmuls)
        self._stacks: dict[bool, list[PackedExperts]] = {}
        self._per_token, self._shape = 1, ExpertShape(1, BLOCK, BLOCK)
        self._step: tuple[int, int, _Step] | None = None

    def take(self, experts: TunedExperts) -> dict[bool, FragmentFormat]:
        self._stacks, self._step = {}, None  # freed before others are made
        self._per_token, self._shape = experts.per_token, experts.shape
        count, hidden, width = experts.shape.experts, experts.shape.hidden, experts.shape.width
        cache = int(torch.cuda.get_device_properties(self._matmuls.device).L2_cache_size)
        for gated, sizes, layout in (
            (True, (2 * width, hidden), experts.gate_up),
            (False, (hidden, width), experts.down),
        ):
            first = random_experts(count, *sizes, layout)
            layers = max(2, -(-_CACHE_TIMES * cache // first.size_bytes))
            self._stacks[gated] = [first, *(random_experts(count, *sizes, layout) for _ in range(layers - 1))]
        return {gated: stacks[0].format for gated, stacks in self._stacks.items()}

    def prepare(self, tokens: int, tiles: Sequence[tuple[bool, GroupedTiles]]) -> None:
        self._grouped.prepare([self._config(*each) for each in tiles], self._shape.experts)

    def ms(self, tokens: int, gated: bool, tiles: GroupedTiles) -> float:
        step, stacks, config = self._made(tokens, tiles.tokens), self._stacks[gated], self._config(gated, tiles)

        def run() -> None:
            for stack, buffers in zip(stacks, step.buffers, strict=False):
                if gated:
                    self._grouped.launch_gated(stack, step.x, self._per_token, step.tiles, buffers, config)
                else:
                    self._grouped.launch_pairs(stack, None, 1, step.tiles, buffers, config, step.out, step.weights)

        return replay_ms(run, 5) / len(stacks)

    def _config(self, gated: bool, tiles: GroupedTiles) -> GroupedConfig:
        """The kernel of candidates."""
        step, stack = step_of(self._per_token, self._shape.experts, tiles.tokens), self._stacks[gated][0]
        chosen = self._grouped.route(step, stack, "silu" if gated else None, tiled=not gated)
        return replace(chosen, tiles=tiles)

    def _made(self, tokens: int, places: int) -> _Step:
        """Rows and sorted pairs for tiles of so many places, kept until others are asked for."""
        if self._step is None or self._step[:2] != (tokens, places):
            shape, layers = self._shape, max(map(len, self._stacks.values()))
            step = step_of(tokens * self._per_token, shape.experts, places)
            chosen = random_choices(tokens, self._per_token, shape.experts, layers)
            sort = partial(self._grouped.sort, step=step, experts=shape.experts)
            buffers = [buffers_of(step, shape.experts, shape.width) for _ in range(layers)]
            for one, each in zip(chosen, buffers, strict=True):
                sort(one, buffers=each)
            rows = torch.randn(tokens, shape.hidden, device=self._matmuls.device)
            x = self._matmuls.to_half(rows, self._matmuls.tuning.block_tokens(tokens))
            out = torch.zeros(step.pairs, shape.hidden, device=self._matmuls.device)
            weights = torch.rand(step.pairs, device=self._matmuls.device)
            self._step = tokens, places, _Step(step, x, buffers, out, weights)
        return self._step[2]
