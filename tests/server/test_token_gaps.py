"""The histogram of times between tokens, against prometheus_client's own."""

from __future__ import annotations

import random
import re

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from realizar.server.metrics import Metrics, TokenGaps

EDGES = (0.01, 0.025, 1.0, 2.5, 80.0)


def exposed(registry: CollectorRegistry) -> str:
    """The text form, without the time at which the histogram was made."""
    return re.sub(r"(?m)^(a_seconds_created\{.*\}) .*$", r"\1 then", generate_latest(registry).decode())


def test_many_times_at_once_are_the_same_as_one_after_another() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = TokenGaps("a_seconds", "Some times.", EDGES, 'm"1')
    ours.register(gaps)
    histogram = Histogram("a_seconds", "Some times.", ["model_name"], buckets=EDGES, registry=theirs).labels('m"1')
    assert exposed(ours) == exposed(theirs)
    rng = random.Random(3)
    for each_s in (0.0, 100.0, *EDGES, *(rng.choice((0.25, 0.5, 3.0, 64.0)) for _ in range(20))):
        count = rng.randrange(1, 5)
        gaps.add(count, each_s)
        for _ in range(count):
            histogram.observe(each_s)
    assert re.sub(r"_sum.*", "", exposed(ours)) == re.sub(r"_sum.*", "", exposed(theirs))
    sums = [float(re.findall(r"_sum\{.*\} (.*)", exposed(registry))[0]) for registry in (ours, theirs)]
    assert abs(sums[0] - sums[1]) < 1e-9 * sums[1]


def test_tokens_of_one_delta_share_its_time() -> None:
    metrics = Metrics("m")
    metrics.tokens_came(4, 0.2)
    text = metrics._between.collect()
    (family,) = text
    values = {sample.labels.get("le"): sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    assert (values["0.025"], values["0.05"], values["+Inf"]) == (0, 4, 4)
