"""Faults planted in a card's kernels: each ends in right answers by a slower road, and one line. Small models agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from realizar.backends.cuda import cards  # noqa: E402
from realizar.backends.cuda.device import SLOWER, Family, open_device, refused_family  # noqa: E402
from realizar.backends.cuda.native import attend_source, launcher, sources  # noqa: E402
from realizar.backends.device_choice import choose_device  # noqa: E402
from realizar.backends.select import compare_with_cpu, make_backend, resolve_model  # noqa: E402
from realizar.backends.verdict.compare import difference  # noqa: E402
from realizar.backends.verdict.judge import AGREES, judge  # noqa: E402
from realizar.backends.verdict.small_models import SMALL_MODELS, SmallModel  # noqa: E402
from realizar.backends.verdict.small_steps import CONFIG, run_small_steps  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import KernelError, UnsupportedModelError  # noqa: E402

pytestmark = pytest.mark.gpu
SMALL = SmallModel("small", "q4_k_m")
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache without verdicts, and with the kernels of the user's; no test finds the sources that another rewrote."""
    from realizar.backends.verdict import kept

    monkeypatch.setattr(kept, "user_cache", lambda: tmp_path)
    sources.matmul_source.cache_clear()
    yield
    sources.matmul_source.cache_clear()


@pytest.mark.parametrize("model", SMALL_MODELS, ids=str)
def test_the_card_computes_what_is_exact(model: SmallModel) -> None:
    assert judge(model, open_device()) == AGREES


@pytest.mark.parametrize("model", [SMALL, SmallModel("small", "bf16"), SmallModel("tiny-moe", "q4_k_m")], ids=str)
def test_so_do_all_slower_roads(model: SmallModel) -> None:
    from dataclasses import replace

    for without in (*(frozenset({family}) for family in SLOWER), frozenset(SLOWER)):
        assert judge(model, replace(open_device(), without=without)) == AGREES, without


def of_family(name: str, family: Family) -> bool:
    return refused_family(name, frozenset()) == family


def idle(family: Family) -> Plant:
    """Kernels of a family that compute nothing: what they leave is whatever memory held."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        launch = launcher.Kernel.launch

        def launches(self: Any, *arguments: Any, **options: Any) -> None:
            if not of_family(self._source, family):
                launch(self, *arguments, **options)

        monkeypatch.setattr(launcher.Kernel, "launch", launches)

    return plant


def raising(family: Family) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        launch = launcher.Kernel.launch

        def launches(self: Any, *arguments: Any, **options: Any) -> None:
            if of_family(self._source, family):
                raise KernelError(f"launching {self.name}: CUDA_ERROR_INVALID_VALUE", self._source)
            launch(self, *arguments, **options)

        monkeypatch.setattr(launcher.Kernel, "launch", launches)

    return plant


def rewritten(file: str, old: str, new: str) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (sources, attend_source):
            read = module.read

            def changed(name: str, read: Callable[[str], str] = read) -> str:
                text = read(name)
                assert name != file or old in text
                return text.replace(old, new) if name == file else text

            monkeypatch.setattr(module, "read", changed)

    return plant


NOISE = "(float)((unsigned)(at * 2654435761u) >> 8) / 8388608.f - 1.f"
FAULTS: dict[str, tuple[Plant, str]] = {
    "noise": (rewritten("matvec.cu", "matrix.partials[at] = sum;", f"matrix.partials[at] = {NOISE};"), "mat-vec"),
    "no results of mat-vec": (idle("mat-vec"), "mat-vec"),
    "no results of wgmma": (idle("wgmma"), "wgmma"),
    "no results of epilogues": (idle("epilogues"), "epilogues"),
    "no results of attention": (idle("attention"), "attention"),
    "no results of sampling": (idle("sampling"), "sampling"),
    "no results of repack": (idle("repack"), "repack"),
    "raises": (raising("mat-vec"), "mat-vec"),
    "does not compile": (rewritten("matvec.cu", "#if", "#error planted\n#if"), "mat-vec"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_ends_in_right_answers_and_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant, family = FAULTS[name]
    plant(monkeypatch)
    spec, checkpoint = SMALL.make()
    for _ in range(2):  # without a verdict, and with it
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            backend = make_backend(choose_device("cuda"), compared_for=(spec, checkpoint))
            try:
                backend.load(spec, checkpoint, resolve_model(checkpoint, CONFIG, choose_device("cuda"))[1])
                assert difference(SMALL, checkpoint, run_small_steps(backend, spec.vocab_size)) is None
            finally:
                backend.shutdown()
        (line,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.endswith(SLOWER[family])  # type: ignore[index]


def test_the_answer_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_with_cpu(choose_device("cuda")) is None
    idle("attention")(monkeypatch)
    said = compare_with_cpu(choose_device("cuda"))
    assert said is not None
    assert "with kernels of attention (" in said
    assert said.endswith("; Triton attends")


def test_without_a_compiler_the_cpu_runs_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from realizar.backends import device_choice

    monkeypatch.setenv("CC", "/nowhere/gcc")
    assert cards._missing_compiler() is not None
    device_choice._warn_once.cache_clear()
    assert choose_device(EngineConfig().device).kind == "cpu"
    assert "Triton needs a C compiler" in caplog.text
    with pytest.raises(UnsupportedModelError, match="Triton needs a C compiler"):
        choose_device("cuda")
