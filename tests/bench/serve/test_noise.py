"""Loads beside each other: what rounds differ by among themselves is no difference."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from realizar.bench.serve.noise import _T, Ratio, compare_rounds
from realizar.cli.main import app, run_app
from scripted_api import ScriptedApi, words


@pytest.mark.parametrize("freedom", range(1, 31))
def test_students_t(freedom: int) -> None:
    """The density between the two ends, by quadrature."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    places = np.linspace(-_T[freedom - 1], _T[freedom - 1], 200_001)
    density = scale * (1 + places**2 / freedom) ** (-(freedom + 1) / 2)
    assert np.trapezoid(density, places) == pytest.approx(0.95, abs=1e-4)


def test_a_ratio_by_hand() -> None:
    """Logarithms -1, 0, 1 and 1, 2, 3: means 2 apart, an error of sqrt(2/3), 4 degrees of freedom."""
    first, second = ([math.exp(power) for power in powers] for powers in ((-1, 0, 1), (1, 2, 3)))
    ratio = Ratio.of(first, second)
    around = 2.776 * math.sqrt(2 / 3)
    assert ratio.value == pytest.approx(math.exp(2))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(2 - around), math.exp(2 + around)))
    back = Ratio.of(second, first)
    assert back.value == pytest.approx(1 / ratio.value)
    assert Ratio.of([2.0, 2.0], [3.0, 3.0]) == Ratio(pytest.approx(1.5), pytest.approx(1.5), pytest.approx(1.5))
    assert Ratio.of([2.0], [3.0, 3.1]).low is None, "the noise of one round is not known"


def test_one_comparison_in_twenty_of_the_same_server_lies_outside() -> None:
    rng = random.Random(0)
    outside = 0
    for _ in range(2000):
        rounds = [[math.exp(rng.gauss(3, 0.1)) for _ in range(count)] for count in (4, 6)]
        outside += Ratio.of(*rounds).verdict(more_is_better=True) != "within the noise"
    assert outside / 2000 == pytest.approx(0.05, abs=0.015)


def test_what_is_better_depends_on_the_figure() -> None:
    first = [{"output_throughput": rate, "median_ttft_ms": 100 / rate} for rate in (10.0, 10.1, 9.9)]
    second = [{"output_throughput": 2 * each["output_throughput"], "median_ttft_ms": 5.0} for each in first]
    lines = compare_rounds(("a", "b"), first, second)
    assert lines[0] == "| | a | b | b / a | b is |"
    assert lines[2].startswith("| output_throughput | 10 (9.9 to 10.1) | 20 (19.8 to 20.2) | 2.000 (1.9")
    assert lines[2].endswith("| better |")
    assert lines[3].endswith("| better |"), "less time"
    assert [line.rsplit(" | ")[-1] for line in compare_rounds(("b", "a"), second, first)[2:]] == ["worse |"] * 2
    assert [line.rsplit(" | ")[-1] for line in compare_rounds(("a", "c"), first, first)[2:]] == [
        "within the noise |"
    ] * 2
    assert compare_rounds(("a", "b"), first, [{}])[2:] == [], "a figure that a load lacks"


def test_saved_loads_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("before.json", "after.json")]
    options = ["--protocol", "sglang", "--random-input", "6", "--random-output", "3", "--random-range-ratio", "1"]
    options += ["--num-prompts", "5", "--rounds", "3"]
    with ScriptedApi(lambda body: words("abcd" * body["max_tokens"])) as api:
        for file, most_open in zip(files, ("1", "2"), strict=True):
            command = ["bench-serve", "--url", api.url, *options, "--max-concurrency", most_open, "--json", str(file)]
            assert run_app(app, command) == 0
        prompts = [body["prompt"] for body in api.requests if body["max_tokens"] == 3]
    assert [len(prompt) for prompt in prompts] == [6] * (2 * 3 * 5)
    assert {body["max_tokens"] for body in api.requests} == {3, 4}
    capsys.readouterr()
    assert run_app(app, ["bench-serve", "--compare", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert "| | before | after | after / before | after is |" in shown
    assert "| request_throughput |" in shown
    assert "- the loads differ in concurrency: [1] and [2]" in shown.splitlines()
    record = json.loads(files[0].read_text())
    rounds = record["servers"][0]["loads"]["plain"]["rounds"]
    assert [each["completed"] for each in rounds] == [5, 5, 5]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"load": {}, "servers": [{"loads": {"a": {"rounds": []}}}]}'])
def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert run_app(app, ["bench-serve", "--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 1
    assert "a.json is not a file of bench-serve --json" in capsys.readouterr().err


def test_loads_without_a_common_label_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("a", "b"):
        record = {"load": {}, "servers": [{"name": "x", "loads": {label: {"rounds": [{}]}}}]}
        (tmp_path / f"{label}.json").write_text(json.dumps(record))
    assert run_app(app, ["bench-serve", "--compare", *(str(tmp_path / f"{label}.json") for label in "ab")]) == 1
    assert "no load in common" in capsys.readouterr().err
