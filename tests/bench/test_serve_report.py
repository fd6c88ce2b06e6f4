"""bench-serve's plan of requests, its figures and its picture."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from realizar.bench.serve_client import Answered, Target
from realizar.bench.serve_picture import latency_svg
from realizar.bench.serve_process import ServerSize, llama_server
from realizar.bench.serve_report import as_markdown, as_record, parse_objectives, percentile, summarize
from realizar.bench.serve_run import LoadRun
from realizar.bench.serve_workload import Lengths, Workload, plan_requests
from realizar.cli.main import app, run_app
from realizar.errors import CapacityError, HubError, InvalidRequestError
from scripted_api import Script, ScriptedApi, words
from waits import HANG_S


def answered(due_s: float, deltas_s: list[float], **changes: Any) -> Answered:
    """Whole when its last piece came."""
    given = {"sent_s": due_s, "ended_s": due_s + deltas_s[-1], "prompt_tokens": 10, "output_tokens": len(deltas_s)}
    return Answered(due_s=due_s, deltas_s=tuple(due_s + delta for delta in deltas_s), **{**given, **changes})


def a_run(name: str = "it", scale: float = 1.0) -> LoadRun:
    times = [[0.1, 0.2, 0.4], [0.3, 0.35, 0.4], [0.5, 0.9, 1.0]]
    whole = [answered(0.0, [scale * delta for delta in deltas]) for deltas in times]
    failed = answered(0.0, [9.0], error="status 500: x", output_tokens=1)
    return LoadRun(Target(name, "http://x", "m"), (*whole, failed), 2.0, 0.5)


def test_figures_by_hand() -> None:
    summary = summarize(a_run(), {"ttft": 400.0, "tpot": 200.0})
    assert (summary.num_requests, summary.num_failed) == (4, 1)
    assert summary.errors == {"status 500: x": 1}
    assert (summary.prompt_tokens, summary.output_tokens) == (30, 9)
    assert summary.output_tokens_per_s == 4.5
    assert summary.total_tokens_per_s == 19.5
    assert summary.requests_per_s == 1.5
    assert summary.ttft is not None
    assert summary.ttft.p50 == pytest.approx(300)
    assert summary.ttft.p90 == pytest.approx(460)
    assert summary.ttft.max == pytest.approx(500)
    assert summary.gap is not None
    assert summary.gap.mean == pytest.approx(1000 * (0.1 + 0.2 + 0.05 + 0.05 + 0.4 + 0.1) / 6)
    assert summary.tpot is not None
    assert summary.tpot.p50 == pytest.approx(150)
    assert summary.e2e is not None
    assert summary.e2e.p50 == pytest.approx(400)
    assert summary.goodput_per_s == 1.0, "two of four met both in two seconds; a failed one meets none"
    assert summary.goodput_share == 0.5
    assert summary.generator_cpu_share == 0.25
    assert summarize(a_run(), {}).goodput_share is None


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    for size in (1, 2, 3, 10, 101):
        values = sorted(rng.random() for _ in range(size))
        for share in (0, 1, 50, 90, 99, 100):
            assert percentile(values, share) == pytest.approx(float(np.percentile(values, share)))


def test_a_run_without_answers() -> None:
    failed = answered(0.0, [9.0], error="status 500: x")
    summary = summarize(LoadRun(Target("it", "http://x", "m"), (failed,), 1.0, 0.1), {"ttft": 1.0})
    assert summary.ttft is None
    assert summary.goodput_share == 0
    assert "1 x status 500" in as_markdown([summary])


def test_objectives() -> None:
    assert parse_objectives(["ttft:500", "tpot:12.5"]) == {"ttft": 500.0, "tpot": 12.5}
    for wrong in ("ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "speed:3"):
        with pytest.raises(InvalidRequestError, match="goodput must be of"):
            parse_objectives([wrong])


def test_markdown_and_json() -> None:
    runs = [a_run("ours"), a_run("theirs", 2.0)]
    summaries = [summarize(run, {}) for run in runs]
    text = as_markdown(summaries)
    assert "| | ours | theirs |" in text
    assert "| first text, ms: p50 / p90 / p99 | 300.0 / 460.0 / 496.0 | 600.0 / 920.0 / 992.0 |" in text
    assert "ours over theirs: output tokens/s 1.00, first text p50 0.50, between texts p50 0.50" in text
    record = json.loads(json.dumps(as_record(runs, summaries, {"seed": 3})))
    assert record["load"] == {"seed": 3}
    assert record["runs"][0]["requests"][0]["deltas_s"] == [0.1, 0.2, 0.4]
    assert record["runs"][1]["ttft"]["p50"] == pytest.approx(600)


@pytest.mark.parametrize("runs", [[a_run("a<b>&", 0.001), a_run("c", 40.0)], [LoadRun(a_run().target, (), 1.0, 0.0)]])
def test_picture(runs: list[LoadRun]) -> None:
    root = ET.fromstring(latency_svg(runs, "title & more"))
    shapes = [shape for shape in root.iter() if shape.tag.endswith("polyline")]
    assert len(shapes) == 3 * sum(bool(run.good) for run in runs)
    for shape in shapes:
        points = [tuple(map(float, point.split(","))) for point in shape.attrib["points"].split()]
        assert all(0 <= x <= 960 and 0 <= y <= 360 for x, y in points)
        assert points == sorted(points, key=lambda point: (point[0], -point[1])), "it only rises"


def test_the_picture_says_its_medians() -> None:
    """Counted by hand: first texts after 0.1, 0.3 and 0.5 s; gaps of 0.05 (twice), 0.1 (twice), 0.2 and 0.4 s."""
    namespace = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(latency_svg([a_run()], "it"))
    texts = [each.text or "" for each in root.iter(f"{namespace}text")]
    assert "median 300 · p90 500 · p99 500 ms" in texts
    assert "median 100 · p90 400 · p99 400 ms" in texts
    assert {"100", "200", "500"} <= set(texts), "the axis ends where the answers do, not at a power of ten"
    dots = [each for each in root.iter(f"{namespace}circle") if each.get("cy") == "186.0"]
    lines = [float(each.get("x1", 0)) for each in root.iter(f"{namespace}line") if each.get("y2") == "296.0"]
    assert len(dots) == 3
    assert any(abs(float(dots[1].get("cx", 0)) - x) < 0.1 for x in lines), "a median of 100 is at the tick of 100"


def test_requests_are_drawn_from_the_seed() -> None:
    work = Workload(2000, Lengths(3, 9), Lengths(1, 4), rate_per_s=50.0, shared_words=6, seed=5)
    planned = plan_requests(work)
    assert planned == plan_requests(work)
    assert {len(request.prompt.split()) - 6 for request in planned} == set(range(3, 10))
    assert {request.max_tokens for request in planned} == {1, 2, 3, 4}
    assert len({" ".join(request.prompt.split()[:6]) for request in planned}) == 1
    times = [0.0, *(request.arrival_s for request in planned)]
    gaps = np.diff(times)
    assert (gaps > 0).all()
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.15), "exponential: as wide as its mean"
    assert plan_requests(Workload(**{**asdict_shallow(work), "seed": 6})) != planned


def asdict_shallow(work: Workload) -> dict[str, Any]:
    return {**asdict(work), "prompt_words": work.prompt_words, "output_tokens": work.output_tokens}


@pytest.mark.parametrize(
    "changes",
    [
        {"rate_per_s": None},
        {"concurrency": 2},
        {"rate_per_s": 0.0},
        {"rate_per_s": float("inf")},
        {"rate_per_s": None, "concurrency": 0},
        {"num_requests": 0},
        {"shared_words": -1},
    ],
)
def test_refused_loads(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"num_requests": 1, "prompt_words": Lengths(1, 1), "output_tokens": Lengths(1, 1)}
    with pytest.raises(InvalidRequestError):
        Workload(**{**given, "rate_per_s": 1.0, **changes})


def test_lengths() -> None:
    assert Lengths.parse("128", "x") == Lengths(128, 128)
    assert Lengths.parse("64-256", "x") == Lengths(64, 256)
    for wrong in ("", "0", "-3", "5-2", "a", "1-2-3", "1.5"):
        with pytest.raises(InvalidRequestError, match="prompt-words"):
            Lengths.parse(wrong, "prompt-words")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, picture = tmp_path / "all.json", tmp_path / "all.svg"
    with ScriptedApi(script=lambda body: words("abcd" * 3, wait_s=0.005), key="k") as api:
        load = ["--requests", "6", "--concurrency", "3", "--chat", "--goodput", "ttft:5000", "tpot:2000"]
        files = ["--json", str(numbers), "--picture", str(picture)]
        status = run_app(app, ["bench-serve", "--url", api.url, "--api-key", "k", *load, *files])
    assert status == 0
    assert "| requests (failed) | 6 (0) |" in capsys.readouterr().out
    record = json.loads(numbers.read_text())
    assert record["load"]["objectives_ms"] == {"ttft": 5000, "tpot": 2000}
    assert record["runs"][0]["goodput_share"] == 1
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")


def test_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--url", "http://x", "--llama-server", "/no"], ["--url", "http://127.0.0.1:9"]):
        assert run_app(app, ["bench-serve", *arguments]) == 1
    with ScriptedApi(script=lambda body: Script(status=500, error="broken")) as api:
        assert run_app(app, ["bench-serve", "--url", api.url]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("realizar:")]
    for word, line in zip(("--url", "--model-file", "does not answer", "broken"), errors, strict=True):
        assert word in line


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_a_started_server_is_ended(tmp_path: Path) -> None:
    """A stand-in for llama-server, which notes its arguments and its process."""
    started = tmp_path / "started.json"
    stand_in = program(
        tmp_path / "llama-server",
        "import http.server, json, os, sys, time\n"
        f"json.dump([os.getpid(), sys.argv[1:]], open({str(started)!r}, 'w'))\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    started = time.monotonic()\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if time.monotonic() > self.started + 0.3 else 503)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Handler).serve_forever()\n",
    )
    with llama_server(stand_in, tmp_path / "m.gguf", ServerSize(4, 256, threads=2, start_timeout_s=HANG_S)) as url:
        pid, arguments = json.loads(started.read_text())
        os.kill(pid, 0)
        assert url.endswith(arguments[-1])
        assert arguments[:6] == ["--model", str(tmp_path / "m.gguf"), "--parallel", "4", "--ctx-size", "1024"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    ends = program(tmp_path / "llama-server", "import sys\nprint('first')\nsys.exit('cannot map the file')\n")
    size = ServerSize(1, 256, start_timeout_s=HANG_S)
    with pytest.raises(CapacityError, match="status 1: cannot map the file"), llama_server(ends, tmp_path, size):
        pass
    with pytest.raises(HubError, match="not found"), llama_server(tmp_path / "none", tmp_path, size):
        pass
