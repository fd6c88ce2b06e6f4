"""Metrics of replicas add up to the engine's own, and lose nothing."""

from __future__ import annotations

import re

from realizar.backends.load_progress import LoadProgress
from realizar.bench.serve.client import Server
from realizar.bench.serve.compare import ServerRuns
from realizar.bench.serve.load import LoadRun
from realizar.bench.serve.report import as_markdown
from realizar.bench.serve.servers import ServerState, read_state
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_link import ThreadLink
from realizar.engine.stats import EngineStats
from realizar.replicas.link import ReplicaLink
from realizar.server.metrics import exposition_of
from realizar.server.replica_figures import replica_samples


def _no_core(progress: LoadProgress) -> EngineCore:
    raise NotImplementedError


def _text(*each: EngineStats) -> str:
    link = ReplicaLink([lambda: ThreadLink(_no_core)] * len(each))
    total = EngineStats()
    for replica, stats in zip(link.replicas, each, strict=True):
        replica._last_stats = stats
        total = total.added(stats)
    return exposition_of({"m": total}, replica_samples(link, "m")).decode()


def test_sums_and_replicas_agree_and_have_names_of_their_own() -> None:
    text = _text(
        EngineStats(num_running=2, prompt_tokens=30, prefix_cache_hits=20, generation_tokens=7),
        EngineStats(num_running=3, prompt_tokens=40, prefix_cache_hits=0, generation_tokens=9),
    )
    for name, values in (("num_requests_running", (2.0, 3.0)), ("prompt_tokens_total", (30.0, 40.0))):
        found = re.findall(rf'^realizar:replica_{name}{{model_name="m",replica="(\d)"}} (\S+)$', text, re.MULTILINE)
        assert found == [("0", str(values[0])), ("1", str(values[1]))]
        assert f'realizar:{name}{{model_name="m"}} {sum(values)}' in text
    assert 'realizar:replica_state{model_name="m",replica="1",state="starting"} 1.0' in text


def test_a_report_of_a_load_has_what_each_replica_did() -> None:
    before = ServerState.parse(_text(EngineStats(prompt_tokens=30), EngineStats()))
    after = ServerState.parse(
        _text(EngineStats(prompt_tokens=50, prefix_cache_hits=12, generation_tokens=5), EngineStats(prompt_tokens=7))
    )
    gained = after.since(before)
    assert gained.replicas == {
        "0": {"prompt_tokens": 20, "cached_tokens": 12, "output_tokens": 5},
        "1": {"prompt_tokens": 7, "cached_tokens": 0, "output_tokens": 0},
    }
    assert gained.counters["prompt_tokens"] == 27, "replicas are not counted twice"
    run = LoadRun(0.0, 1.0, [], (0.1,))
    text = as_markdown([ServerRuns(Server("ours", "http://x", "m"), runs={"plain": [run]}, state=gained)])
    assert "- replica 0: prompt_tokens 20, cached_tokens 12, output_tokens 5" in text.splitlines()


def test_a_server_that_can_not_be_asked_has_no_figures() -> None:
    assert read_state(Server("ours", "http://127.0.0.1:9/v1", "m")) is None
    assert read_state(Server("ours", "nonsense", "m")) is None
