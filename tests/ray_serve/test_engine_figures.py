"""Figures of engines that come, go, and are sometimes too busy to give theirs."""

from __future__ import annotations

from realizar.engine.stats import EngineStats
from realizar.ray import serve_link
from realizar.ray.serve_link import EngineFigures
from realizar.server.metrics import exposition_of
from realizar.server.replica_figures import samples_of_engines


def test_counts_never_fall_and_gauges_are_of_engines_that_answer() -> None:
    figures = EngineFigures()
    figures.take({"b": EngineStats(num_running=2, prompt_tokens=30), "a": EngineStats(num_running=1, prompt_tokens=5)})
    assert (figures.total().num_running, figures.total().prompt_tokens) == (3, 35)
    figures.take({"a": EngineStats(num_running=1, prompt_tokens=6)})
    assert (figures.total().num_running, figures.total().prompt_tokens) == (1, 36)
    figures.take({"a": EngineStats(prompt_tokens=6), "b": EngineStats(num_running=4, prompt_tokens=40)})
    assert (figures.total().num_running, figures.total().prompt_tokens) == (4, 46)
    assert list(figures.engines) == ["a", "b"]


def test_counts_of_many_that_are_gone_stay() -> None:
    figures = EngineFigures()
    count = 2 * serve_link._MOST_SILENT
    for number in range(count):
        figures.take({f"{number}": EngineStats(generation_tokens=3)})
    assert figures.total().generation_tokens == 3 * count
    assert len(figures._silent) == serve_link._MOST_SILENT


def test_each_engine_has_metrics_beside_the_sums() -> None:
    figures = EngineFigures()
    figures.take({"b": EngineStats(prompt_tokens=30), "a": EngineStats(prompt_tokens=5)})
    text = exposition_of({"m": figures.total()}, samples_of_engines(figures.engines, "m")).decode()
    for line in (
        'realizar:prompt_tokens_total{model_name="m"} 35.0',
        'realizar:replica_prompt_tokens_total{model_name="m",replica="a"} 5.0',
        'realizar:replica_prompt_tokens_total{model_name="m",replica="b"} 30.0',
    ):
        assert f"\n{line}\n" in text
