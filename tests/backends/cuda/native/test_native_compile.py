"""Matmul kernels compile for the architectures that they are meant for, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from backends.cuda.native.compiled import check, check_registers, disassembled, resources_of
from backends.grouped_source import grouped_layout
from realizar.backends.cuda.layouts.fragments import FLOATS, FragmentFormat, fragment_format
from realizar.backends.cuda.matmul.fp8 import EXPERT_TILES
from realizar.backends.cuda.native.compiler import (
    Source,
    architecture,
    begin_compiling,
    cache_folder,
    compile_source,
    compile_sources,
)
from realizar.backends.cuda.native.experts.source import (
    EXPERT_SIZES,
    EXPERT_SUM_SIZES,
    ChoiceShape,
    choice_source,
    expert_source,
    expert_sums_source,
    many_choices_source,
)
from realizar.backends.cuda.native.raw_layouts import REPACKED_LAYOUTS
from realizar.backends.cuda.native.sampling.source import sampling_sources
from realizar.backends.cuda.native.scans.source import ScanKernels
from realizar.backends.cuda.native.sources import (
    FP8Tiles,
    GatedActivation,
    MatvecTiles,
    MmaSyncTiles,
    Tiles,
    WgmmaTiles,
    activations_source,
    fp8_experts_source,
    fp8_source,
    fp8_weights_source,
    matmul_source,
    repack_source,
)
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import KernelError
from realizar.quantization.convert import QUANTIZED_TYPES
from realizar.quantization.float_tensors import e4m3_layout
from realizar.quantization.ggml_layouts import GGML_LAYOUTS
from wider import wider

FAMILIES = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.Q3_K, GGMLType.IQ4_NL, GGMLType.IQ2_XS)
KERNELS: tuple[tuple[str, Tiles], ...] = (
    ("sm_80", MatvecTiles(1, 8, 1, 2, 3)),
    ("sm_80", MmaSyncTiles(16, 2, 4, 1)),
    ("sm_90a", WgmmaTiles(16, 1, 2, 4, 1, 1)),
)


def form_of(ggml_type: GGMLType) -> FragmentFormat:
    return fragment_format(GGML_LAYOUTS[ggml_type])


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(("arch", "tiles"), wider(KERNELS, KERNELS[2]), ids=lambda value: getattr(value, "kind", value))
def test_families_of_weights_compile(arch: str, tiles: Tiles) -> None:
    check([matmul_source((form_of(ggml_type),), tiles) for ggml_type in FAMILIES], arch)


@pytest.mark.parametrize("arch", wider(["sm_80", "sm_90a"], "sm_80"))
def test_choices_compile(arch: str) -> None:
    """A softmax alone, one with a bias and groups of one expert, and sigmoids with all that ranks may have."""
    plain, biased = ChoiceShape(2048, 128, 8), ChoiceShape(64, 6, 3, groups=6, groups_per_token=2)
    grouped = ChoiceShape(64, 160, 8, True, True, 8, 4)
    whole, gated = ChoiceShape(4096, 128, 8, True, True, shared=1), ChoiceShape(2048, 256, 8, shared=2)
    clustered = ChoiceShape(64, 60, 4, shared=2)
    clusters = arch == "sm_90a"
    shapes = plain, biased, grouped, whole, gated, clustered
    sources = [choice_source(choice, clusters) for choice in shapes]
    if clusters:
        sources += [
            many_choices_source(each, tokens) for each in shapes for tokens in (8, 16, 24) if each.has_many(tokens)
        ]
    check(sources, arch)


@pytest.mark.full
@pytest.mark.parametrize(("arch", "tiles"), KERNELS, ids=lambda value: getattr(value, "kind", value))
def test_all_weights_compile(arch: str, tiles: Tiles) -> None:
    check([matmul_source((form,), tiles) for form in dict.fromkeys(form_of(t) for t in QUANTIZED_TYPES)], arch)


@pytest.mark.parametrize(("arch", "tiles"), wider(KERNELS, KERNELS[0]), ids=lambda value: getattr(value, "kind", value))
def test_matrices_of_two_formats_compile(arch: str, tiles: Tiles) -> None:
    check([matmul_source((form_of(GGMLType.Q4_K), form_of(GGMLType.Q6_K)), tiles)], arch)


@pytest.mark.parametrize(
    ("arch", "tiles"), wider(KERNELS[1:], KERNELS[1]), ids=lambda value: getattr(value, "kind", value)
)
def test_floats_compile_alone_and_beside_codes(arch: str, tiles: Tiles) -> None:
    check([matmul_source((FLOATS,), tiles), matmul_source((form_of(GGMLType.Q4_K), FLOATS), tiles)], arch)


MATVEC_GATED = (MatvecTiles(1, 2, 2, 2, 7), MatvecTiles(1, 2, 6, 1, 2), MatvecTiles(2, 2, 1, 2, 8))
WGMMA_GATED = (
    WgmmaTiles(8, 2, 2, 4, 2, 1), WgmmaTiles(32, 2, 1, 6, 2, 1), WgmmaTiles(64, 2, 1, 3, 2, 2),
    WgmmaTiles(80, 2, 2, 3, 2, 1), WgmmaTiles(112, 2, 2, 6, 1, 1), WgmmaTiles(128, 2, 2, 3, 2, 1),
    WgmmaTiles(128, 2, 1, 6, 2, 1), WgmmaTiles(160, 1, 2, 3, 2, 1), WgmmaTiles(224, 1, 2, 3, 2, 1),
    WgmmaTiles(128, 2, 2, 3, 1, 1, stays=True),
)  # fmt: skip
GATED: dict[str, tuple[Tiles, ...]] = {"sm_80": MATVEC_GATED, "sm_90a": MATVEC_GATED + WGMMA_GATED}


@pytest.mark.parametrize("arch", wider(GATED, "sm_80"))
@pytest.mark.parametrize(
    ("ggml_type", "activation"),
    [
        (GGMLType.Q4_K, "silu"),
        pytest.param(GGMLType.Q6_K, "gelu_tanh", marks=pytest.mark.full),
        pytest.param(GGMLType.Q8_0, "gelu", marks=pytest.mark.full),
        pytest.param(GGMLType.IQ4_NL, "gelu", marks=pytest.mark.full),
        pytest.param(GGMLType.Q4_K, "relu_squared", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_activation_epilogues_keep_their_sums_in_registers(
    ggml_type: GGMLType, activation: GatedActivation, arch: str, tmp_path: Path
) -> None:
    check_registers(
        [matmul_source((form_of(ggml_type),), tiles, activation) for tiles in GATED[arch]], GATED[arch], arch, tmp_path
    )


@pytest.mark.parametrize("ggml_type", wider(FAMILIES, GGMLType.Q4_K))
def test_blocks_that_stay_keep_their_sums_in_registers(ggml_type: GGMLType, tmp_path: Path) -> None:
    tiles = WgmmaTiles(128, 2, 2, 4, 1, 1, stays=True)
    check_registers([matmul_source((form_of(ggml_type),), tiles)], [tiles], "sm_90a", tmp_path)


IN_TURN = (
    WgmmaTiles(8, 1, 1, 6, 2, 2, 3), WgmmaTiles(8, 1, 1, 6, 2, 2, 2), WgmmaTiles(16, 1, 1, 6, 2, 2, 3),
    WgmmaTiles(32, 1, 1, 6, 2, 2, 2),
)  # fmt: skip


@pytest.mark.parametrize("ggml_type", wider(FAMILIES, GGMLType.Q6_K))
def test_warpgroups_that_take_turns_keep_their_sums_in_registers(ggml_type: GGMLType, tmp_path: Path) -> None:
    check_registers([matmul_source((form_of(ggml_type),), tiles) for tiles in IN_TURN], IN_TURN, "sm_90a", tmp_path)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("count", wider([1, 2, 3], 2))
def test_prompts_in_8_bit_floats_keep_their_sums_in_registers(
    count: int, activation: GatedActivation | None, stored: bool, tmp_path: Path
) -> None:
    tiles = FP8Tiles(stored=stored)
    check_registers([fp8_source(count, tiles, activation)], [tiles], "sm_90a", tmp_path)


@pytest.mark.parametrize("activation", wider([None, "silu", "clamped"], "silu"))
def test_experts_in_8_bit_floats_keep_their_sums_in_registers(
    activation: GatedActivation | None, tmp_path: Path
) -> None:  # fmt: skip
    sources = [fp8_experts_source(EXPERT_TILES, activation, halves) for halves in {False, activation is None}]
    check_registers(sources, [EXPERT_TILES] * len(sources), "sm_90a", tmp_path)


@pytest.mark.parametrize("ggml_type", wider([*FAMILIES, GGMLType.MXFP4], GGMLType.Q4_K))
def test_weights_in_8_bit_floats_compile(ggml_type: GGMLType) -> None:
    check([fp8_weights_source(form_of(ggml_type))], "sm_90a")


SUMMED = (WgmmaTiles(128, 2, 2, 3, 1, 1, 1, 4), WgmmaTiles(128, 2, 2, 3, 1, 1, 1, 3))


@pytest.mark.full
@pytest.mark.parametrize("ggml_type", FAMILIES)
def test_blocks_that_add_parts_keep_their_sums_in_registers(ggml_type: GGMLType, tmp_path: Path) -> None:
    check_registers([matmul_source((form_of(ggml_type),), tiles) for tiles in SUMMED], SUMMED, "sm_90a", tmp_path)


@pytest.mark.full
def test_floats_keep_their_sums_in_registers(tmp_path: Path) -> None:
    check_registers([matmul_source((FLOATS,), tiles, "silu") for tiles in WGMMA_GATED], WGMMA_GATED, "sm_90a", tmp_path)


@pytest.mark.parametrize("arch", wider(["sm_80", "sm_90a"], "sm_90a"))
@pytest.mark.parametrize("ggml_type", wider([GGMLType.Q4_K, GGMLType.Q8_0], GGMLType.Q4_K), ids=str)
def test_residual_epilogues_keep_their_sums_in_registers(ggml_type: GGMLType, arch: str, tmp_path: Path) -> None:
    tiles = (
        MatvecTiles(1, 1, 12, 2, 2),
        MatvecTiles(1, 2, 2, 2, 6),
        MatvecTiles(2, 1, 8, 2, 2),
        MatvecTiles(1, 1, 16, 2, 1),
    )
    check_registers([matmul_source((form_of(ggml_type),), each, "residual") for each in tiles], tiles, arch, tmp_path)


@pytest.mark.parametrize("arch", wider(["sm_80", "sm_90a"], "sm_90a"))
@pytest.mark.parametrize("ggml_type", wider([GGMLType.MXFP4, *FAMILIES], GGMLType.MXFP4), ids=str)
def test_pairs_keep_their_sums_in_registers(ggml_type: GGMLType, arch: str, tmp_path: Path) -> None:
    gated, plain = MatvecTiles(1, 2, 4, 2, 3), MatvecTiles(1, 1, 3, 2, 8)
    activation: GatedActivation = "clamped" if ggml_type is GGMLType.MXFP4 else "silu"
    sources = [expert_source(form_of(ggml_type), gated, activation), expert_source(form_of(ggml_type), plain, None)]
    sums = MatvecTiles(1, 1, 24, 2, 1), MatvecTiles(1, 1, 12, 2, 2), MatvecTiles(1, 1, 18, 2, 1)
    counts = 8, 4, 9
    sources += [expert_sums_source(form_of(ggml_type), tiles, each) for tiles, each in zip(sums, counts, strict=True)]
    check_registers(sources, (gated, plain, *sums), arch, tmp_path)


def test_parameters_of_pairs_have_the_sizes_that_launches_have() -> None:
    form, tiles = form_of(GGMLType.Q4_K), MatvecTiles(1, 1, 4, 2, 1)
    for source, sizes in (
        (expert_source(form, tiles, None), EXPERT_SIZES),
        (expert_sums_source(form, tiles, 4), EXPERT_SUM_SIZES),
    ):
        parameters = source.text.rpartition(f"{source.name}(")[2].partition(")")[0].split(",")
        is_wide = ("*" in each or "long long" in each for each in parameters)
        found = [
            "p" if wide else "f" if "float" in each else "i" for wide, each in zip(is_wide, parameters, strict=True)
        ]
        assert "".join(found) == sizes


@pytest.mark.full
@pytest.mark.parametrize("capability", [(10, 0), (9, 0)])
def test_four_bits_compile_for_newer_architectures(capability: tuple[int, int]) -> None:
    tiles: list[Tiles] = [MatvecTiles(1, 4, 2, 1, 4), MmaSyncTiles(128, 1, 3, 1)]
    if capability == (9, 0):
        tiles.append(WgmmaTiles(128, 2, 2, 4, 1, 1))
    check([matmul_source((form_of(GGMLType.Q4_K),), tile) for tile in tiles], architecture(capability))


@pytest.mark.parametrize(("arch", "tiles"), wider(KERNELS, KERNELS[1]), ids=lambda value: getattr(value, "kind", value))
def test_layouts_of_no_ggml_type_compile(arch: str, tiles: Tiles) -> None:
    bytes_with_minima = replace(grouped_layout(64), bits=8, offset=128)
    layouts = [
        grouped_layout(64),
        grouped_layout(16),
        bytes_with_minima,
        e4m3_layout(128),
    ]
    check([matmul_source((fragment_format(layout),), tiles) for layout in layouts], arch)


def test_helpers_compile() -> None:
    sources = [repack_source(layout, fragment_format(layout)) for layout in REPACKED_LAYOUTS]
    cubins = compile_sources([activations_source(), *sources], "sm_80")
    assert b"to_int8" in cubins[0]
    assert b"to_half" in cubins[0]
    assert all(b"pack_blocks" in cubin and b"scale_tops" in cubin for cubin in cubins[1:])


SAMPLING_KERNELS = (
    "list_sampled", "adjust_logits", "penalise_repetitions", "find_tops", "count_history", "weigh_ids", "weigh_left",
    "gather_ids", "survey_ids", "cut_ids", "report_logprobs", "pick_ids", "settle_rows", "extend_repetitions",
)  # fmt: skip


@pytest.mark.parametrize("arch", wider(["sm_80", "sm_90a", "sm_100a"], "sm_90a"))
def test_the_sampler_compiles(arch: str) -> None:
    others, cuts = compile_sources(sampling_sources(), arch)
    assert [name for name in SAMPLING_KERNELS if name.encode() in cuts] == ["cut_ids"]
    assert [name for name in SAMPLING_KERNELS if name.encode() not in others] == ["cut_ids"]


def test_the_second_time_comes_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from realizar.backends.cuda.native import nvrtc

    seen: list[tuple[int, int]] = []
    first = compile_sources([activations_source()], "sm_80", lambda done, of: seen.append((done, of)))
    assert seen == [(1, 1)]
    monkeypatch.setattr(nvrtc, "compile_text", lambda *_: pytest.fail("compiled again"))
    assert compile_source(activations_source(), "sm_80") == first[0]
    assert [path.suffix for path in cache_folder().iterdir()] == [".cubin"]


def test_what_was_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that a process compiles already is compiled by no other, and its failure is that of who waits."""
    from realizar.backends.cuda.native import nvrtc

    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "compile_text", lambda *_: pytest.fail("compiled here"))
        for _ in range(2):
            begin_compiling([activations_source()], "sm_80")
        cubin = compile_source(activations_source(), "sm_80")
        begin_compiling([activations_source()], "sm_80")
        assert compile_source(activations_source(), "sm_80") == cubin, "from disk"
        begin_compiling([Source("broken", "nothing")], "sm_80")
        with pytest.raises(KernelError, match=r"kernel broken does not compile for sm_80: .*error"):
            compile_source(Source("broken", "nothing"), "sm_80")
    with pytest.raises(KernelError, match="broken"):  # anew
        compile_source(Source("broken", "nothing"), "sm_80")


