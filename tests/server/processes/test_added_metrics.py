"""The metrics of several processes are those of one that had all of their requests."""

from __future__ import annotations

import re

import msgspec
from prometheus_client.exposition import generate_latest

from realizar.engine.frontend.outputs import CompletionOutput, RequestOutput, Timings
from realizar.engine.stats import EngineStats
from realizar.server.metrics import Metrics, MetricSamples, add_samples, exposition_of


def _count(metrics: Metrics, number: int) -> None:
    choice = CompletionOutput(0, "x", (1,), "stop" if number % 2 else "length")
    metrics.ended(RequestOutput("r", None, (1,), (choice,), Timings(0.0, 0.125, 0.25 + number, 1.0 + 2 * number)))
    metrics.tokens_came(3, 0.25 * number)
    if number % 3 == 0:
        metrics.aborted()


def _figures(text: bytes) -> str:
    return re.sub(r"^(\S+_created\S*) .*$", r"\1", text.decode(), flags=re.MULTILINE)


def test_processes_add_up_to_one() -> None:
    stats = EngineStats(num_running=2, generation_tokens=7, num_restarts=1)
    whole, parts = Metrics("m"), [Metrics("m") for _ in range(3)]
    for number in range(20):
        _count(whole, number)
        _count(parts[number % 3], number)
    sent = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(part.samples()), type=tuple[MetricSamples, ...]) for part in parts
    ]
    retired = add_samples((sent[0], ()))
    added = exposition_of({"m": stats}, add_samples((retired, *sent[1:])))
    assert _figures(added) == _figures(exposition_of({"m": stats}, ()) + generate_latest(whole._registry))


def test_a_time_of_creation_is_the_first() -> None:
    def made(created_s: float) -> tuple[MetricSamples, ...]:
        return (MetricSamples("n", "text", "counter", (("n_total", {}, 2.0), ("n_created", {}, created_s))),)

    (added,) = add_samples((made(5.0), made(3.0), made(4.0)))
    assert added.samples == (("n_total", {}, 6.0), ("n_created", {}, 3.0))
