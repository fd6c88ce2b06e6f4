"""`realizar tune` of mixtures with a made-up timer: the sweep, the table, and the tiles that steps then have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.matmul.recorded_launches import matmuls_on  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends import device_choice  # noqa: E402
from realizar.backends.cuda import device as device_module  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.layouts.fragments import fragment_format  # noqa: E402
from realizar.backends.cuda.matmul.experts import ExpertMatmuls  # noqa: E402
from realizar.backends.cuda.matmul.grouped import GroupedBuffers, GroupedMatmuls  # noqa: E402
from realizar.backends.cuda.matmul.tuning_table import (  # noqa: E402
    DeviceTuning,
    ExpertLine,
    ExpertShape,
    ExpertTiles,
    best_expert_lines,
    load_tuning,
    own_table,
    updated_expert_lines,
    write_table,
)
from realizar.backends.cuda.native.grouped.source import DirectTiles, GroupedTiles  # noqa: E402
from realizar.backends.cuda.native.sources import MatvecTiles  # noqa: E402
from realizar.backends.cuda.tuning import measure  # noqa: E402
from realizar.backends.cuda.tuning import sweep as sweep_module  # noqa: E402
from realizar.backends.cuda.tuning.experts import (  # noqa: E402
    TunedExperts,
    grouped_candidates,
    pair_candidates,
    tuned_experts,
)
from realizar.backends.cuda.weights.experts import PackedExperts  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.cli.main import app, run_app  # noqa: E402
from realizar.errors import KernelError  # noqa: E402
from realizar.models.generated.generate import generate_gguf, generated_header  # noqa: E402
from realizar.models.generated.shapes import SHAPES  # noqa: E402
from realizar.models.registry import build_spec  # noqa: E402
from realizar.quantization.convert import QUANTIZED_TYPES  # noqa: E402
from realizar.quantization.ggml_layouts import GGML_LAYOUTS, Q4_K, Q6_K  # noqa: E402

HOPPER = load_tuning("NVIDIA X", (9, 0), 114, 227 * 1024)
AMPERE = load_tuning("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * 1024)
SHAPE = ExpertShape(128, 2048, 768)
MIXTURE = TunedExperts(SHAPE, 8, Q4_K, Q6_K)
FORMATS = {True: fragment_format(Q4_K), False: fragment_format(Q6_K)}


class MadeUpMeter:
    """Times by a rule; tiles in `broken` do not run. Insists on being asked for what was prepared alone."""

    def __init__(self, rule: Callable[[bool, ExpertTiles], float], broken: Sequence[ExpertTiles] = ()) -> None:
        self.rule, self.broken = rule, broken
        self._prepared: Sequence[ExpertLine] = ()

    def take(self, work: TunedExperts) -> None: ...

    def prepare(self, candidates: Sequence[ExpertLine]) -> None:
        self._prepared = candidates
        if any(each.tiles in self.broken for each in candidates):
            raise KernelError("one does not compile")

    def ms(self, candidate: ExpertLine) -> float:
        assert candidate in self._prepared
        if candidate.tiles in self.broken:
            raise KernelError("too many registers")
        return self.rule(candidate.gated, candidate.tiles)


def wgmma(tokens: int, strips: int = 2, groups: int = 1, blocks: int = 2) -> GroupedTiles:
    return GroupedTiles("wgmma", tokens, strips, groups, 4, blocks)


def stack(gated: bool, shape: ExpertShape = SHAPE) -> PackedExperts:
    """The sizes of a stack, without weights."""
    out_features, cols = (2 * shape.width, shape.hidden) if gated else (shape.hidden, shape.width)
    none = torch.zeros(0, dtype=torch.uint8)
    return PackedExperts(out_features, cols, FORMATS[gated], none, none, None, gated, count=shape.experts)


def test_every_candidate_is_timed() -> None:
    """Mat-vecs of pairs for few tokens, grouped matmuls for more; what does not run has no line."""
    broken = next(grouped_candidates(512, 128, True, FORMATS[True], HOPPER, 32))
    reported: list[ExpertLine] = []
    meter = MadeUpMeter(lambda gated, tiles: tiles.tokens + gated, [broken])
    lines = sweep_module.sweep(HOPPER, [MIXTURE], (4, 64), meter, reported.append)
    assert lines == reported
    found = {(line.pairs, line.gated, line.tiles) for line in lines}
    assert len(found) == len(lines)
    expected = {(32, gated, tiles) for gated in FORMATS for tiles in pair_candidates(gated, (12, 32)[gated])}
    for gated, weight_format in FORMATS.items():
        chunks = (12, 32)[gated]
        expected |= {(512, gated, each) for each in grouped_candidates(512, 128, gated, weight_format, HOPPER, chunks)}
    assert found == expected - {(512, True, broken)}
    assert {line.ms for line in lines if line.pairs == 32} == {1.0, 2.0}


@pytest.mark.parametrize(("tuning", "most"), [(HOPPER, 128), (AMPERE, 64)], ids=["hopper", "ampere"])
@pytest.mark.parametrize("pairs", [128, 2048, 16384])
def test_grouped_candidates_fit_and_are_many(tuning: DeviceTuning, most: int, pairs: int) -> None:
    for ggml_type in QUANTIZED_TYPES:
        weight_format = fragment_format(GGML_LAYOUTS[ggml_type])
        for gated in (True, False):
            tried = list(grouped_candidates(pairs, 128, gated, weight_format, tuning, 32))
            assert len(set(tried)) == len(tried) > 1
            assert any(tiles.kind == "direct" for tiles in tried) == (tuning.wgmma and pairs < 16384)
            for tiles in tried:
                assert min(most, pairs / 256) <= tiles.tokens <= most
                if isinstance(tiles, DirectTiles):
                    assert tiles.tokens <= 16
                    assert tiles.blocks * (tiles.shared_bytes(32) + tiles.static_bytes) <= tuning.shared_bytes
                    assert tiles.parts * tiles.ahead <= 32
                else:
                    assert tiles.kind == ("wgmma" if tuning.wgmma else "mma_sync")
                    assert tiles.strips == 2 or not gated
                    assert not tiles.laid or (gated and tuning.wgmma and replace(tiles, laid=False) in tried)
                    assert tiles.shared_bytes(weight_format, gated) + tiles.static_bytes <= tuning.shared_bytes


def test_candidates_of_pairs_give_each_warp_columns() -> None:
    for gated, chunks in ((True, 32), (False, 12), (False, 1)):
        tried = list(pair_candidates(gated, chunks))
        assert len(set(tried)) == len(tried) > 0
        for tiles in tried:
            assert tiles.parts * tiles.unroll <= chunks
            assert tiles.tiles == 2 or not gated
            assert tiles.threads * tiles.blocks <= 1024


def test_both_matmuls_of_a_mixture_get_tiles_of_one_size() -> None:
    """The fastest gate and up has 8 places and the fastest down 16: the pair with the least sum counts."""
    lines = [
        ExpertLine(512, SHAPE, gated, wgmma(tokens, blocks=blocks), ms)
        for gated, tokens, blocks, ms in (
            (True, 8, 2, 10.0), (True, 16, 2, 11.0), (True, 16, 3, 12.0), (False, 8, 2, 9.0), (False, 16, 2, 5.0),
            (True, 32, 2, 1.0),
        )
    ]  # fmt: skip
    other = ExpertLine(256, SHAPE, False, wgmma(8), 1.0)  # without a gate and up, so it is of no use
    assert best_expert_lines([*lines, other]) == [lines[1], lines[4]]


def test_what_is_measured_anew_replaces_the_old() -> None:
    def both(pairs: int, shape: ExpertShape, ms: float) -> list[ExpertLine]:
        return [ExpertLine(pairs, shape, gated, wgmma(8), ms) for gated in (True, False)]

    small = replace(SHAPE, experts=64)
    old = both(128, SHAPE, 1.0) + both(256, SHAPE, 1.0) + both(128, small, 1.0)
    new = both(256, SHAPE, 2.0)
    assert updated_expert_lines(old, new) == both(128, small, 1.0) + both(128, SHAPE, 1.0) + new


def test_steps_take_the_measured_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of the file; a step with fewer than half of a line's pairs, or with more, goes by rule."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    gate_up, down = wgmma(16, groups=2), wgmma(16, strips=1, blocks=4)
    few = MatvecTiles(1, 2, 3, 4, 5)
    lines = [
        ExpertLine(512, SHAPE, True, gate_up, 0.07), ExpertLine(512, SHAPE, False, down, 0.05),
        ExpertLine(16, SHAPE, True, few, 0.01), ExpertLine(16, SHAPE, False, replace(few, tiles=1), 0.01),
    ]  # fmt: skip
    matmuls = matmuls_on(monkeypatch)
    write_table(own_table("NVIDIA H200"), matmuls.tuning.lines, lines)
    matmuls.tuning = load_tuning("NVIDIA H200", (9, 0), 132, 227 * 1024)
    rule = replace(matmuls.tuning, expert_lines=())
    grouped, pairs = GroupedMatmuls(matmuls), ExpertMatmuls(matmuls)
    for rows in (33, 64):
        step = grouped.step(rows, 8, SHAPE)
        assert step.tokens == 16
        for wanted, config in (
            (gate_up, grouped.route(step, stack(True), "silu")),
            (down, grouped.route(step, stack(False), tiled=True)),
        ):
            assert replace(config.tiles, stages=4) == wanted
            assert config.tiles.stages >= 3
        wider = replace(SHAPE, width=1024)  # other matrices of as many experts: by rule
        assert grouped.step(rows, 8, wider).tokens == 8
        other = grouped.route(step, stack(True, wider), "silu")
        assert (other.tiles.tokens, other.tiles.groups) == (16, 1)
    places = grouped.step(64, 8, SHAPE).places
    assert len(GroupedBuffers("cpu", 64, 8, SHAPE, True, grouped.lines).slots) == places
    assert pairs._key(stack(True), 2, 8, "silu") == (FORMATS[True], few, "silu")
    assert pairs._key(stack(False), 1, 8, None)[1] == replace(few, tiles=1)
    found = {tokens: pairs._key(stack(True), tokens, 8, "silu") for tokens in (3, 4, 8, 9)}
    steps = {rows: grouped.step(rows, 8, SHAPE) for rows in (31, 65)}
    matmuls.tuning = rule
    assert found == {tokens: ExpertMatmuls(matmuls)._key(stack(True), tokens, 8, "silu") for tokens in found}
    assert steps == {rows: GroupedMatmuls(matmuls).step(rows, 8, SHAPE) for rows in steps}


def test_lines_of_another_instruction_do_not_count() -> None:
    line = ExpertLine(512, SHAPE, True, wgmma(128), 0.05)
    tuning = replace(AMPERE, expert_lines=(line,))
    assert tuning.grouped_lines(in_order=False) == tuning.pair_lines == ()
    assert replace(tuning, wgmma=True).grouped_lines(in_order=False) == (line,)


def test_an_order_of_sums_that_is_fixed_has_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `batch_invariant` pairs have the tiles of one token's in every step."""
    matmuls = matmuls_on(monkeypatch, invariant=True)
    tiles = [MatvecTiles(1, 2, parts, 2, 2) for parts in (1, 2)]
    lines = [ExpertLine(8 * (1 + index), SHAPE, True, each, 0.01) for index, each in enumerate(tiles)]
    matmuls.tuning = replace(matmuls.tuning, expert_lines=tuple(lines))
    pairs = ExpertMatmuls(matmuls)
    assert {pairs._key(stack(True), tokens, 8, "silu")[1] for tokens in (1, 2, 9, 100)} == {tiles[0]}


