"""Tiles that the tuning chooses fit the device and the shape, whatever the format; the shipped tables are whole."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from realizar.backends.cuda.layouts.fragments import FLOATS, FragmentFormat, fragment_format
from realizar.backends.cuda.matmul.fixed_order import fixed_tiling, is_gated
from realizar.backends.cuda.matmul.tuning_table import (
    DeviceTuning,
    Line,
    Table,
    Tiling,
    best_expert_lines,
    best_lines,
    load_tuning,
    most_tokens,
    own_table,
    write_table,
)
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, WgmmaTiles
from realizar.backends.cuda.tuning.sweep import candidates, split_counts
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import QUANTIZED_TYPES
from realizar.quantization.ggml_layouts import GGML_LAYOUTS

FORMS = {t: fragment_format(GGML_LAYOUTS[t]) for t in QUANTIZED_TYPES}
SHAPES = ((64, 256), (960, 576), (2048, 2048), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (128256, 4096))
DEVICES = {
    "NVIDIA H200": load_tuning("NVIDIA H200", (9, 0), 132, 227 * 1024),
    "unknown Hopper": load_tuning("NVIDIA X", (9, 0), 114, 227 * 1024),
    "A100": load_tuning("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * 1024),
    "RTX 4090": load_tuning("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * 1024),
}


@pytest.mark.parametrize("name", DEVICES)
def test_choices_fit(name: str) -> None:
    tuning = DEVICES[name]
    for form, (out_features, cols), tokens in itertools.product(
        set(FORMS.values()), SHAPES, (1, 2, 8, 9, 64, 65, 300, 2048)
    ):
        for choose in (DeviceTuning.many_tokens, fixed_tiling):
            choice = choose(tuning, tokens, out_features, cols, form)
            tiles = choice.tiles
            assert isinstance(tiles, WgmmaTiles if tuning.wgmma else MmaSyncTiles)
            assert tiles.tokens == tuning.block_tokens(tokens)
            assert tiles.shared_bytes(form) * tiles.blocks + 4096 <= tuning.shared_bytes
            assert 1 <= choice.splits <= max(1, form.chunks(cols) // 2)
        if tokens <= 7:
            few = tuning.few_tokens(tokens, out_features, cols, form)
            assert isinstance(few.tiles, MatvecTiles)
            assert few.tiles.tokens == tokens
            assert 1 <= few.splits * few.tiles.parts <= max(form.chunks(cols), few.tiles.parts)


@pytest.mark.parametrize("name", DEVICES)
def test_activation_epilogues_fit(name: str) -> None:
    """Two strips a warpgroup, no splits, and most of the device at work; or no such matmul."""
    tuning = DEVICES[name]
    for form, (out_features, cols), tokens in itertools.product(
        set(FORMS.values()), SHAPES, (3, 8, 9, 64, 65, 300, 2048)
    ):
        tiles = tuning.gated(tokens, out_features, cols, form)
        if tiles is None:
            assert not tuning.wgmma or form.two_level or out_features * -(-tokens // 128) < 28672
            continue
        assert tuning.wgmma
        assert (tiles.strips, tiles.tokens) == (2, tuning.block_tokens(tokens))
        assert tiles.shared_bytes(form) * tiles.blocks + 4096 <= tuning.shared_bytes
        assert (
            3 * tiles.grid(out_features, 1, -(-tokens // tiles.tokens))[0] * -(-tokens // tiles.tokens)
            >= 2 * tuning.processors
        )


@pytest.mark.parametrize("name", DEVICES)
def test_activation_epilogues_of_integer_matmuls_fit(name: str) -> None:
    """A tile of gate and one of up a block, all columns in it, and all blocks at once; or few blocks."""
    tuning = DEVICES[name]
    for form, (out_features, cols), tokens in itertools.product(set(FORMS.values()), SHAPES, (1, 2, 5)):
        tiles = tuning.gated_few(tokens, out_features, cols, form)
        if tiles is None:
            assert 3 * out_features / 32 < 2 * tuning.processors
            continue
        unrolled = tokens == 1 and tiles.parts == 1 and tiles.blocks <= 9  # with registers for a chunk more
        assert (tiles.tokens, tiles.tiles, tiles.unroll) == (tokens, 2, 3 if unrolled else 2 if tokens <= 4 else 1)
        assert 1 <= tiles.parts <= max(1, form.chunks(cols))
        assert tiles.threads <= 384
        assert tiles.blocks * tuning.processors >= out_features / 32
        if tiles.blocks * 64 <= 768:  # else tiles alone are more warps than registers were counted for
            assert tiles.blocks * tiles.threads <= 1024


@pytest.mark.parametrize("name", DEVICES)
def test_one_row_takes_whole_columns(name: str) -> None:
    """The next kernel reads one sum where tiles fill the device; a table's line of more rows says nothing."""
    tuning = DEVICES[name]
    for form, (out_features, cols) in itertools.product(set(FORMS.values()), SHAPES):
        choice = tuning.few_tokens(1, out_features, cols, form)
        tiles, chunks = choice.tiles, form.chunks(cols)
        assert isinstance(tiles, MatvecTiles)
        assert 1 <= choice.splits * tiles.parts <= max(1, chunks)
        assert tiles.threads <= 512
        assert tiles.threads * tiles.blocks <= (768 if tiles.unroll > 1 else 1024)
        blocks = tiles.grid(out_features, choice.splits, 1)[0] * choice.splits
        whole = tuning.keeps_columns(out_features)
        if chunks >= 32:
            assert 15 * blocks >= (7 if whole else 10) * tuning.processors
        if whole:
            assert choice.splits == 1


