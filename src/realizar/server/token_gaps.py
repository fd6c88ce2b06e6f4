"""`TokenGaps`: the histogram of the time between tokens, which counts many tokens at once."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenGaps(Collector):
    """Counts times in buckets. Its samples are those of `prometheus_client.Histogram`, with the label `model_name`.

    That class counts one time at a call; here tokens that came together cost one call.

    Args:
        name, text: of the metric.
        edges: upper edges of the buckets, in seconds, ascending; another bucket without an edge follows.
    """

    def __init__(self, name: str, text: str, edges: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._edges = [*edges, math.inf]
        self._counts = [0] * len(self._edges)
        self._sum_s = 0.0
        self._created_s = time.time()

    def add(self, count: int, each_s: float) -> None:
        """Count so many times of `each_s` seconds."""
        self._counts[bisect.bisect_left(self._edges, each_s)] += count
        self._sum_s += count * each_s

    def collect(self) -> Iterator[Metric]:
        """The samples, for the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        total = 0.0
        for edge, count in zip(self._edges, self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if edge == math.inf else str(float(edge)), total))
        family.add_metric([self._model_name], buckets, self._sum_s)
        family.add_sample(f"{self._name}_created", {"model_name": self._model_name}, self._created_s)
        yield family
