"""`realizar doctor MODEL` on a model that is well, and on faults that are planted one at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from realizar.backends import device_choice
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.cli.commands import doctor
from realizar.cli.server_records import announced
from realizar.hub import cache
from tiny_model import write_tiny_model
from waits import HANG_S

LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
OWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant: "


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No kernels but the model's are run, and other processes' locks and servers are not seen."""
    monkeypatch.setattr(doctor, "_run_random_model", lambda _device: None)
    monkeypatch.setattr(cache, "models_dir", lambda: tmp_path / "models")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def problems(realizar: Callable[..., Any], *words: str | Path) -> dict[str, str]:
    """What failed, by the name of the check."""
    result = realizar("doctor", *words, "--json", *(() if "--port" in words else ("--port", "0")))
    found = {check["name"]: check["problem"] for check in json.loads(result.stdout)["checks"] if not check["ok"]}
    assert result.status == bool(found)
    assert all(name in result.stderr for name in found)
    return found


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, whose text is noise, with a template of its own."""
    path = tmp_path_factory.mktemp("well") / "tiny.gguf"
    write_tiny_model(path, OWN)
    return path


def test_a_model_that_is_well(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    result = realizar("doctor", smollm2_path, "--port", "0")
    assert result.status == 0, result.stdout
    lines = result.stdout.splitlines()
    assert f"its files        {smollm2_path} (98.4 MB, llama)" in lines
    assert "its template     its own" in lines
    assert any(line.startswith("its memory       ") and "8192 tokens fits" in line for line in lines)
    (measured,) = [line for line in lines if line.startswith("on cpu           perplexity ")]
    assert 20 < float(measured.split()[3].rstrip(",")) < 50, "of prose that it has not read"


def test_weights_that_are_noise(realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path) -> None:
    """Each feed-forward's output is turned by some rows, as a kernel with a wrong index would."""
    checkpoint = open_checkpoint(smollm2_path)
    tensors = []
    for name, stored in checkpoint.tensors.items():
        data = stored.data
        if "ffn_down" in name:
            data = np.roll(data.reshape(stored.shape[0], -1), 7, axis=0)
        tensors.append(NewTensor(name, stored.ggml_type, stored.shape, data))
    write_gguf(tmp_path / "noise.gguf", checkpoint.metadata, tensors)
    found = problems(realizar, tmp_path / "noise.gguf")
    assert list(found) == ["its text is no noise on cpu"]
    assert "its weights, or a kernel, give noise" in found["its text is no noise on cpu"]


def test_a_gpu_that_computes_something_else() -> None:
    devices = {"cpu": {"perplexity": 30.0}, "cuda:0": {"perplexity": 30.5}, "cuda:1": {"perplexity": 31.0}}
    doctor._check_perplexity(devices, "cuda:0")
    with pytest.raises(doctor.DoctorError, match=r"is 31\.00 there, and 30\.00 on the CPU"):
        doctor._check_perplexity(devices, "cuda:1")


def test_another_models_template(realizar: Callable[..., Any], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other.gguf", LLAMA3)
    found = problems(realizar, tmp_path / "other.gguf")["its chat template is the model's own"]
    assert "it may be another model's template" in found
    assert "(<|end|>)" in found


def test_a_template_that_drops_what_was_said(realizar: Callable[..., Any], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "drops.gguf", OWN.replace("in messages", "in messages if m.role == 'user'"))
    found = problems(realizar, tmp_path / "drops.gguf")["its chat template is the model's own"]
    assert "its prompt lacks what the assistant said" in found


def test_a_truncated_file(realizar: Callable[..., Any], well: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(well.read_bytes()[:-100])
    (name, problem), *others = problems(realizar, tmp_path / "cut.gguf").items()
    assert name == "the model's files are whole"
    assert "the data is truncated" in problem
    assert others == [], "what needs the file is not tried"


def test_too_little_memory(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    found = problems(realizar, smollm2_path, "--memory", "100M")
    assert list(found) == ["it fits into memory"]
    assert "take 149.6 MB, and 100.0 MB are free" in found["it fits into memory"]


def test_a_port_in_use(realizar: Callable[..., Any], well: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert problems(realizar, well, "--port", str(port))[f"port {port} is free"].startswith(
            "another program has it"
        )
        with announced(f"http://127.0.0.1:{port}", ["m-1"]):
            found = problems(realizar, well, "--port", str(port))
        assert found[f"port {port} is free"].startswith("your server of m-1 has it")


def test_a_cache_that_is_locked(realizar: Callable[..., Any], well: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with FileLock(tmp_path / "models" / "held.lock"):
        found = problems(realizar, well)
    assert "held.lock is locked by another process" in found["nobody holds the model cache"]
    assert "nobody holds the model cache" not in problems(realizar, well)


def test_a_full_disk(realizar: Callable[..., Any], well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=12_000_000))
    found = problems(realizar, well)
    assert found["the model cache can be written"] == "its disk is full but for 12.0 MB"
    assert found["the kernel cache can be written"] == "its disk is full but for 12.0 MB"


def test_no_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    doctor._check_instructions("avx2")
    with pytest.raises(doctor.DoctorError, match="this processor has no AVX2"):
        doctor._check_instructions("portable")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    doctor._check_instructions("portable")


def test_a_driver_that_is_too_old(realizar: Callable[..., Any], well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The NVIDIA driver on your system is too old (found version 11040)."
    monkeypatch.setattr(device_choice, "gpu_facts", lambda: ([], said))
    assert problems(realizar, well)["a GPU that is listed is used"] == said


def test_a_compiler_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "llvmlite").mkdir()
    (tmp_path / "llvmlite" / "__init__.py").write_text("raise ImportError('libLLVM is not there')")
    result = subprocess.run(
        [sys.executable, "-m", "realizar", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == (
        "realizar: the compiler of the CPU's kernels, Numba, can't be imported: libLLVM is not there\n"
    )