def test_a_fixed_order_leaves_out_kernels_with_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of direct kernels come back from a file, and count for steps of any order alone; for those of one order
    the best of the others stand beside them."""
    lines = [
        ExpertLine(512, SHAPE, gated, tiles, ms)
        for tiles, ms in ((DirectTiles(16, 2, 4, 3, 2), 0.05), (wgmma(8), 0.06), (wgmma(16), 0.07))
        for gated in (True, False)
    ]
    lines_and_laid = [*lines, ExpertLine(512, SHAPE, True, replace(wgmma(32), laid=True), 0.05)]
    assert [ExpertLine.from_json(line.to_json()) for line in lines_and_laid] == lines_and_laid
    assert best_expert_lines(reversed(lines)) == lines[:4]
    assert best_expert_lines(lines[1:4]) == lines[2:4]
    matmuls, fixed = matmuls_on(monkeypatch), matmuls_on(monkeypatch, invariant=True)
    matmuls.tuning = fixed.tuning = replace(matmuls.tuning, expert_lines=tuple(lines[:4]))
    grouped, in_order = GroupedMatmuls(matmuls), GroupedMatmuls(fixed)
    step, other = grouped.step(64, 8, SHAPE), in_order.step(64, 8, SHAPE)
    assert (step.tokens, other.tokens) == (16, 8)
    assert grouped.route(step, stack(True), "silu").tiles == lines[0].tiles
    assert in_order.route(other, stack(True), "silu").tiles.kind == "wgmma"


def test_mixtures_of_a_model() -> None:
    header = generated_header("qwen3-30b-a3b")
    assert tuned_experts(build_spec(header), header) == [MIXTURE]
    assert tuned_experts(*random_model(Recipe())) == []
    floats = generated_header("tiny-moe")
    for name, tensor in floats.tensors.items():
        if "_exps" in name:
            floats.tensors[name] = replace(tensor, ggml_type=GGMLType.BF16)
    assert tuned_experts(build_spec(floats), floats) == []


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The winners are in the table, and one line is shown for each matmul."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path, shape = tmp_path / "tiny-moe.gguf", SHAPES["tiny-moe"]
    generate_gguf("tiny-moe", path, "q4_k_m")
    card = DeviceProfile(torch.device("cuda", 0), "NVIDIA X", (9, 0), 114, 1)
    monkeypatch.setattr(device_choice, "choose_device", lambda _wanted: ChosenDevice("cuda"))
    monkeypatch.setattr(device_module, "open_device", lambda _index: card)
    monkeypatch.setattr(measure, "MatmulKernels", lambda _device: SimpleNamespace(tuning=HOPPER))
    monkeypatch.setattr(sweep_module, "model_shapes", lambda *_: [])
    fast = (MatvecTiles(1, 2, 2, 1, 8), MatvecTiles(1, 4, 1, 2, 6))
    meter = MadeUpMeter(lambda gated, tiles: 0.1 if tiles == fast[not gated] else 0.2)
    monkeypatch.setattr(measure, "ExpertDeviceMeter", lambda _matmuls: meter)
    assert run_app(app, ["tune", str(path), "--tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert str(own_table("NVIDIA X")) in out
    small = ExpertShape(shape.num_experts, shape.hidden_size, shape.expert_size)
    assert load_tuning("NVIDIA X", (9, 0), 114, 227 * 1024).expert_lines == (
        ExpertLine(4, small, True, fast[0], 0.1), ExpertLine(4, small, False, fast[1], 0.1)
    )  # fmt: skip
    assert err.splitlines() == [
        "gate and up of 8 experts, 256 x 256, 4 pairs", "down of 8 experts, 256 x 256, 4 pairs"
    ]  # fmt: skip
