"""bench-serve's plan of requests, its figures and its picture."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from realizar.bench.serve.client import Answer
from realizar.bench.serve.process import ServerSize, llama_server
from realizar.bench.serve.report import latency_svg
from realizar.bench.serve.workload import PlannedRequest
from realizar.cli.main import app, run_app
from realizar.errors import CapacityError, HubError
from scripted_api import Script, ScriptedApi, words
from waits import HANG_S


def answers(scale: float = 1.0) -> list[Answer]:
    """Three whole ones and a failed one."""
    times = [[0.1, 0.2, 0.4], [0.3, 0.35, 0.4], [0.5, 0.9, 1.0], [9.0]]
    request = PlannedRequest("greedy", b"", False, 10, 3)
    return [
        Answer(
            request, 0.0, 0.0, scale * np.array(each), scale * each[-1], 10, len(each), "x" if len(each) < 3 else None
        )
        for each in times
    ]


@pytest.mark.parametrize("loads", [[("a<b>&", answers(0.001)), ("c", answers(40.0))], [("none", [])]])
def test_picture(loads: list[tuple[str, list[Answer]]]) -> None:
    root = ET.fromstring(latency_svg(loads, "title & more"))
    shapes = [shape for shape in root.iter() if shape.tag.endswith("polyline")]
    assert len(shapes) == 3 * sum(bool(each) for _, each in loads)
    for shape in shapes:
        points = [tuple(map(float, point.split(","))) for point in shape.attrib["points"].split()]
        assert all(0 <= x <= 960 and 0 <= y <= 360 for x, y in points)
        assert points == sorted(points, key=lambda point: (point[0], -point[1])), "it only rises"


def test_the_picture_says_its_medians() -> None:
    """Counted by hand: first texts after 0.1, 0.3 and 0.5 s; gaps of 0.05 (twice), 0.1 (twice), 0.2 and 0.4 s."""
    namespace = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(latency_svg([("it", answers())], "it"))
    texts = [each.text or "" for each in root.iter(f"{namespace}text")]
    assert "median 300 · p90 500 · p99 500 ms" in texts
    assert "median 100 · p90 400 · p99 400 ms" in texts
    assert {"100", "200", "500"} <= set(texts), "the axis ends where the answers do, not at a power of ten"
    dots = [each for each in root.iter(f"{namespace}circle") if each.get("cy") == "186.0"]
    lines = [float(each.get("x1", 0)) for each in root.iter(f"{namespace}line") if each.get("y2") == "296.0"]
    assert len(dots) == 3
    assert any(abs(float(dots[1].get("cx", 0)) - x) < 0.1 for x in lines), "a median of 100 is at the tick of 100"


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
    (round_,) = record["servers"][0]["loads"]["plain"]["rounds"]
    assert round_["met"] == round_["completed"] == 6
    assert round_["request_goodput"] == round_["request_throughput"] > 0
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