def test_blocks_of_activations_hold_little_more_than_a_step() -> None:
    """On Hopper, up to 224 tokens: one block of them all."""
    hopper, other = DEVICES["NVIDIA H200"], DEVICES["A100"]
    sizes = {64: 64, 65: 80, 96: 96, 112: 112, 128: 128, 160: 160, 192: 192, 224: 224, 225: 128, 256: 128, 320: 128}
    assert {tokens: hopper.block_tokens(tokens) for tokens in sizes} == sizes
    assert {other.block_tokens(tokens) for tokens in sizes} == {64, 128}
    for tokens in range(1, 2100):
        block = hopper.block_tokens(tokens)
        assert not 64 < tokens <= 224 or 0 <= block - tokens < 32
        assert tokens <= (most_tokens(block) or tokens)


def test_activation_epilogues_keep_measured_tiles() -> None:
    """An 8B model keeps the line of its shape, unless that has single strips; a 1B model takes half the block."""
    tuning, form = DEVICES["NVIDIA H200"], FORMS[GGMLType.Q4_K]
    lines = {line.tokens: line for line in tuning.lines if line.out_features == 28672}
    for tokens in (8, 16, 32, 64, 96, 128, 256, 2048):
        assert tuning.gated(tokens, 28672, 4096, form) == lines[tokens].tiles
    assert tuning.gated(320, 28672, 4096, form) == tuning.gated(512, 28672, 4096, form) == lines[2048].tiles
    for tokens, block, line in ((65, 80, 96), (100, 112, 128)):
        assert tuning.gated(tokens, 28672, 4096, form) == replace(lines[line].tiles, tokens=block)
    assert tuning.gated(150, 28672, 4096, form) == WgmmaTiles(160, 1, 2, 3, 2, 1)
    assert tuning.many_tokens(200, 4096, 14336, form) == Tiling(WgmmaTiles(224, 1, 2, 3, 2, 1), 4)
    assert tuning.gated_few(1, 28672, 4096, form) == MatvecTiles(1, 2, 2, 2, 7)
    assert tuning.few_tokens(1, 4096, 14336, form) == Tiling(MatvecTiles(1, 1, 12, 2, 2), 1)
    assert tuning.few_tokens(2, 4096, 14336, form) == Tiling(MatvecTiles(2, 1, 8, 2, 2), 1)
    assert tuning.gated_few(2, 28672, 4096, form) == MatvecTiles(2, 2, 1, 2, 8)
    small, line = tuning.gated(128, 16384, 2048, form), lines[128].tiles
    assert small is not None
    assert isinstance(line, WgmmaTiles)
    assert (line.groups, small.groups) == (2, 1)
    assert small.stages > line.stages


