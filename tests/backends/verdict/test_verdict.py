"""Verdicts on a scripted card: which kernels it goes without, what is kept, and what the log says."""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends import device_choice, select  # noqa: E402
from realizar.backends.cuda import device as device_module  # noqa: E402
from realizar.backends.cuda.device import SLOWER, DeviceProfile, Family, interpreter_device  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.backends.load_progress import no_progress  # noqa: E402
from realizar.backends.verdict import apply, beside, comparing_process, judge, kept  # noqa: E402
from realizar.backends.verdict.apply import trusted  # noqa: E402
from realizar.backends.verdict.compare import NoComparisonError  # noqa: E402
from realizar.backends.verdict.judge import AGREES, Verdict  # noqa: E402
from realizar.backends.verdict.small_models import SMALL_MODELS, SmallModel  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.cli.commands import doctor  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.loading import load_core  # noqa: E402
from realizar.errors import CapacityError, KernelError  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

CARD = replace(interpreter_device(), name="H900")
LABEL = "cuda:0, H900"
MODELS = (SmallModel("tiny-window", "q4_k_m"), SmallModel("tiny-moe", "q4_k_m"))


class Card:
    """A card that gets kernels wrong: those of `wrong`, in some models; `runs` are its comparisons."""

    def __init__(self) -> None:
        self.wrong: frozenset[Family] = frozenset()
        self.failing: frozenset[Family] = frozenset()
        self.shapes: Collection[str] = ("tiny-window", "tiny-moe")
        self.fault: Exception | None = None
        self.runs: list[tuple[str, frozenset[Family]]] = []

    def difference(self, model: SmallModel, _spec: Any, _checkpoint: Any, device: DeviceProfile) -> str | None:
        self.runs.append((model.shape, device.without))
        if self.fault is not None:
            raise self.fault
        if self.failing & device.without:
            raise KernelError("the slower road does not compile")
        wrong = self.wrong - device.without if model.shape in self.shapes else ()
        return f"1 nats apart by {len(wrong)}" if wrong else None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    made = Card()
    monkeypatch.setattr(judge, "_difference", made.difference)
    monkeypatch.setattr(kept, "user_cache", lambda: tmp_path)
    return made


def without(models: Collection[SmallModel] = MODELS, device: DeviceProfile = CARD) -> frozenset[Family]:
    return trusted(device, LABEL, list(models), no_progress).without