def test_a_cache_that_cannot_be_written_costs_compiling_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "realizar").write_text("in the way")
    assert compile_source(activations_source(), "sm_80")[:4] == b"\x7fELF"
    assert "can't be saved" in caplog.text


@pytest.mark.parametrize("count", [1, 2])
def test_errors_name_kernel_architecture_and_reason(count: int) -> None:
    broken = [Source(f"broken{index}", "__global__ void broken() { nothing(); }") for index in range(count)]
    with pytest.raises(KernelError, match=r"kernel broken\d does not compile for sm_80: .*error"):
        compile_sources(broken, "sm_80")


def test_scans_spill_nothing_and_wait_where_they_say(tmp_path: Path) -> None:
    """The compiler likes to wait after each product where it finds too few registers, or sums moved in between."""
    scan = ScanKernels(2, 4, 4, 8, tiled=True)
    for name, source in (scan.sources() | {"rows": scan.rows()}).items():
        (usage,) = resources_of(compile_source(source, "sm_90a"), tmp_path).values()
        assert usage["STACK"] == usage["LOCAL"] == 0, (name, usage)
        code = disassembled(tmp_path)
        begins, waits = code.count("WARPGROUP.ARRIVE"), code.count("WARPGROUP.DEPBAR")
        expected = {"inputs": (0, 0), "prepare": (1, 1), "states": (5, 5), "rows": (0, 0)}
        assert (begins, waits) == expected[name], name