def test_fixed_splits_depend_on_the_shape_alone() -> None:
    for tuning, form, (out_features, cols) in itertools.product(DEVICES.values(), set(FORMS.values()), SHAPES):
        choices = [fixed_tiling(tuning, tokens, out_features, cols, form) for tokens in (1, 8, 33, 64, 128, 999, 2048)]
        assert len({parts_of(choice) for choice in choices}) == 1
        steps = {choice.tiles.step for choice in choices if isinstance(choice.tiles, WgmmaTiles)}
        assert steps <= {1} or all(form.chunks(cols) % (choices[0].splits * step) == 0 for step in steps)


def parts_of(choice: Tiling) -> int:
    """Parts of the columns, whoever adds them."""
    return choice.splits * (choice.tiles.summed if isinstance(choice.tiles, WgmmaTiles) else 1)


def test_fixed_order_fills_a_card_with_few_tokens_and_with_many() -> None:
    tuning, form = DEVICES["NVIDIA H200"], FORMS[GGMLType.Q4_K]
    for (out_features, cols), parts in {(4096, 4096): 4, (6144, 4096): 4, (4096, 14336): 4, (28672, 4096): 1}.items():
        for tokens in (1, 8, 32, 64, 128, 256, 2048):
            choice = fixed_tiling(tuning, tokens, out_features, cols, form)
            x, y, z = choice.tiles.grid(out_features, choice.splits, -(-tokens // choice.tiles.tokens))
            assert parts_of(choice) == parts
            assert x * y * z >= 0.7 * tuning.processors
    assert is_gated(tuning, 28672, 4096, form)
    assert not is_gated(tuning, 2048, 4096, form)


def test_blocks_add_their_parts_where_they_fill_the_card_as_evenly() -> None:
    tuning, form = DEVICES["NVIDIA H200"], FORMS[GGMLType.Q4_K]

    def summed(tokens: int, out_features: int, cols: int, *beside: FragmentFormat) -> int:
        choice = fixed_tiling(tuning, tokens, out_features, cols, form, beside)
        assert isinstance(choice.tiles, WgmmaTiles)
        assert tuning.shrunk(choice.tiles, [form, *beside]) == choice.tiles
        assert choice.splits == 1 or choice.tiles.summed == 1
        return choice.tiles.summed

    # 32, 128 and 144 blocks, which need twice the time of 132, then 208 and 256
    assert [summed(tokens, 4096, 14336) for tokens in (256, 1024, 1152, 1664, 2048)] == [1, 4, 1, 4, 4]
    assert summed(2048, 6144, 4096, FORMS[GGMLType.Q6_K]) == 4
    assert summed(2048, 28672, 4096) == 1  # it has one part
    assert summed(2048, 4096, 64 * 60) == 1  # parts would have odd numbers of chunks
    assert summed(2048, 6144, 4096, FLOATS) == 1  # sums and their ring have no room beside each other


def test_warpgroups_take_turns_where_decoding_takes_most_of_the_time() -> None:
    def turns(tokens: int, out_features: int, cols: int, form: FragmentFormat = FORMS[GGMLType.Q6_K]) -> int:
        tiles = fixed_tiling(DEVICES["NVIDIA H200"], tokens, out_features, cols, form).tiles
        assert isinstance(tiles, WgmmaTiles)
        assert tiles.turns <= tiles.stages
        return tiles.turns

    assert [turns(tokens, 4096, 14336) for tokens in (1, 8, 16, 32, 64, 2048)] == [3, 3, 3, 2, 1, 1]
    assert [turns(tokens, 4096, 4096) for tokens in (1, 8, 16, 32, 64)] == [2, 2, 2, 2, 1]
    assert turns(1, 6144, 4096) == 1  # its blocks do not fit at once
    assert turns(1, 28672, 4096) == turns(1, 128256, 4096) == 1
    assert turns(1, 4096, 64 * 60) == 1  # stages would not be whole with two chunks
    assert turns(1, 4096, 14336, FLOATS) == 1


def test_tables_hold_for_their_shapes() -> None:
    for table in resources.files("realizar.backends.cuda").joinpath("tables").iterdir():
        text = table.read_text(encoding="utf-8")
        found = Table.parse(text)
        lines = list(found.lines)
        assert [line.to_json() for line in (*lines, *found.expert_lines)] == json.loads(text)
        assert lines == best_lines(lines)
        assert list(found.expert_lines) == best_expert_lines(found.expert_lines)
        general = [line for line in lines if not line.alone]
        shapes = {(line.out_features, line.cols) for line in general}
        for tokens in {line.tokens for line in general}:
            assert {(line.out_features, line.cols) for line in general if line.tokens == tokens} == shapes


def test_a_line_that_counts_alone_is_for_no_other_shape() -> None:
    tuning, form = DEVICES["NVIDIA H200"], FORMS[GGMLType.Q4_K]
    others = replace(tuning, lines=tuple(line for line in tuning.lines if not line.alone))
    alone = {(line.out_features, line.cols) for line in tuning.lines if line.alone}
    assert (34816, 5120) in alone
    for (out_features, cols), tokens in itertools.product(alone, (8, 16)):
        for choose in ("many_tokens", "gated"):
            found, general = (getattr(each, choose)(tokens, out_features + 64, cols, form) for each in (tuning, others))
            assert found == general
    assert tuning.gated(8, 34816, 5120, form) != others.gated(8, 34816, 5120, form)


def test_a_line_serves_its_own_shape_unchanged() -> None:
    """Unless another one was measured for that shape alone."""
    tuning, form = DEVICES["NVIDIA H200"], FORMS[GGMLType.Q4_K]
    alone = {line.key[:-1] for line in tuning.lines if line.alone}
    assert any(line.key[:-1] in alone for line in tuning.lines if not line.alone)
    for line in tuning.lines:
        if not line.alone and line.key[:-1] in alone:
            continue
        choice = (
            tuning.few_tokens(line.tokens, line.out_features, line.cols, form)
            if isinstance(line.tiles, MatvecTiles)
            else tuning.many_tokens(line.tokens, line.out_features, line.cols, form)
        )
        assert (choice.tiles, choice.splits) == (line.tiles, line.splits)


def test_blocks_stay_in_long_steps_of_even_numbers_of_chunks() -> None:
    tuning, tiles = DEVICES["NVIDIA H200"], WgmmaTiles(128, 2, 2, 4, 1, 1)
    for form in dict.fromkeys(FORMS.values()):
        for tokens, cols in ((1023, 4096), (1024, 4096), (2048, 4032), (16384, 14336)):
            staying = tuning.staying(tiles, tokens, cols, form)
            assert isinstance(staying, WgmmaTiles)
            assert staying.stays == (tokens >= 1024 and form.chunks(cols) % 2 == 0)
            assert tuning.shrunk(staying, [form]) == staying
        for other in (replace(tiles, strips=1), replace(tiles, blocks=2), replace(tiles, summed=2)):
            assert tuning.staying(other, 2048, 4096, form) == other


def test_a_table_does_not_split_what_may_have_the_residual_add_epilogue() -> None:
    """For one token, a line counts where it keeps columns whole, or where few outputs make splits necessary."""
    form, rule = FORMS[GGMLType.Q4_K], DeviceTuning(wgmma=True, processors=132)
    for out_features, splits, counts in ((4096, 4, False), (4096, 1, True), (512, 4, True)):
        line = Line(1, out_features, 4096, MatvecTiles(1, 1, 6, 2, 4), splits, 0.001)
        choice = replace(rule, lines=(line,)).few_tokens(1, out_features, 4096, form)
        assert choice == (Tiling(line.tiles, splits) if counts else rule.few_tokens(1, out_features, 4096, form))


def test_a_nearby_shape_gets_as_many_blocks() -> None:
    line = Line(8, 4096, 4096, WgmmaTiles(8, 2, 1, 6, 2, 1), 8, 0.01)
    tuning = DeviceTuning(wgmma=True, processors=132, shared_bytes=227 * 1024, lines=(line,))
    form = FORMS[GGMLType.Q4_K]
    assert tuning.many_tokens(8, 2048, 8192, form).splits == 12  # sixteen, but no more than twelve
    assert tuning.many_tokens(8, 8192, 4096, form).splits == 4
    assert tuning.many_tokens(8, 131072, 4096, form).splits == 1


def test_long_steps_have_splits_that_save_a_round_of_blocks() -> None:
    """Of another shape than a line's: where what is saved is more than the sums cost."""
    line = Line(2048, 4096, 4096, WgmmaTiles(128, 2, 2, 5, 1, 1), 3, 0.1)
    tuning = DeviceTuning(wgmma=True, processors=132, shared_bytes=227 * 1024, lines=(line,))
    splits = {
        (tokens, out_features, cols): tuning.many_tokens(tokens, out_features, cols, FORMS[GGMLType.Q4_K]).splits
        for tokens, out_features, cols in (
            (2048, 4096, 4096), (2048, 5120, 17408), (2048, 5120, 2048), (2048, 16640, 5120), (8192, 5120, 17408)
        )
    }  # fmt: skip
    assert splits == {
        (2048, 4096, 4096): 3,  # as measured
        (2048, 5120, 17408): 2,  # 320 blocks, three rounds of 132, or five of half the columns
        (2048, 5120, 2048): 1,
        (2048, 16640, 5120): 1,  # eight rounds, or sixteen halves
        (8192, 5120, 17408): 1,  # ten rounds of 1,280
    }


def test_splits_of_long_steps_cost_half_as_much_in_halves() -> None:
    """320 blocks of 132 at once: five rounds of half the columns are saved where their sums are halves."""
    line = Line(2048, 4096, 4096, WgmmaTiles(128, 2, 2, 5, 1, 1), 3, 0.1)
    tuning = DeviceTuning(wgmma=True, processors=132, shared_bytes=227 * 1024, lines=(line,))
    form = FORMS[GGMLType.Q4_K]
    assert [tuning.many_tokens(2048, 5120, 6144, form, each).splits for each in (4, 2)] == [1, 2]
    assert [tuning.many_tokens(2048, 16640, 5120, form, each).splits for each in (4, 2)] == [1, 1]


def test_the_cheapest_line_counts_what_its_consumer_reads() -> None:
    tiles = WgmmaTiles(64, 1, 1, 4, 2, 2)
    quick = Line(64, 4096, 4096, tiles, 8, 0.0080)
    frugal = Line(64, 4096, 4096, tiles, 2, 0.0085)
    assert best_lines([quick, frugal]) == [frugal]


@pytest.mark.parametrize("name", DEVICES)
def test_candidates_fit_and_are_many(name: str) -> None:
    device = DEVICES[name]
    for tokens, form in itertools.product((1, 2, 8, 64, 128, 2048), set(FORMS.values())):
        tried = list(candidates(tokens, form, device))
        assert len(set(tried)) == len(tried) > 1
        for tiles in tried:
            assert tiles.tokens == (tokens if tokens <= device.int8_tokens else device.block_tokens(tokens))
            assert tiles.shared_bytes(form) * tiles.blocks < device.shared_bytes
            splits = split_counts(tiles, tokens, 4096, 64, device)
            assert splits[0] == 1
            assert splits == sorted(set(splits))


def test_a_table_of_this_machine_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    line = Line(8, 4096, 4096, WgmmaTiles(8, 1, 1, 4, 1, 2), 3, 0.01)
    slower = Line(8, 4096, 4096, WgmmaTiles(8, 1, 1, 6, 1, 2), 3, 0.02)
    path = own_table("NVIDIA H200")
    assert path.name == "nvidia-h200.json"
    write_table(path, [slower, line])
    assert load_tuning("NVIDIA H200", (9, 0), 132, 227 * 1024).lines == (line,)
    assert load_tuning("NVIDIA X", (9, 0), 132, 227 * 1024).lines == ()
    path.write_text('{"not": "a table"}')
    assert load_tuning("NVIDIA H200", (9, 0), 132, 227 * 1024).lines == DEVICES["NVIDIA H200"].lines
    assert "is not a tuning table" in caplog.text
