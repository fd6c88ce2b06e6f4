"""What `deploy/` holds fits the program: metrics, options and variables that its files name exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from realizar.cli.main import app, run_app
from realizar.server.metrics import _GAUGES_OF_A_GPU
from realizar.server.models.shelf import shelf_samples
from server_thread import RunningServer

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]
_METRIC = re.compile(r"\b(?:realizar:|process_)\w+")
_VARIABLE = re.compile(r"\bREALIZAR_[A-Z_]+")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def _expressions() -> Iterator[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "realizar.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["query"] for variable in dashboard["templating"]["list"])
    for name in ("alerts.yml", "alerts_test.yml"):
        text = (DEPLOY / "prometheus" / name).read_text()
        yield from re.findall(r"(?:expr|series): (?:>-\n\s+)?(.+)", text)


def test_dashboard_and_alerts_name_metrics_that_a_server_has(server: RunningServer) -> None:
    body = {"model": server.model.name, "prompt": "a", "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/nowhere", timeout=60).status_code == 404
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    present = set(re.findall(r"^([\w:]+)(?:{| )", text, re.MULTILINE))
    present |= {f"realizar:{stem}" for stem, _, _ in _GAUGES_OF_A_GPU}
    of_several = {f"{each.name}_total" if each.kind == "counter" else each.name for each in shelf_samples(())}
    present |= of_several
    named = {name for expression in _expressions() for name in _METRIC.findall(expression)}
    assert len(named) > 20
    assert named - present == set()
    assert of_several <= named


def test_variables_are_options_of_serve() -> None:
    known = {
        f"REALIZAR_{name.lstrip('-').upper().replace('-', '_')}"
        for argument in app["serve"].assemble_argument_collection()
        for name in argument.names
    }
    named = {name for path in FILES for name in _VARIABLE.findall(path.read_text())}
    assert len(named) > 3
    assert named <= known


def test_the_unit_names_options_of_serve() -> None:
    known = {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}
    (line,) = re.findall(r"^ExecStart=.*", (DEPLOY / "realizar.service").read_text(), re.MULTILINE)
    assert set(_OPTION.findall(line)) <= known
    assert "/realizar serve --config /etc/realizar/serve.toml" in line


def test_the_options_in_the_file_are_good(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DEPLOY / "serve.toml").read_text()
    assert run_app(app, ["serve", "--config", str(DEPLOY / "serve.toml"), "--print-config"]) == 0
    assert 'model = ["smollm2:135m"]  # ' in capsys.readouterr().out
    commented = re.findall(r"^# ([a-z-]+) = ", text, re.MULTILINE)
    known = {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}
    assert {f"--{name}" for name in commented} <= known


def test_the_image_gets_what_the_build_needs() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    sent = set((DEPLOY / "Dockerfile.dockerignore").read_text().split())
    assert all((DEPLOY.parent / name).exists() and f"!{name}" in sent for name in names)
