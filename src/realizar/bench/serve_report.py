"""The report of a load: percentiles, throughput, goodput, a comparison of servers, and what replicas did."""

from __future__ import annotations

import math
import re
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from realizar.bench.serve_client import Answered, Target
from realizar.bench.serve_run import LoadRun
from realizar.errors import InvalidRequestError

OBJECTIVES = ("ttft", "tpot", "e2e")
_METRICS_TIMEOUT_S = 10.0
_REPLICA_FIGURE = re.compile(r'^realizar:replica_(\w+){.*replica="([^"]+)".*} (\S+)$', re.MULTILINE)
_LATENCIES = (("first text", "ttft"), ("between texts", "gap"), ("per token", "tpot"), ("whole answer", "e2e"))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, percentiles and maximum, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Percentiles | None:
        """The percentiles of values in seconds; None if there are no values."""
        if not values:
            return None
        ordered = sorted(value * 1000 for value in values)
        p50, p90, p99 = (percentile(ordered, share) for share in (50, 90, 99))
        return cls(statistics.fmean(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` percent of sorted values lie, between neighbours where it must be."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """One load on one server.

    Attributes:
        num_requests, num_failed: sent, and not answered whole. errors: what failed, and how often.
        requests_per_s, output_tokens_per_s, total_tokens_per_s: over the whole run.
        ttft, gap, tpot, e2e: first text; between deltas of text; mean per token of a request; whole answers.
        goodput: requests per second that met every objective, and their share of all; None without objectives.
        lag_ms: by which requests were sent late, at the 99th percentile.
        generator_cpu_share: of one core that the load generator took.
    """

    name: str
    num_requests: int
    num_failed: int
    errors: Mapping[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Percentiles | None
    gap: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    goodput_per_s: float | None
    goodput_share: float | None
    lag_ms: float
    generator_cpu_share: float


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by name, of `ttft:500` and the like.

    Raises:
        InvalidRequestError: one is malformed or not known.
    """
    objectives = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = math.nan
        if name not in OBJECTIVES or not 0 < limit_ms < math.inf:
            known = ", ".join(f"{known}:MS" for known in OBJECTIVES)
            raise InvalidRequestError(f"goodput must be of {known}, not {text}", "goodput")
        objectives[name] = limit_ms
    return objectives


def summarize(run: LoadRun, objectives: Mapping[str, float]) -> Summary:
    """Figures of a load.

    Args:
        objectives: milliseconds by name, of `parse_objectives`.
    """
    good = run.good
    errors: dict[str, int] = {}
    for each in run.answered:
        if each.error is not None:
            errors[each.error] = errors.get(each.error, 0) + 1
    prompt_tokens, output_tokens = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    met = sum(_meets(each, objectives) for each in good)
    lags = sorted((each.sent_s - each.due_s) * 1000 for each in run.answered)
    return Summary(
        name=run.target.name,
        num_requests=len(run.answered),
        num_failed=len(run.answered) - len(good),
        errors=errors,
        duration_s=run.duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(good) / run.duration_s,
        output_tokens_per_s=output_tokens / run.duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / run.duration_s,
        ttft=Percentiles.of_seconds([a.ttft_s for a in good]),
        gap=Percentiles.of_seconds([gap for a in good for gap in a.gaps_s]),
        tpot=Percentiles.of_seconds([a.tpot_s for a in good if a.output_tokens > 1]),
        e2e=Percentiles.of_seconds([a.e2e_s for a in good]),
        goodput_per_s=met / run.duration_s if objectives else None,
        goodput_share=met / len(run.answered) if objectives else None,
        lag_ms=percentile(lags, 99),
        generator_cpu_share=run.generator_cpu_s / run.duration_s,
    )


def _meets(answered: Answered, objectives: Mapping[str, float]) -> bool:
    values = {"ttft": answered.ttft_s, "tpot": answered.tpot_s, "e2e": answered.e2e_s}
    return all(values[name] * 1000 <= limit_ms for name, limit_ms in objectives.items())


def as_markdown(summaries: Sequence[Summary]) -> str:
    """A table with a column for each run, and the first server's figures over the others'."""
    rows: list[tuple[str, list[str]]] = [
        ("requests (failed)", [f"{s.num_requests} ({s.num_failed})" for s in summaries]),
        ("duration, s", [f"{s.duration_s:.2f}" for s in summaries]),
        ("tokens in, out", [f"{s.prompt_tokens}, {s.output_tokens}" for s in summaries]),
        ("output tokens/s", [f"{s.output_tokens_per_s:.1f}" for s in summaries]),
        ("requests/s", [f"{s.requests_per_s:.2f}" for s in summaries]),
    ]
    for label, name in (
        ("first text", "ttft"),
        ("between texts", "gap"),
        ("per token", "tpot"),
        ("whole answer", "e2e"),
    ):
        rows.append((f"{label}, ms: p50 / p90 / p99", [_triple(getattr(s, name)) for s in summaries]))
    if any(s.goodput_per_s is not None for s in summaries):
        rows.append(("goodput, requests/s (share)", [_goodput(s) for s in summaries]))
    rows.append(("sent late, p99 ms", [f"{s.lag_ms:.1f}" for s in summaries]))
    rows.append(("load generator, share of a core", [f"{s.generator_cpu_share:.2f}" for s in summaries]))
    lines = [
        "| | " + " | ".join(s.name for s in summaries) + " |",
        "|---|" + "---:|" * len(summaries),
        *(f"| {label} | {' | '.join(cells)} |" for label, cells in rows),
    ]
    ours = summaries[0]
    for other in summaries[1:]:
        lines += ["", *_ratios(ours, other)] if ours.name != other.name else []
    for summary in summaries:
        lines += [f"\n{summary.name}: {count} x {error}" for error, count in summary.errors.items()]
    return "\n".join(lines)


def _triple(values: Percentiles | None) -> str:
    return "-" if values is None else f"{values.p50:.1f} / {values.p90:.1f} / {values.p99:.1f}"


def _goodput(summary: Summary) -> str:
    if summary.goodput_per_s is None or summary.goodput_share is None:
        return "-"
    return f"{summary.goodput_per_s:.2f} ({summary.goodput_share:.0%})"


def _ratios(ours: Summary, other: Summary) -> list[str]:
    parts = []
    if other.output_tokens_per_s:
        parts.append(f"output tokens/s {ours.output_tokens_per_s / other.output_tokens_per_s:.2f}")
    for label, name in (("first text p50", "ttft"), ("between texts p50", "gap"), ("between texts p99", "gap")):
        mine, theirs = getattr(ours, name), getattr(other, name)
        field = label[-3:]
        if mine is not None and theirs is not None and getattr(theirs, field):
            parts.append(f"{label} {getattr(mine, field) / getattr(theirs, field):.2f}")
    return [f"{ours.name} over {other.name}: {', '.join(parts)}"] if parts else []


def as_record(runs: Sequence[LoadRun], summaries: Sequence[Summary], load: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for JSON: the load, the figures, and each request's times in seconds after it was due."""
    return {
        "load": dict(load),
        "runs": [
            {
                **asdict(summary),
                "requests": [
                    {
                        "late_s": each.sent_s - each.due_s,
                        "deltas_s": [delta - each.due_s for delta in each.deltas_s],
                        "end_s": each.e2e_s,
                        "prompt_tokens": each.prompt_tokens,
                        "output_tokens": each.output_tokens,
                        "error": each.error,
                    }
                    for each in run.answered
                ],
            }
            for run, summary in zip(runs, summaries, strict=True)
        ],
    }


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Counts of one replica: tokens of prompts, those of them that its cache had, and tokens generated."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def since(self, before: ReplicaCounts) -> ReplicaCounts:
        """The counts after `before`."""
        return ReplicaCounts(
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
            self.output_tokens - before.output_tokens,
        )


Counts: TypeAlias = Mapping[str, ReplicaCounts]


def read_replicas(target: Target) -> dict[str, ReplicaCounts]:
    """The counts of a server's replicas by name; empty for one without any, or whose metrics can't be read."""
    headers = {} if target.api_key is None else {"authorization": f"Bearer {target.api_key}"}
    url = target.url.rstrip("/").removesuffix("/v1")
    try:
        request = urllib.request.Request(f"{url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=_METRICS_TIMEOUT_S) as response:
            return parse_replicas(response.read().decode(errors="replace"))
    except (OSError, ValueError):
        return {}


def parse_replicas(text: str) -> dict[str, ReplicaCounts]:
    """The counts of replicas from Prometheus' text form."""
    found: dict[str, dict[str, int]] = {}
    for name, replica, value in _REPLICA_FIGURE.findall(text):
        found.setdefault(replica, {})[name] = int(float(value))
    return {
        replica: ReplicaCounts(
            counts.get("prompt_tokens_total", 0),
            counts.get("prefix_cache_hits_total", 0),
            counts.get("generation_tokens_total", 0),
        )
        for replica, counts in found.items()
    }


def replicas_as_markdown(
    targets: Sequence[Target],
    before: Sequence[Mapping[str, ReplicaCounts]],
    after: Sequence[Mapping[str, ReplicaCounts]],
) -> str:
    """A table with a row for each replica, its warm-up included; empty where no server has replicas."""
    rows = [
        (f"{target.name} replica {name}", counts.since(earlier.get(name, ReplicaCounts())))
        for target, earlier, later in zip(targets, before, after, strict=True)
        for name, counts in later.items()
    ]
    if not rows:
        return ""
    lines = ["| | tokens in | of them cached | tokens out |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {each.prompt_tokens} | {each.cached_tokens} | {each.output_tokens} |" for name, each in rows]
    return "\n".join(lines)