def test_a_card_that_agrees_is_compared_once(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    assert without() == without() == frozenset()
    assert card.runs == [("tiny-window", frozenset()), ("tiny-moe", frozenset())]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("family", SLOWER)
def test_a_family_that_is_wrong_is_left_out(family: Family, card: Card, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so at each load, also where the verdict was kept."""
    card.wrong = frozenset({family})
    for _ in range(2):
        caplog.clear()
        assert without() == {family}
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert record.message == (
            f"cuda:0, H900 does not compute what the CPU does with kernels of {family} (1 nats apart by 1);"
            f" {SLOWER[family]}"
        )
    assert card.runs[-1] == ("tiny-moe", {family}), "the second model is compared as it will run, and once"


def test_only_what_must_be_is_left_out(card: Card) -> None:
    card.wrong = frozenset({"wgmma", "attention"})
    assert without() == {"wgmma", "attention"}
    card.wrong, card.shapes = frozenset({"wgmma", "sampling"}), ["tiny-moe"]
    assert without(device=replace(CARD, without=frozenset({"wgmma"}), name="another")) == {"wgmma", "sampling"}


def test_a_slower_road_that_fails_is_none(card: Card) -> None:
    card.wrong, card.failing = frozenset({"wgmma"}), frozenset({"wgmma"})
    with pytest.raises(KernelError, match="whichever kernels it goes without: 1 nats apart by 1 "):
        without()


def test_a_verdict_is_of_a_card_a_driver_and_kernels(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    without(MODELS[:1])
    others = [replace(CARD, name="another"), replace(CARD, capability=(12, 0))]
    for number, other in enumerate(others, 2):
        without(MODELS[:1], other)
        assert len(card.runs) == number
    for name in ("_driver", "_kernels"):
        monkeypatch.setattr(kept, name, lambda: "newer")
        number = len(card.runs)
        without(MODELS[:1])
        without(MODELS[:1])
        assert len(card.runs) == number + 1


def test_kernels_are_known_by_their_sources() -> None:
    sources = [path.read_bytes() for path in kept._sources()]
    assert any(b"store_sums" in text for text in sources)
    assert any(b"def attend_chunk" in text for text in sources)
    assert len(kept._kernels()) == 64


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", '{"a": 1}', '{"a": {"fault": null, "without": ["nothing"], "hopeless": false}}',
        '{"a": {"fault": 1, "without": [], "hopeless": false}}', '{"a": {"without": []}}', "\xff",
    ],
)  # fmt: skip
def test_a_file_that_is_not_whole_is_no_verdict(text: str, card: Card) -> None:
    file = kept._file(CARD)
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode("latin-1"))
    assert without(MODELS[:1]) == frozenset()
    assert len(card.runs) == 1
    assert json.loads(file.read_text()) == {str(MODELS[0]): {"fault": None, "without": [], "hopeless": False}}
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_cache_that_can_not_be_written_stops_nothing(card: Card, tmp_path: Path) -> None:
    (tmp_path / "verdicts").write_text("a file")
    assert without(MODELS[:1]) == frozenset()
    assert len(card.runs) == 1


@pytest.mark.parametrize("fault", [CapacityError("no room"), NoComparisonError("other numbers")])
def test_a_card_that_can_not_be_compared_is_trusted(
    fault: Exception, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    card.fault = fault
    assert without() == frozenset()
    assert [record.message for record in caplog.records] == [f"the GPU is not compared with the CPU: {fault}"]


@pytest.fixture
def gpu(card: Card, monkeypatch: pytest.MonkeyPatch) -> Card:
    """A machine with the card, on which no model is loaded."""
    chosen, choose = ChosenDevice("cuda", 0, "H900"), select.choose_device
    monkeypatch.setattr(select, "choose_device", lambda wanted: choose(wanted) if wanted == "cpu" else chosen)
    monkeypatch.setattr(device_module, "open_device", lambda _index: CARD)
    card.wrong, card.shapes = frozenset(SLOWER), ["small"]
    card.failing = frozenset(SLOWER)
    return card


OPTIONS: dict[str, Any] = {"threads": 1, "max_running": 2, "max_step_tokens": 16, "context_length": 64}


def test_where_nothing_helps_the_cpu_runs_it(gpu: Card, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_model(tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    for _ in range(2):
        caplog.clear()
        core = load_core(checkpoint, EngineConfig(**OPTIONS))
        assert core.config.chosen.kind == "cpu"
        core.close()
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert record.message.startswith(
            "the model runs on the CPU, as its kernels fail on cuda:0, H900: cuda:0, H900 does not compute what the CPU"
        )
    runs = len(gpu.runs)
    with pytest.raises(KernelError, match=r"cuda:0, H900 does not compute .*`realizar doctor` compares again"):
        load_core(checkpoint, EngineConfig(device="cuda", **OPTIONS))
    core = load_core(checkpoint, EngineConfig(device="cpu", **OPTIONS))
    core.close()
    assert len(gpu.runs) == runs == 2 + len(SLOWER)


def test_the_comparison_can_be_left_out(gpu: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card is then trusted, whatever verdict is kept."""
    from realizar.backends.cuda.runner import CUDABackend

    kept.keep_verdicts(CARD, {"small of q4_k_m": Verdict("1 nats apart", frozenset(), True)})
    loaded: list[frozenset[Family]] = []

    def load(self: CUDABackend, *_arguments: object) -> None:
        loaded.append(self.device.without)
        raise CapacityError("no room")

    monkeypatch.setattr(CUDABackend, "load", load)
    write_tiny_model(tmp_path / "model.gguf")
    with pytest.raises(CapacityError, match="no room"):
        load_core(open_checkpoint(tmp_path / "model.gguf"), EngineConfig(device="cuda", device_check=False, **OPTIONS))
    assert loaded == [frozenset()]
    assert not gpu.runs


def test_the_process_that_compares(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a verdict on each model that it is asked for; one that is asked for none ends."""
    monkeypatch.setattr(comparing_process, "open_device", lambda _index: CARD)
    card.wrong = frozenset({"wgmma"})
    for text in ("", "0\ntiny-moe of q4_k_m"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        try:
            comparing_process.compare()
        finally:
            logging.disable(logging.NOTSET)
    assert kept.known_verdicts(CARD) == {
        "tiny-moe of q4_k_m": Verdict("1 nats apart by 1", frozenset({"wgmma"}), False)
    }
    assert apply.is_known(CARD, MODELS[1:])
    assert not apply.is_known(CARD, MODELS)


def test_a_process_that_is_begun_is_the_one_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none outlives its block: not where it is not asked, nor where a load fails beside it."""
    asked = tmp_path / "asked"
    program = (
        f"import sys, time; text = sys.stdin.read(); open({str(asked)!r}, 'a').write(f'<{{text}}>')\n"
        "if 'long' in text: time.sleep(600)"
    )
    monkeypatch.setattr(beside, "_COMMAND", (sys.executable, "-c", program))
    with beside.begun(wanted=True):
        (first,) = beside._begun
        beside.compare(1, ["one", "other"])()
        assert not beside._begun
    assert first.returncode == 0
    with beside.begun(wanted=True):
        (unasked,) = beside._begun
    with pytest.raises(KernelError), beside.begun(wanted=True):
        raise KernelError("planted")
    assert not beside._begun
    with beside.begun(wanted=False):
        beside.compare(0, ["long"])
        (failed,) = beside._asked
        beside.compare(0, ["late"])()
    assert unasked.returncode == failed.returncode == -signal.SIGKILL
    assert asked.read_text().endswith("<0\nlate>")


def test_a_plan_goes_by_the_verdicts_that_are_kept(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are not said to be in FP8 on a card that goes without the kernels; nothing is compared for it."""
    hopper = replace(CARD, torch_device=torch.device("cuda"), capability=(9, 0))
    monkeypatch.setattr(device_module, "open_device", lambda _index: hopper)
    write_tiny_model(tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    chosen = ChosenDevice("cuda", 0, hopper.name, hopper.capability)

    def prompt_dtype(**options: Any) -> str:
        config = EngineConfig(device="cuda", prompt_dtype="fp8", **options)
        return select.resolve_model(checkpoint, config, chosen)[1].prompt_dtype

    assert prompt_dtype() == "fp8"
    for family, expected in (("attention", "fp8"), ("wgmma", "f16")):
        verdict = Verdict("1 nats apart", frozenset({family}), False)
        kept.keep_verdicts(hopper, {f"small of {weights}": verdict for weights in ("q4_k_m", "bf16")})
        assert prompt_dtype() == expected
    assert prompt_dtype(device_check=False) == "fp8"
    assert not card.runs


def test_doctor_compares_again(card: Card, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By all models, and keeps what comes of it."""
    kept.keep_verdicts(CARD, {str(MODELS[0]): Verdict("once", frozenset({"repack"}), False)})
    card.wrong, card.shapes = frozenset({"attention"}), ["tiny-delta"]
    monkeypatch.setattr(device_module, "open_device", lambda _index: CARD)
    monkeypatch.setattr(device_choice, "choose_device", lambda _wanted: ChosenDevice("cuda", 0, "H900"))
    facts = doctor._facts(None)
    gpu = {"device": "cuda:0", "name": "H900", "compute_capability": "9.0", "free_bytes": 1, "memory_bytes": 1}
    monkeypatch.setattr(doctor, "_facts", lambda _replicas: {**facts, "gpus": [{**gpu, "fault": None}]})
    monkeypatch.setattr(doctor, "_run_random_model", lambda _device: None)
    with pytest.raises(doctor.DoctorError, match="cuda:0 computes what the CPU does"):
        doctor.doctor_command()
    assert "with kernels of attention (1 nats apart by 1); Triton attends" in capsys.readouterr().out
    verdicts = kept.known_verdicts(CARD)
    assert set(verdicts) == set(map(str, SMALL_MODELS))
    assert verdicts[str(MODELS[0])] == AGREES
    assert apply.compared_anew(CARD, LABEL) is not None
    card.wrong = frozenset()
    doctor.doctor_command()
    assert "cuda:0 computes what the CPU does    ok" in capsys.readouterr().out
