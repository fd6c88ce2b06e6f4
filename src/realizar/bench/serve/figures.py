"""The figures of a load, by the names of vLLM's `bench serve` and SGLang's `bench_serving`.

Both tools time a request from when it is sent, which is when it is due here unless the generator is late: TTFT is until
the first text, ITL from one text of a stream to the next, TPOT the mean time of a token after the first, E2EL until the
whole answer (`e2e_latency` at SGLang). Rates are over the whole load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.bench.serve.client import Answer
from realizar.bench.serve.load import LoadRun
from realizar.errors import InvalidRequestError

LATENCIES = ("ttft", "tpot", "itl", "e2el")
_OBJECTIVES = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2el", "e2e": "e2el"}
_LONG_GAP = 20.0
"""A gap of more than this multiple of its stream's median is counted as a stall."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, standard deviation, percentiles and maximum, in milliseconds."""

    mean: float
    std: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values_s: Sequence[float] | NDArray[np.float64]) -> Percentiles | None:
        if not len(values_s):
            return None
        values = 1000 * np.asarray(values_s, np.float64)
        median, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(float(values.mean()), float(values.std()), median, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class GapMultiples:
    """Gaps between the deltas of streams, as multiples of their stream's median. Deltas of one read have no gap.

    `num_gaps` is of streams with two gaps and more. `num_stalls` counts the gaps above 20 times the median.
    """

    p99: float
    p99_9: float
    max: float
    num_gaps: int
    num_stalls: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The requests of a load's runs, or those of one kind. Names are vLLM's, where it has one.

    Attributes:
        requests: sent. completed: answered whole within the load's time. failed: neither answered nor left. left: their
            clients left, as they were asked to. cut: under way long after the load's time. shortened: that the context
            did not hold.
        errors: what failed, and how often.
        duration: seconds of the runs together.
        total_input_tokens, total_output_tokens: within the load's time. The server's counts; of a client that left or
            was cut, the words of a prompt whose answer had begun, and the deltas.
        met: of the completed requests, those that met every objective; None without objectives.
        latencies: of each of `LATENCIES`, of the requests that did not fail; None without any.
        multiples: the gaps beside their stream's median; None without any.
        late_ms: by which requests were sent late, at the 99th percentile.
    """

    requests: int
    completed: int
    failed: int
    left: int
    cut: int
    shortened: int
    errors: Mapping[str, int]
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    met: int | None
    latencies: Mapping[str, Percentiles | None]
    multiples: GapMultiples | None
    late_ms: float

    @property
    def input_throughput(self) -> float:
        return self.total_input_tokens / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    def as_record(self) -> dict[str, Any]:
        """All figures without a nesting of latencies: `median_ttft_ms` and the like."""
        rates = {
            "request_throughput": self.completed / self.duration,
            "input_throughput": self.input_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.input_throughput + self.output_throughput,
            "request_goodput": None if self.met is None else self.met / self.duration,
        }
        plain = asdict(self)
        latencies = {
            f"{statistic}_{name}_ms": value
            for name, each in plain.pop("latencies").items()
            if each is not None
            for statistic, value in each.items()
        }
        return {**plain, **rates, **latencies}


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by name, of `ttft:500` and the like. InvalidRequestError: one is malformed or not known."""
    objectives = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = math.nan
        if name not in _OBJECTIVES or not 0 < limit_ms < math.inf:
            known = ", ".join(f"{known}:MS" for known in dict.fromkeys(_OBJECTIVES.values()))
            raise InvalidRequestError(f"goodput must be of {known}, not {text}", "goodput")
        objectives[_OBJECTIVES[name]] = limit_ms
    return objectives


def figures_of(
    runs: Sequence[LoadRun], kind: str | None = None, objectives: Mapping[str, float] | None = None
) -> Figures:
    """Figures over the rounds of one load, all kinds where `kind` is None. `objectives`: see `parse_objectives`."""
    taken = [(run, each) for run in runs for each in run.answers if kind in (None, each.request.kind)]
    answers = [each for _, each in taken]
    counts = [tokens_within(run, each) for run, each in taken]
    begun = [each for each in answers if each.error is None and len(each.deltas_s)]
    whole = [each for each in answers if each.is_whole]
    completed = [each for run, each in taken if each.is_whole and each.ended_s <= run.end_s]
    errors = Counter(each.error for each in answers if each.error is not None)
    gaps_s = [each.gaps_s for each in begun]
    lags_s = [each.sent_s - each.due_s for each in answers]
    return Figures(
        requests=len(answers),
        completed=len(completed),
        failed=sum(errors.values()),
        left=sum(each.left for each in answers),
        cut=sum(each.was_cut for each in answers),
        shortened=sum(each.request.was_shortened for each in answers),
        errors=dict(errors),
        duration=sum(run.duration_s for run in runs),
        total_input_tokens=round(sum(count for count, _ in counts)),
        total_output_tokens=round(sum(count for _, count in counts)),
        met=sum(_meets(each, objectives) for each in completed) if objectives else None,
        latencies={
            "ttft": Percentiles.of_seconds([each.ttft_s for each in begun]),
            "tpot": Percentiles.of_seconds([each.tpot_s for each in begun if each.is_whole and each.output_tokens > 1]),
            "itl": Percentiles.of_seconds(np.concatenate([np.empty(0), *gaps_s])),
            "e2el": Percentiles.of_seconds([each.e2el_s for each in whole]),
        },
        multiples=_multiples_of(gaps_s),
        late_ms=1000 * float(np.percentile(lags_s, 99)) if lags_s else 0.0,
    )


def _meets(answer: Answer, objectives: Mapping[str, float]) -> bool:
    """Whether a whole answer met every objective; one without text or of a single token took none for its others."""
    has_text = bool(len(answer.deltas_s))
    values = {
        "ttft": answer.ttft_s if has_text else answer.e2el_s,
        "tpot": answer.tpot_s if has_text else 0.0,
        "e2el": answer.e2el_s,
    }
    return all(1000 * values[name] <= limit_ms for name, limit_ms in objectives.items())


def output_rate(run: LoadRun) -> float:
    return sum(tokens_within(run, each)[1] for each in run.answers) / run.duration_s


def tokens_within(run: LoadRun, answer: Answer) -> tuple[float, float]:
    """Prompt tokens and output tokens of a request that fall into the load's time.

    An answer's tokens are spread over its deltas: a delta may hold several, and a token may have no text.
    """
    if answer.error is not None:
        return 0.0, 0.0
    if not len(answer.deltas_s):
        is_inside = answer.ended_s <= run.end_s and answer.is_whole
        return float(is_inside) * answer.prompt_tokens, float(is_inside) * answer.output_tokens
    within = int(np.searchsorted(answer.deltas_s, run.end_s, side="right"))
    prompt_tokens = answer.prompt_tokens or answer.request.prompt_length
    return prompt_tokens * float(within > 0), answer.output_tokens * within / len(answer.deltas_s)


def _multiples_of(streams: Iterable[NDArray[np.float64]]) -> GapMultiples | None:
    positive = (gaps_s[gaps_s > 0] for gaps_s in streams)
    found = [gaps_s / np.median(gaps_s) for gaps_s in positive if len(gaps_s) > 1]
    if not found:
        return None
    every = np.concatenate(found)
    p99, p99_9 = (float(value) for value in np.percentile(every, (99, 99.9)))
    return GapMultiples(p99, p99_9, float(every.max()), len(every), int((every > _LONG_GAP).sum()))
