"""Tiles of grouped matmuls: enough of them for any choice of experts, and rings that fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from realizar.backends.cuda.layouts.fragments import FLOATS, fragment_format
from realizar.backends.cuda.matmul.grouped_tiles import (
    BETWEEN_TOKENS,
    TILE_TOKENS,
    StepTiles,
    fits,
    fused_tiles,
    grouped_tiles,
    most_tiles,
    step_tiles,
    tile_tokens,
)
from realizar.backends.cuda.matmul.tuning_table import ExpertShape
from realizar.backends.cuda.native.grouped.source import (
    FUSED_PAIRS,
    DirectTiles,
    route_many_sources,
    route_source,
    route_warps,
)
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import QUANTIZED_TYPES
from realizar.quantization.float_tensors import e4m3_layout
from realizar.quantization.ggml_layouts import GGML_LAYOUTS

LAYOUTS = [*(GGML_LAYOUTS[ggml_type] for ggml_type in QUANTIZED_TYPES), e4m3_layout(128)]
FORMATS = [FLOATS, *dict.fromkeys(map(fragment_format, LAYOUTS))]


@pytest.mark.parametrize(("pairs", "experts"), [(1, 128), (8, 128), (130, 4), (4096, 128), (7, 7)])
@pytest.mark.parametrize("tokens", [*TILE_TOKENS, *BETWEEN_TOKENS])
def test_no_choice_needs_more_tiles(pairs: int, experts: int, tokens: int) -> None:
    """For the worst of all, every expert's last tile holds one pair."""
    rng = np.random.default_rng(pairs)
    bound = most_tiles(pairs, experts, tokens)
    counts = [rng.multinomial(pairs, rng.dirichlet(np.full(experts, 0.3))) for _ in range(50)]
    worst = np.minimum(1, np.arange(pairs, pairs - experts, -1).clip(0))
    worst[0] += pairs - worst.sum()
    assert max(int((-(-each // tokens)).sum()) for each in counts) <= bound
    assert int((-(-worst // tokens)).sum()) == bound


def test_tiles_grow_with_rows() -> None:
    sizes = [tile_tokens(rows, 8, 128, True) for rows in (1, 16, 64, 256, 512, 4096)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (8, 128)
    assert tile_tokens(4096, 8, 128, False) == 64
    step = step_tiles(64, 8, ExpertShape(128, 2048, 768), True)
    assert step.places == step.count * tile_tokens(64, 8, 128, True)


def test_an_expert_that_all_rows_share_has_tiles_of_its_own() -> None:
    """Places go by the experts that rows choose."""
    shape = ExpertShape(256, 2048, 512)
    step = step_tiles(65, 8, shape, True, shared=1)
    assert (step.pairs, step.shared, step.tokens) == (585, 65, 8)
    assert step.count == most_tiles(520, 256, 8) + 9
    assert step_tiles(65, 8, shape, True).shared == 0


@pytest.mark.parametrize("tokens", [*TILE_TOKENS, *BETWEEN_TOKENS])
@pytest.mark.parametrize("gated", [False, True])
def test_rings_fit(tokens: int, gated: bool) -> None:
    for wgmma, shared in ((True, 227 * 1024), (False, 99 * 1024)):
        if not wgmma and (tokens > 64 or tokens in BETWEEN_TOKENS):
            continue
        for weight_format in FORMATS:
            tiles = grouped_tiles(tokens, weight_format, gated, wgmma, shared)
            assert tiles.stages >= 3
            assert tiles.shared_bytes(weight_format, gated) + tiles.static_bytes <= shared


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("experts", [1, 257, 512])
def test_rings_of_one_launch_fit(tokens: int, experts: int) -> None:
    """Its ring has stages for both matrices, of any two formats, and it sorts where it begins."""
    step, warps = StepTiles(FUSED_PAIRS, tokens, 1), 4
    for formats in product(FORMATS, repeat=2):
        tiles = fused_tiles(step, formats, experts, 227 * 1024)
        if tiles is None:
            assert FLOATS in formats
            continue
        alone = zip(tiles.matrices, formats, strict=True)
        assert tiles.shared_bytes(formats) >= max(each.shared_bytes(own, True) for each, own in alone)
        assert tiles.shared_bytes(formats) + tiles.static_bytes(experts) <= 227 * 1024
        assert 4 * ((warps * tiles.groups + 3) * experts + 1) <= tiles.shared_bytes(formats)
    assert fused_tiles(replace(step, pairs=FUSED_PAIRS + 1), (FORMATS[1], FORMATS[1]), experts, 227 * 1024) is None


def test_direct_kernels_have_registers_and_memory() -> None:
    """Wider weights leave fewer chunks on their way; activations of all columns lie in shared memory."""
    narrow, wide = (fragment_format(GGML_LAYOUTS[ggml_type]) for ggml_type in (GGMLType.MXFP4, GGMLType.Q8_0))
    tiles = DirectTiles(8, 4, 4, 2, 2)
    assert fits(tiles, narrow, 45, 227 * 1024)
    assert not fits(tiles, wide, 45, 227 * 1024)
    assert fits(replace(tiles, blocks=1), wide, 45, 227 * 1024)
    assert not fits(tiles, narrow, 90, 227 * 1024)
    assert not fits(replace(tiles, tokens=16, blocks=1), narrow, 45, 99 * 1024)


@pytest.mark.parametrize("experts", [1, 8, 128, 512, 1024])
def test_the_sort_has_room_for_its_counts(experts: int) -> None:
    assert route_warps(experts) in range(1, 33)
    for source in (route_source(experts), *route_many_sources(experts)):
        assert source.shared_bytes <= 99 * 1024
