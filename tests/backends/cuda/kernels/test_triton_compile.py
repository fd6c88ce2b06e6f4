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

from backends.cuda.kernels.compile_launches import RECIPES, SHARED_BYTES
from wider import wider

_TESTS = Path(__file__).parents[3]


def compile_for(*arguments: str) -> str:
    """Compile in a process of its own: in this one kernels are interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # else a card that is there would say how much shared memory a block has
    environment["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *sys.path])
    command = [sys.executable, str(Path(__file__).with_name("compile_launches.py")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("targets", "formats"), wider([("90", "1"), ("80 90", "2")], ("90", "1")))
def test_kernels_of_one_model(targets: str, formats: str) -> None:
    made = compile_for("--recipes", "f16-64", "--formats", formats, *targets.split())
    found = re.findall(r"sm_(\d+): (\d+) kernels", made)
    assert [capability for capability, _ in found] == targets.split()
    assert all(int(count) >= 10 for _, count in found)


@pytest.mark.parametrize(
    ("capability", "recipe"), wider([("86", "bf16-256"), ("120", "int8-512")], ("120", "int8-512"))
)
def test_attention_of_wide_heads(capability: str, recipe: str) -> None:
    """On cards whose blocks have 99 KiB of shared memory; others have at least 163."""
    found = compile_for("--recipes", recipe, "--formats", "1", "--kernels", "attend_chunk", capability)
    assert re.match(rf"sm_{capability}: [12] kernels, ", found)


@pytest.mark.full
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_of_all_models(recipe: str, capability: int) -> None:
    formats = "1" if recipe[-1].isdigit() and "-" in recipe else "5"  # of heads, whose matmuls others have, too
    assert compile_for("--recipes", recipe, "--formats", formats, str(capability)).count("kernels") == 1
