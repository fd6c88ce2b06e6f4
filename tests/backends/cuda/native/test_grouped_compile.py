"""Grouped matmuls compile for the architectures that they are meant for, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from backends.cuda.native.compiled import check, check_registers
from realizar.backends.cuda.layouts.fragments import FLOATS, FragmentFormat, fragment_format
from realizar.backends.cuda.matmul.grouped_tiles import (
    BETWEEN_TOKENS,
    TILE_TOKENS,
    StepTiles,
    fused_tiles,
    grouped_tiles,
)
from realizar.backends.cuda.native.compiler import Source, architecture
from realizar.backends.cuda.native.grouped.source import (
    DirectTiles,
    GroupedTiles,
    fused_source,
    grouped_source,
    lay_source,
    route_many_sources,
    route_source,
)
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import QUANTIZED_TYPES
from realizar.quantization.ggml_layouts import GGML_LAYOUTS
from wider import wider

H200_BYTES, SMALL_BYTES = 227 * 1024, 99 * 1024
Q4_K, Q6_K, MXFP4 = (
    fragment_format(GGML_LAYOUTS[ggml_type]) for ggml_type in (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.MXFP4)
)
FAMILIES: dict[str, tuple[GGMLType | None, ...]] = {
    "sm_80": (GGMLType.Q8_0, GGMLType.IQ4_NL),
    "sm_90a": (GGMLType.Q6_K, GGMLType.Q3_K, GGMLType.IQ2_XS, None),
}


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def both(
    weight_format: FragmentFormat, tokens: int, wgmma: bool, activation: GatedActivation = "silu"
) -> tuple[list[Source], list[GroupedTiles]]:
    """Gate and up with an activation, and down, with the tiles that are chosen for them."""
    shared = H200_BYTES if wgmma else SMALL_BYTES
    tiles = [grouped_tiles(tokens, weight_format, gated, wgmma, shared) for gated in (True, False)]
    gate_up = grouped_source(weight_format, tiles[0], not tiles[0].laid, activation, 32)
    halves = wgmma and tokens >= 64
    return [gate_up, grouped_source(weight_format, tiles[1], False, None, 13 if tokens == 16 else 12, halves)], tiles


@pytest.mark.parametrize(
    "tokens",
    wider([*TILE_TOKENS, *BETWEEN_TOKENS], 64),
)
def test_sums_stay_in_registers_on_hopper(tokens: int, tmp_path: Path) -> None:
    check_registers(*both(Q4_K, tokens, True), "sm_90a", tmp_path)


@pytest.mark.parametrize("tokens", wider([16, 64, 128], 64))
def test_clamped_sums_stay_in_registers_on_hopper(tokens: int, tmp_path: Path) -> None:
    check_registers(*both(MXFP4, tokens, True, "clamped"), "sm_90a", tmp_path)


@pytest.mark.parametrize("tokens", wider([8, 16], 8))
def test_one_launch_keeps_its_sums_in_registers(tokens: int, tmp_path: Path) -> None:
    """Gate and up and down, with even numbers of chunks and with odd ones."""
    cases: list[tuple[tuple[FragmentFormat, FragmentFormat], GatedActivation, tuple[int, int], int]] = [
        ((Q4_K, Q6_K), "silu", (32, 12), 128)
    ]
    if tokens == 16:
        cases.append(((MXFP4, MXFP4), "clamped", (45, 45), 32))
    for formats, activation, chunks, experts in cases:
        tiles = fused_tiles(StepTiles(experts, tokens, experts), formats, experts, H200_BYTES)
        assert tiles is not None
        check_registers([fused_source(formats, tiles, activation, chunks, experts)], [tiles], "sm_90a", tmp_path)


@pytest.mark.full
def test_sums_of_rows_in_tiles_stay_in_registers(tmp_path: Path) -> None:
    """Three warpgroups of gate and up; and two in the largest tiles, whose rows are gathered where a line says so."""
    tiles = GroupedTiles("wgmma", 48, 2, 3, 5, 1, True)
    check_registers([grouped_source(MXFP4, tiles, False, "clamped", 45)], [tiles], "sm_90a", tmp_path)
    tiles = GroupedTiles("wgmma", 128, 2, 2, 3, 1)
    check_registers([grouped_source(Q4_K, tiles, True, "silu", 32)], [tiles], "sm_90a", tmp_path)


@pytest.mark.parametrize("tokens", [8, pytest.param(16, marks=pytest.mark.full)])
def test_direct_kernels_keep_their_weights_in_registers(tokens: int, tmp_path: Path) -> None:
    tiles = DirectTiles(tokens, 4, 2, 2, 3) if tokens == 8 else DirectTiles(tokens, 4, 4, 2, 1)
    gate_up = grouped_source(MXFP4, tiles, True, "clamped", 45)
    check_registers([gate_up, grouped_source(MXFP4, tiles, False, None, 45)], [tiles, tiles], "sm_90a", tmp_path)


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, pytest.param(GGMLType.IQ2_XS, marks=pytest.mark.full), None])
def test_direct_kernels_compile(ggml_type: GGMLType | None) -> None:
    """Also for architectures before the one that they were measured on."""
    weight_format = FLOATS if ggml_type is None else fragment_format(GGML_LAYOUTS[ggml_type])
    tiles = DirectTiles(8, 1, 8, 1, 1)
    check([grouped_source(weight_format, tiles, False, None, 8)], "sm_80" if ggml_type is None else "sm_90a")


def test_sums_stay_in_registers_on_ampere(tmp_path: Path) -> None:
    check_registers(*both(Q4_K, 32, False), "sm_80", tmp_path)


@pytest.mark.parametrize("arch", wider(FAMILIES, "sm_90a"))
def test_families_of_weights_compile(arch: str) -> None:
    formats = [FLOATS if each is None else fragment_format(GGML_LAYOUTS[each]) for each in FAMILIES[arch]]
    check([both(weight_format, 16, arch == "sm_90a")[0][1] for weight_format in formats], arch)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_weights_compile(arch: str) -> None:
    formats = dict.fromkeys(fragment_format(GGML_LAYOUTS[ggml_type]) for ggml_type in QUANTIZED_TYPES)
    check([source for each in formats for source in both(each, 32, arch == "sm_90a")[0]], arch)


def test_kernels_for_newer_architectures() -> None:
    check(both(Q4_K, 16, False)[0], architecture((10, 0)))


@pytest.mark.parametrize(("arch", "experts"), [("sm_80", 128), ("sm_90a", 1024), ("sm_100a", 8)])
def test_sorts_compile(arch: str, experts: int) -> None:
    check([route_source(experts), *route_many_sources(experts)], arch)


@pytest.mark.parametrize("tokens", [8, 48, 128])
def test_rows_in_tiles_compile(tokens: int) -> None:
    check([lay_source(tokens)], "sm_90a")
