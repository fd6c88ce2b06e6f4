"""docs/serving.md says what the code does: limits with their defaults, metrics, options."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from realizar.backends.load_progress import LoadProgress
from realizar.cli.main import app
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_link import ThreadLink
from realizar.engine.stats import EngineStats
from realizar.replicas.link import ReplicaLink
from realizar.server.figures import ServerFigures, own_samples
from realizar.server.metrics import COUNTERS, GAUGES, Metrics, MetricSamples, exposition_of
from realizar.server.models.shelf import shelf_samples
from realizar.server.replica_figures import replica_samples
from realizar.server.settings import ServerSettings

_PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| (?:`(--[\w-]+)`)? ?\|", re.MULTILINE)
_METRIC = re.compile(r"^\| `((?:realizar[:_]|process_)\w+)` \| (\w+) \|", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def _shown(name: str, value: float) -> str:
    """A limit as the page writes it."""
    if name.endswith("_bytes"):
        return f"{int(value) >> 20} MiB" if value >= 1 << 20 else f"{int(value) >> 10} KiB"
    return f"{value:g} s" if name.endswith("_s") else f"{int(value):,}"


def test_limits_have_the_defaults_that_the_page_gives() -> None:
    settings = ServerSettings()
    numbers = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if type(getattr(settings, field.name)) in (int, float)
    }
    listed = {name: default for name, default, _ in _ROW.findall(_PAGE) if name in numbers}
    assert listed == {name: _shown(name, value) for name, value in numbers.items()}


def test_every_metric_is_listed_with_its_kind() -> None:
    samples = (*Metrics("model").samples(), *ServerFigures().samples(), *own_samples(), *shelf_samples(()))
    text = exposition_of({"model": EngineStats(device_memory_total_bytes=1)}, samples).decode()
    exported = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    exported = {name: kind for name, kind in exported.items() if not name.endswith("_created")}
    replicas = {f"{metric.name}{'_total' * (metric.kind == 'counter')}": metric.kind for metric in _of_replicas()}
    engine = {name.replace("realizar:", "realizar:replica_"): kind for name, kind in exported.items()}
    exported |= {name: kind for name, kind in replicas.items() if name not in engine}
    assert len(set(replicas) & set(engine)) == len(GAUGES) + len(COUNTERS) + 1  # drafts by place
    assert dict(_METRIC.findall(_PAGE)) == exported


def _of_replicas() -> tuple[MetricSamples, ...]:
    link = ReplicaLink([lambda: ThreadLink(_no_core)] * 2)
    return replica_samples(link, "model")


def _no_core(progress: LoadProgress) -> EngineCore:
    raise NotImplementedError


def test_every_option_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known: set[str] = set()
    for command in ("serve", "plan", "bench-serve", "doctor"):
        app([command, "--help"], result_action="return_value")
        known |= set(_OPTION.findall(capsys.readouterr().out))
    of_docker = {"--profile", "--target", "--gpus", "--signal"}
    named = set(_OPTION.findall(_PAGE)) - {"--help"} - of_docker
    assert named - known == set()
    assert {option for _, _, option in _ROW.findall(_PAGE) if option} <= named
