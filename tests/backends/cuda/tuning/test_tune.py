"""`realizar tune` with a made-up timer: shapes of a model, the sweep, the table, and what the tuning then chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.matmul.recorded_launches import RecordingKernel, matmuls_on, record_launches  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends import device_choice  # noqa: E402
from realizar.backends.cuda import device as device_module  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile, interpreter_device  # noqa: E402
from realizar.backends.cuda.layouts.fragments import fragment_format  # noqa: E402
from realizar.backends.cuda.matmul.tuning_table import DeviceTuning, Line, load_tuning, own_table, updated_lines  # noqa: E402
from realizar.backends.cuda.native import launcher  # noqa: E402
from realizar.backends.cuda.native.compiler import Source  # noqa: E402
from realizar.backends.cuda.native.sources import MatvecTiles, Tiles, WgmmaTiles  # noqa: E402
from realizar.backends.cuda.tuning import measure  # noqa: E402
from realizar.backends.cuda.tuning.sweep import Shape, candidates, model_shapes, split_counts, sweep  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import pack_by_threads  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.cli.main import app, run_app  # noqa: E402
from realizar.errors import CapacityError, KernelError  # noqa: E402
from realizar.models import registry  # noqa: E402
from realizar.models.generated.generate import generate_gguf  # noqa: E402
from realizar.models.spec import Experts  # noqa: E402
from realizar.quantization.block_source import block_source  # noqa: E402
from realizar.quantization.ggml_layouts import Q4_0, Q4_K  # noqa: E402
from realizar.quantization.random_blocks import random_blocks  # noqa: E402

HOPPER = load_tuning("NVIDIA X", (9, 0), 114, 227 * 1024)
AMPERE = load_tuning("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * 1024)
SHAPE = Shape(1536, 1024, Q4_K)


class MadeUpMeter:
    """Times by a rule; tiles in `broken` do not run. Insists on being asked for what was prepared alone."""

    def __init__(self, rule: Callable[[int, Tiles, int], float], broken: Sequence[Tiles] = ()) -> None:
        self.rule, self.broken = rule, broken
        self.asked: list[tuple[Shape, int, Tiles, int]] = []
        self._shape: Shape | None = None
        self._prepared: Sequence[Line] = ()

    def take(self, work: Shape) -> None:
        self._shape = work

    def prepare(self, candidates: Sequence[Line]) -> None:
        self._prepared = candidates
        if any(each.tiles in self.broken for each in candidates):
            raise KernelError("one does not compile")

    def ms(self, candidate: Line) -> float:
        assert self._shape is not None
        assert candidate in self._prepared
        tokens, tiles, splits = candidate.tokens, candidate.tiles, candidate.splits
        if tiles in self.broken:
            raise KernelError("too many registers")
        self.asked.append((self._shape, tokens, tiles, splits))
        return self.rule(tokens, tiles, splits)


def slow_but(fast: Tiles, splits: int) -> Callable[[int, Tiles, int], float]:
    return lambda tokens, tiles, count: 0.01 if (tiles, count) == (fast, splits) else 0.02


@pytest.mark.parametrize("tuning", [HOPPER, AMPERE], ids=["hopper", "ampere"])
def test_every_candidate_is_timed(tuning: DeviceTuning) -> None:
    meter = MadeUpMeter(lambda tokens, _tiles, splits: tokens + splits)
    reported: list[Line] = []
    lines = sweep(tuning, [SHAPE, replace(SHAPE, cols=512)], (1, 8), meter, reported.append)
    form = fragment_format(SHAPE.layout)
    expected = {
        (shape.cols, tokens, tiles, splits)
        for shape in (SHAPE, replace(SHAPE, cols=512))
        for tokens in (1, 8)
        for tiles in candidates(tokens, form, tuning)
        for splits in split_counts(tiles, tokens, 1536, form.chunks(shape.cols), tuning)
    }
    assert {(shape.cols, tokens, tiles, splits) for shape, tokens, tiles, splits in meter.asked} == expected
    assert len(lines) == len(expected) > 40
    assert reported == lines
    assert all(line.ms == line.tokens + line.splits for line in lines)


def test_what_does_not_run_is_left_out() -> None:
    first, *others = tried = list(candidates(8, fragment_format(SHAPE.layout), HOPPER))
    lines = sweep(HOPPER, [SHAPE], (8,), MadeUpMeter(lambda *_: 1.0, [first]))
    assert {line.tiles for line in lines} == set(others)
    with pytest.raises(KernelError, match="too many registers"):
        sweep(HOPPER, [SHAPE], (8,), MadeUpMeter(lambda *_: 1.0, tried))


def test_long_steps_are_timed_by_the_blocks_that_run_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Source] = []

    def compile_all(sources: Sequence[Source], _arch: str, _compiled: object = None) -> list[bytes]:
        found.extend(sources)
        return [b""] * len(sources)

    record_launches(monkeypatch, RecordingKernel)
    monkeypatch.setattr(launcher, "compile_sources", compile_all)
    data = random_blocks(GGMLType.Q4_K, 64, SHAPE.cols, np.random.default_rng(0), 0.02)
    matrix = pack_by_threads([block_source(GGMLType.Q4_K, data, 64, SHAPE.cols)], "cpu")
    monkeypatch.setattr(measure, "copies", lambda *_: [matrix])
    monkeypatch.setattr(measure, "_cache_bytes", lambda _: 1)
    meter = measure.DeviceMeter(matmuls_on(monkeypatch))
    meter.take(SHAPE)
    for tokens, stay in ((512, False), (2048, True)):
        meter.prepare([Line(tokens, SHAPE.out_features, SHAPE.cols, WgmmaTiles(128, 2, 2, 4, 1, 1), 1, 0.0)])
        assert ("::multiply_tiles(" in found[-1].text) is stay


def test_logits_are_not_tuned_for_whole_prompts() -> None:
    lines = sweep(HOPPER, [replace(SHAPE, most_tokens=256)], (1, 256, 512), MadeUpMeter(lambda *_: 1.0))
    assert {line.tokens for line in lines} == {1, 256}


def test_a_table_written_is_what_the_tuning_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner of a sweep comes back for its own shape, by way of the file."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    card = DeviceProfile(torch.device("cuda", 0), "NVIDIA X", (9, 0), 114, 1)
    form = fragment_format(SHAPE.layout)
    for tokens, kind in ((1, MatvecTiles), (8, WgmmaTiles)):
        fast = list(candidates(tokens, form, HOPPER))[3]
        tuning = load_tuning(card.name, card.capability, card.processors, 227 * 1024)
        splits = split_counts(fast, tokens, SHAPE.out_features, form.chunks(SHAPE.cols), tuning)[-1]
        meter = MadeUpMeter(slow_but(fast, splits))
        monkeypatch.setattr(
            measure,
            "MatmulKernels",
            lambda _device, tuning=tuning: SimpleNamespace(tuning=tuning, batch_invariant=False, capability=(9, 0)),
        )
        monkeypatch.setattr(measure, "DeviceMeter", lambda _matmuls, meter=meter: meter)
        path = measure.tune_device(card, [SHAPE], (tokens,), lambda _line: None)
        assert path == own_table(card.name)
        found = load_tuning(card.name, card.capability, card.processors, 227 * 1024)
        case = tokens, SHAPE.out_features, SHAPE.cols, form
        choice = found.few_tokens(*case) if tokens == 1 else found.many_tokens(*case)
        assert isinstance(choice.tiles, kind)
        assert (choice.tiles, choice.splits) == (fast, splits)
    assert {line.tokens for line in found.lines} == {1, 8}  # the first table's line is there still


def test_what_is_measured_anew_replaces_the_old() -> None:
    """A slower measurement replaces the old one too, which may be of another driver."""
    tiles = WgmmaTiles(8, 1, 1, 4, 1, 2)
    old = [Line(8, 64, 64, tiles, 1, 0.01), Line(8, 128, 64, tiles, 1, 0.01), Line(1, 64, 64, tiles, 1, 0.01)]
    new = [Line(8, 64, 64, tiles, 2, 0.03), Line(8, 64, 64, tiles, 3, 0.05)]
    old.append(replace(old[0], alone=True))
    assert updated_lines(old, new) == [old[2], new[0], old[1]]


def test_shapes_of_a_model() -> None:
    """QKV and gate and up side by side, each shape once, with the type of most of its weights; floats are not tuned."""
    spec, checkpoint = random_model(Recipe(64, 4, 2, weights="Q4_0"))
    value = checkpoint.tensors[spec.tensors[spec.layers[0].mixer.v.weight].name]
    checkpoint.tensors[value.name] = replace(value, ggml_type=GGMLType.Q8_0)
    assert model_shapes(spec, checkpoint) == [
        Shape(512, 256, Q4_0),
        Shape(256, 256, Q4_0),
        Shape(1024, 256, Q4_0),
        Shape(256, 512, Q4_0),
        Shape(160, 256, Q4_0, 256),
    ]
    assert model_shapes(*random_model(Recipe(weights="BF16"))) == []


def test_a_card_without_our_kernels_is_refused() -> None:
    with pytest.raises(CapacityError, match="interpreter can't run the kernels"):
        measure.tune_device(interpreter_device(), [SHAPE], (1,), lambda _line: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    generate_gguf("tiny", path, "q4_k_m")
    return path


def test_the_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    card = DeviceProfile(torch.device("cuda", 0), "NVIDIA X", (9, 0), 114, 1)
    monkeypatch.setattr(device_choice, "choose_device", lambda _wanted: ChosenDevice("cuda"))
    monkeypatch.setattr(device_module, "open_device", lambda _index: card)
    monkeypatch.setattr(
        measure,
        "MatmulKernels",
        lambda _device: SimpleNamespace(tuning=HOPPER, batch_invariant=False, capability=(9, 0)),
    )
    monkeypatch.setattr(measure, "DeviceMeter", lambda _matmuls: MadeUpMeter(lambda *_: 0.5))
    assert run_app(app, ["tune", str(model), "--tokens", "8,1"]) == 0
    out, err = capsys.readouterr()
    assert str(own_table("NVIDIA X")) in out
    lines = load_tuning("NVIDIA X", (9, 0), 114, 227 * 1024).lines
    assert {line.tokens for line in lines} == {1, 8}
    assert len(err.splitlines()) == len(lines)  # one of each shape and number of tokens is the fastest


@pytest.mark.parametrize(
    ("words", "message"), [(("--tokens", "1,x"), "--tokens must be numbers"), (("--tokens", "0"), "at least 1")]
)
def test_impossible_tokens_are_refused(
    model: Path, words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["tune", str(model), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["tune", str(model)]) == 1
    assert "no GPU can be used" in capsys.readouterr().err


def test_what_no_gpu_runs_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a matmul is measured: a GPU has the model's matmuls, and not another part."""
    spec, _ = random_model(Recipe(experts=4, per_token=2))
    first, second = spec.layers
    assert isinstance(first.feed_forward, Experts)
    ungated = replace(first, feed_forward=replace(first.feed_forward, gate=None))
    monkeypatch.setattr(device_choice, "choose_device", lambda _wanted: ChosenDevice("cuda"))
    monkeypatch.setattr(registry, "build_spec", lambda _checkpoint: replace(spec, layers=(ungated, second)))
    assert run_app(app, ["tune", str(model)]) == 1
    reason = "random: layer 0 has experts without a gate, which the CUDA backend does not run"
    assert capsys.readouterr().err == f"realizar: {reason}\n"
