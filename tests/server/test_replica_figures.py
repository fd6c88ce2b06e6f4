"""Metrics of replicas add up to the engine's own, and lose nothing."""

from __future__ import annotations

import re

from realizar.backends.load_progress import LoadProgress
from realizar.bench.serve_client import Target
from realizar.bench.serve_report import ReplicaCounts, parse_replicas, read_replicas, replicas_as_markdown
from realizar.engine.clients.async_link import ThreadLink
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.metrics import EngineStats
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
    before = parse_replicas(_text(EngineStats(prompt_tokens=30), EngineStats()))
    after = parse_replicas(
        _text(EngineStats(prompt_tokens=50, prefix_cache_hits=12, generation_tokens=5), EngineStats(prompt_tokens=7))
    )
    assert after["0"].since(before["0"]) == ReplicaCounts(20, 12, 5)
    table = replicas_as_markdown([Target("ours", "http://x", "m")], [before], [after])
    assert table.splitlines()[2:] == ["| ours replica 0 | 20 | 12 | 5 |", "| ours replica 1 | 7 | 0 | 0 |"]
    assert replicas_as_markdown([Target("ours", "http://x", "m")], [{}], [{}]) == ""


def test_a_server_that_can_not_be_asked_has_no_replicas() -> None:
    assert read_replicas(Target("ours", "http://127.0.0.1:9/v1", "m")) == {}
    assert read_replicas(Target("ours", "nonsense", "m")) == {}
