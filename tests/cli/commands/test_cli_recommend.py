"""`realizar pull --recommend`: what a machine can run, planned from the shapes of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realizar.backends import bandwidth, device_choice, select
from realizar.backends.devices import THE_CPU
from realizar.cli.commands.pulled import _planned
from realizar.models.generated.generate import generate_gguf
from realizar.models.generated.shapes import PUBLISHED, SHAPES


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Set the free bytes and the GB/s of a CPU without a GPU."""

    def has(free: float, gb_per_s: float) -> None:
        monkeypatch.setattr(select, "free_room", lambda: int(free))
        monkeypatch.setattr(bandwidth, "memory_bandwidth", lambda: gb_per_s)
        monkeypatch.setattr(device_choice, "choose_device", lambda _wanted: THE_CPU)

    return has


def listed(realizar: Callable[..., Any]) -> tuple[str | None, dict[str, dict[str, Any]]]:
    result = realizar("pull", "--recommend", "--json")
    assert result.status == 0, result.stderr
    record = json.loads(result.stdout)
    return record["best"], {each["name"]: each for each in record["models"]}


def test_memory_and_bandwidth_decide(realizar: Callable[..., Any], machine: Callable[[float, float], None]) -> None:
    machine(24e9, 30.0)
    best, models = listed(realizar)
    assert set(models) == set(PUBLISHED.values())
    assert models["gpt-oss-120b"]["longest_context"] == 0
    assert models["Llama-3.1-8B"]["most_tokens_per_s"] == pytest.approx(30 / 4.71, rel=0.01)
    assert models["Qwen3-30B-A3B"]["most_tokens_per_s"] == pytest.approx(30 / 1.956, rel=0.01), "of its experts few"
    assert best == "Qwen3.6-35B-A3B"
    machine(6e9, 30.0)
    assert listed(realizar)[0] == "LFM2-8B-A1B"
    machine(24e9, 4.0)
    best, models = listed(realizar)
    assert best == "Qwen3-0.6B", "which alone is fast enough"
    machine(1e6, 30.0)
    best, models = listed(realizar)
    assert best is None
    assert {each["longest_context"] for each in models.values()} == {0}


def test_the_list(realizar: Callable[..., Any], machine: Callable[[float, float], None]) -> None:
    machine(24e9, 30.0)
    lines = realizar("pull", "--recommend").stdout.splitlines()
    assert lines[0] == "24.00 GB of memory are free on cpu, read at 30.0 GB/s"
    rows = {line.split("  ")[0]: line.split() for line in lines[3:] if " billion " in line}
    assert rows["gpt-oss-120b"][-3:] == ["does", "not", "fit"]
    assert rows["Qwen3-30B-A3B"][1:] == ["18.55", "GB", "3.4", "of", "30.5", "billion", "40960", "15"]
    assert "the largest of them that this machine runs well: Qwen3.6-35B-A3B" in lines
    machine(1e6, 30.0)
    assert "runs well" not in realizar("pull", "--recommend").stdout


def test_a_shape_is_planned_like_its_file(realizar: Callable[..., Any], tmp_path: Path) -> None:
    for shape in ("tiny", "tiny-moe", "tiny-delta"):
        path = tmp_path / f"{shape}.gguf"
        generate_gguf(shape, path, "q4_k_m")
        words = ("--device", "cpu", "--memory", "1G", "--max-running", "1", "--json")
        plan = json.loads(realizar("plan", path, *words).stdout)
        found = _planned(shape, shape, THE_CPU, 10**9, 10.0)
        assert found is not None
        assert found.needed_bytes == plan["weight_bytes"] + plan["workspace_bytes"]
        assert found.longest_context == SHAPES[shape].context_length == plan["contexts"][-1]["context_length"]
        assert found.most_tokens_per_s == 10e9 / (plan["token_weight_bytes"] or plan["weight_bytes"])
        assert 0 < plan["file_bytes"] - found.file_bytes < 8192, "the header"
        assert (found.parameters, found.active_parameters) == (
            plan["parameters"]["total"],
            plan["parameters"]["active"],
        )


@pytest.mark.parametrize("words", [(), ("user/repo", "--recommend")])
def test_one_or_the_other(realizar: Callable[..., Any], words: tuple[str, ...]) -> None:
    result = realizar("pull", *words)
    assert result.status == 2
    assert "Name a model, or list what this machine can run by --recommend, not both" in result.stderr
