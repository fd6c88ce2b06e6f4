"""The mixtures of a model whose matmuls can be tuned, and their candidates."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from realizar.backends.cuda.layouts.fragments import FragmentFormat, fragment_format
from realizar.backends.cuda.matmul.experts import most_pair_tokens
from realizar.backends.cuda.matmul.grouped_tiles import (
    BETWEEN_TOKENS,
    DIRECT_TOKENS,
    MMA_SYNC_TOKENS,
    MOST_STAGES,
    TILE_TOKENS,
    fits,
    fitted,
)
from realizar.backends.cuda.matmul.tuning_table import DeviceTuning, ExpertLine, ExpertShape, ExpertTiles
from realizar.backends.cuda.native.grouped.source import AnyTiles, DirectTiles, GroupedTiles
from realizar.backends.cuda.native.sources import MatvecTiles
from realizar.backends.cuda.weights.experts import ExpertsPlan
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.spec import ModelSpec
from realizar.quantization.layout import WeightLayout

_REGISTERS = 65_536  # of a multiprocessor
_WARPS = {1: 32, 2: 24, 4: 16}  # of a multiprocessor in the mat-vec, by the chunks that each requests at once

# strips, groups, blocks
_GATED = ((2, 1, 2), (2, 1, 3), (2, 1, 4), (2, 1, 5), (2, 2, 1), (2, 2, 2), (2, 1, 1), (2, 3, 1))
_PAIRS = (*_GATED, (3, 1, 2), (3, 1, 3), (3, 1, 4), (1, 1, 4), (1, 1, 6), (1, 2, 2), (1, 2, 3), (1, 2, 1))
_LEAST_LAID_TOKENS = 32  # places from which on rows laid in tiles first may be faster
_MMA_SYNC = ((2, 1, 1), (2, 1, 2), (2, 1, 3))
_PARTS = (1, 2, 3, 4, 6)
# slots, parts, chunks ahead, blocks
_DIRECT = (
    (4, 2, 2, 3), (4, 2, 3, 3), (4, 2, 4, 2), (4, 4, 2, 2), (4, 4, 3, 1), (4, 4, 4, 1), (2, 4, 2, 3), (2, 4, 3, 2),
    (2, 2, 4, 4), (2, 2, 6, 3), (1, 4, 4, 4), (1, 8, 2, 3),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TunedExperts:
    """Mixtures of one shape; `gate_up` and `down` are the layouts of most of their matrices."""

    shape: ExpertShape
    per_token: int
    gate_up: WeightLayout
    down: WeightLayout

    def candidates(self, tokens: int, tuning: DeviceTuning) -> Iterator[ExpertLine]:
        """As of `sweep.Work`."""
        pairs, experts = tokens * self.per_token, self.shape.experts
        for gated, layout, cols in ((True, self.gate_up, self.shape.hidden), (False, self.down, self.shape.width)):
            weight_format = fragment_format(layout)
            chunks = weight_format.chunks(cols)
            found: Iterable[ExpertTiles] = pair_candidates(gated, chunks)
            if tokens > most_pair_tokens(experts, self.per_token, tuning.wgmma):
                found = grouped_candidates(pairs, experts, gated, weight_format, tuning, chunks)
            for tiles in found:
                yield ExpertLine(pairs, self.shape, gated, tiles, 0.0)


def tuned_experts(spec: ModelSpec, checkpoint: Checkpoint) -> list[TunedExperts]:
    """The quantised mixtures of a model that have grouped matmuls, each shape once."""
    tensors = WeightTensors(spec, checkpoint)
    found: dict[tuple[ExpertShape, int], Counter[tuple[WeightLayout, WeightLayout]]] = {}
    for _, experts in spec.mixtures():
        plan = ExpertsPlan.of(experts, tensors, packs=True, stacks_shared=False)
        gate_up, down = plan.gate_up[0].layout, plan.down.layout
        if gate_up.has_integers and down.has_integers and len(plan.gate_up) == 1:
            found.setdefault((ExpertShape.of(experts), experts.experts_per_token), Counter())[gate_up, down] += 1
    return [TunedExperts(*key, *layouts.most_common(1)[0][0]) for key, layouts in found.items()]


def pair_candidates(gated: bool, chunks: int) -> Iterator[MatvecTiles]:
    """Tiles of the mat-vec of pairs that registers allow, for rows of so many chunks.

    Gate and up that end with the activation are two of a block.
    """
    for tiles in (2,) if gated else (1, 2, 4):
        for parts in _PARTS:
            for unroll, warps in _WARPS.items():
                blocks = warps // (tiles * parts)
                if blocks and parts * unroll <= chunks and (unroll < 4 or tiles * parts <= 4):
                    yield MatvecTiles(1, tiles, parts, unroll, blocks)


def grouped_candidates(
    pairs: int, experts: int, gated: bool, weight_format: FragmentFormat, device: DeviceTuning, chunks: int
) -> Iterator[AnyTiles]:
    """Tiles that fit whose places hold half an expert's average pairs to four times as many; rings are the deepest."""
    average, most = pairs / experts, TILE_TOKENS[-1] if device.wgmma else MMA_SYNC_TOKENS
    sizes = [each for each in TILE_TOKENS if min(average / 2, most) <= each <= min(most, max(8, 4 * average))]
    between = [each for each in BETWEEN_TOKENS if device.wgmma and average <= each <= 2 * average]
    yield from _with_ring(sorted([*sizes, *between]), gated, weight_format, device)
    if device.wgmma:
        yield from _direct(sizes, chunks, weight_format, device)


def _direct(
    sizes: Iterable[int], chunks: int, weight_format: FragmentFormat, device: DeviceTuning
) -> Iterator[DirectTiles]:
    for tokens, numbers in itertools.product(sizes, _DIRECT):
        tiles = DirectTiles(tokens, *numbers)
        has_work = tokens <= DIRECT_TOKENS and tiles.parts * tiles.ahead <= chunks
        if has_work and fits(tiles, weight_format, chunks, device.shared_bytes):
            yield tiles


def _with_ring(
    sizes: Iterable[int], gated: bool, weight_format: FragmentFormat, device: DeviceTuning
) -> Iterator[GroupedTiles]:
    seen = set()
    for tokens in sizes:
        for strips, groups, blocks in (_GATED if gated else _PAIRS) if device.wgmma else _MMA_SYNC:
            tiles = GroupedTiles("wgmma" if device.wgmma else "mma_sync", tokens, strips, groups, MOST_STAGES, blocks)
            tiles = fitted(tiles, weight_format, gated, device.shared_bytes)
            available = tiles.registers or _REGISTERS // (tiles.threads * tiles.blocks)
            sums = tokens // 2 * (tiles.strips if device.wgmma else 1)  # of a thread
            if tiles not in seen and sums + 76 <= available:
                seen.add(tiles)
                yield tiles
                if gated and device.wgmma and tokens >= _LEAST_LAID_TOKENS:
                    yield replace(tiles, laid=True)
