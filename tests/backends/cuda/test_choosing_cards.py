"""The choice of a GPU: those that can't run a model are passed over with a reason; an unknown number is refused."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends import device_choice  # noqa: E402
from realizar.backends.base import DeviceMemory  # noqa: E402
from realizar.backends.cuda import cards  # noqa: E402
from realizar.backends.device_choice import choose_device, gpu_facts  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.backends.select import begun_load  # noqa: E402
from realizar.backends.verdict import beside  # noqa: E402
from realizar.cli.commands.doctor import _gpu_lines  # noqa: E402
from realizar.cli.main import app, run_app  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.process.loop import EngineLoop  # noqa: E402
from realizar.errors import CapacityError, InvalidRequestError, UnsupportedModelError  # noqa: E402
from realizar.server.metrics import exposition_of  # noqa: E402
from resolving import new_core  # noqa: E402
from scripted_backend import ScriptedBackend, make_spec  # noqa: E402
from waits import wait_until  # noqa: E402

TURING = ("Tesla T4", 7, 5)
HOPPER = ("NVIDIA H200", 9, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the GPUs that torch lists, and what the kernels' libraries lack."""

    def has(*found: tuple[str, int, int], library: str | None = None, compiler: str | None = None) -> None:
        pci = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
        listed = [
            SimpleNamespace(name=name, major=major, minor=minor, total_memory=16 << 30, **pci)
            for name, major, minor in found
        ]
        monkeypatch.setattr(device_choice, "gpu_listed", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(listed))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(listed))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: listed[index])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _index: (9 << 30, 16 << 30))
        monkeypatch.setattr(cards, "_missing_library", lambda: library)
        monkeypatch.setattr(cards, "_missing_compiler", lambda: compiler)

    device_choice._warn_once.cache_clear()
    return has


