"""Triton kernels compile, as the backend launches them, for GPUs that are not there, within their shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

_TESTS = Path(__file__).parents[3]


def compile_for(*arguments: str) -> str:
    """Compile in a process of its own: in this one kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *sys.path])
    command = [sys.executable, str(Path(__file__).with_name("compile_launches.py")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_of_one_model() -> None:
    found = re.findall(r"sm_(\d+): (\d+) kernels", compile_for("--recipes", "f16", "--formats", "2", "80", "90"))
    assert [capability for capability, _ in found] == ["80", "90"]
    assert all(int(count) >= 20 for _, count in found)


@pytest.mark.full
def test_kernels_of_all_models() -> None:
    assert compile_for("80", "90", "100").count("kernels") == 3