def test_a_card_that_can_not_run_a_model_is_passed_over(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(TURING, HOPPER)
    assert choose_device("auto") == choose_device("cuda") == ChosenDevice("cuda", 1, "NVIDIA H200", (9, 0))
    assert choose_device("auto").label == "cuda:1, NVIDIA H200"
    assert not caplog.records


@pytest.mark.parametrize(("missing", "expected"), [([], {"context", "begun"}), (["triton"], {"not begun"})])
def test_only_a_gpu_that_may_be_chosen_gets_ready(
    missing: list[str], expected: set[str], machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load on a machine with a GPU, and without what runs models there, begins no process for it."""
    machine(HOPPER)
    found = set[str]()
    monkeypatch.setattr(device_choice, "_missing_packages", lambda: missing)
    monkeypatch.setattr(device_choice, "_make_context", lambda _index: found.add("context"))
    monkeypatch.setattr(beside, "was_compared", lambda: False)
    monkeypatch.setattr(beside, "begun", lambda *, wanted: found.add("begun" if wanted else "not begun"))
    begun_load(EngineConfig())
    wait_until(lambda: found >= expected)
    assert found == expected


def test_without_one_the_processor_runs_it_and_the_log_says_why(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(TURING)
    assert choose_device("auto") == choose_device("auto") == ChosenDevice()
    (record,) = caplog.records
    assert record.message == (
        "the model runs on the CPU, as no GPU can be used:"
        " cuda:0, Tesla T4: compute capability 8.0 is needed, and it has 7.5"
    )
    with pytest.raises(UnsupportedModelError, match=r"cuda:0, Tesla T4: compute capability 8\.0 is needed"):
        choose_device("cuda")


def test_missing_libraries_are_named(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(HOPPER, library="cuda-bindings is not installed")
    assert choose_device("auto").kind == "cpu"
    assert "NVIDIA H200: cuda-bindings is not installed" in caplog.text
    with pytest.raises(UnsupportedModelError, match="cuda-bindings is not installed"):
        choose_device("cuda:0")


def test_a_missing_compiler_is_named(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(HOPPER, compiler="Triton needs a C compiler")
    assert choose_device("auto").kind == "cpu"
    assert "NVIDIA H200: Triton needs a C compiler" in caplog.text
    with pytest.raises(UnsupportedModelError, match="H200: Triton needs a C compiler"):
        choose_device("cuda")


def test_what_triton_looks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler by the name in CC, or gcc or clang; and Python's headers."""
    (tmp_path / "Python.h").touch()
    there: set[str] = set()
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "neither gcc nor clang" in str(cards._missing_compiler())
    there.add("clang")
    assert cards._missing_compiler() is None
    monkeypatch.setenv("CC", "icx")
    assert "icx, which CC names" in str(cards._missing_compiler())
    there.add("icx")
    assert cards._missing_compiler() is None
    (tmp_path / "Python.h").unlink()
    assert f"{tmp_path}/Python.h is not there" in str(cards._missing_compiler())


def test_a_number_that_is_not_there(machine: Any) -> None:
    machine(HOPPER)
    with pytest.raises(CapacityError, match=r"--device cuda:2: this machine has 1 GPU, cuda:0$"):
        choose_device("cuda:2")
    machine(HOPPER, TURING)
    assert choose_device("cuda:0").index == 0
    with pytest.raises(CapacityError, match="has 2 GPUs, cuda:0 to cuda:1"):
        choose_device("cuda:2")
    with pytest.raises(UnsupportedModelError, match="cuda:1, Tesla T4"):
        choose_device("cuda:1")


def test_a_driver_that_torch_refuses_and_a_torch_that_is_broken(
    machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine()

    def unusable() -> bool:
        import warnings

        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old\nPlease", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unusable)
    assert choose_device("auto").kind == "cpu"
    assert "driver on your system is too old" in caplog.text
    with pytest.raises(CapacityError, match="too old"):
        choose_device("cuda")
    assert gpu_facts()[1] == "CUDA initialization: The NVIDIA driver on your system is too old"
    monkeypatch.setitem(__import__("sys").modules, "realizar.backends.cuda.cards", None)
    assert choose_device("auto").kind == "cpu"
    assert "torch can't be imported" in caplog.text


def test_without_torch(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(HOPPER)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_device("auto").kind == "cpu"
    with pytest.raises(UnsupportedModelError, match="needs torch and triton"):
        choose_device("cuda:1")


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cuda:1000"])
def test_what_is_no_device_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequestError, match="cuda:N"):
        EngineConfig(device=text)
    assert run_app(app, ["plan", "model.gguf", "--device", text]) == 2
    assert "cuda:N" in capsys.readouterr().err


def test_the_doctors_facts(machine: Any) -> None:
    machine(TURING, HOPPER)
    (first, second), _ = gpu_facts()
    assert first["fault"].startswith("compute capability 8.0")
    assert second == {
        "device": "cuda:1", "name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 16 << 30,
        "free_bytes": 9 << 30, "fault": None, "bus_id": "0000:1b:00.0",
    }  # fmt: skip
    lines = _gpu_lines({"gpus": [first, second], "no_gpu": None}, "torch 2.11.0")
    assert lines[1].startswith("cuda:0           Tesla T4, compute capability 7.5, not used: compute capability 8.0")
    assert lines[2] == "cuda:1           NVIDIA H200, compute capability 9.0, 9.66 GB free of 17.18 GB"
    assert _gpu_lines({"gpus": [], "no_gpu": "no driver"}, "torch missing")[1] == "GPU              none: no driver"


def test_memory_of_the_gpu_is_among_the_figures() -> None:
    """The figure goes from the backend through the engine to Prometheus; without a GPU there is no such line."""
    backend, reported = ScriptedBackend(), []
    loop = EngineLoop(reported.append)
    core = new_core(backend, make_spec((None,)), EngineConfig())
    for memory in (None, DeviceMemory(3 << 30, 16 << 30)):
        backend.memory = memory
        text = exposition_of({"m": loop._stats(core)}, ()).decode()
        assert ('realizar:device_memory_used_bytes{model_name="m"} 3.221225472e+09' in text) == (memory is not None)
        assert ("device_memory_total_bytes" in text) == (memory is not None)
