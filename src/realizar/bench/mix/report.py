"""The report of a mix: a table by kind, or of kinds in turn, and what was left out, failed, or was left over."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.bench.mix.compare import MIX, MixResult
from realizar.bench.mix.generators import MixRun
from realizar.bench.mix.run import Served
from realizar.bench.serve_report import Percentiles

BUSY = 0.7
"""Share of a core above which the load generator itself may be the bound."""
_FIRST = "greedy"


def as_markdown(results: Sequence[MixResult]) -> str:
    """Tables and notes, one server after the other."""
    return "\n\n".join(_one_server(result) for result in results)


def as_record(results: Sequence[MixResult], load: Mapping[str, Any], *, requests: bool = True) -> dict[str, Any]:
    """Everything, for JSON: the load, the figures of each label and kind, and each request unless not wanted."""
    return {"load": dict(load), "servers": [_server_record(result, requests) for result in results]}


def _one_server(result: MixResult) -> str:
    server = result.server
    lines = [f"{server.target.name} ({server.dialect.name}'s names of fields)", ""]
    if set(result.runs) != {MIX}:
        lines += _turns_table(result.runs)
    if MIX in result.runs:
        lines += ["", *_kinds_table(figures_by_kind(result.runs[MIX]))]
    return "\n".join([*lines, *_notes(result)])


def _kinds_table(figures: Sequence[_KindFigures]) -> list[str]:
    head = (
        "kind", "requests", "failed", "left", "prompt tokens/s", "output tokens/s", "first text, ms p50 / p99",
        "between, ms p50 / p99", "between / its median: p99 / p99.9 / max", f"over {_LONG_GAP:g}x",
    )  # fmt: skip
    rows = [
        (
            each.kind, str(each.num_requests), str(each.num_failed), str(each.num_left),
            f"{each.prompt_tokens_per_s:.0f}", f"{each.output_tokens_per_s:.0f}", _pair(each.ttft), _pair(each.gap),
            _multiples(each.multiples), _stalls(each.multiples),
        )
        for each in figures
    ]  # fmt: skip
    return _table(head, rows)


def _turns_table(alone: Mapping[str, list[MixRun]]) -> list[str]:
    head = (
        "kind", "output tokens/s, median", "lowest to highest", f"of {_FIRST}", "failed", "first text, ms p50 / p99",
        "between, ms p50 / p99", "between / its median: p99 / p99.9 / max", "generator",
    )  # fmt: skip
    medians = {label: statistics.median(map(output_rate, runs)) for label, runs in alone.items()}
    rows = []
    for label, runs in alone.items():
        rates, every = sorted(map(output_rate, runs)), figures_of_all(runs)
        share = f"{medians[label] / medians[_FIRST]:.2f}" if medians.get(_FIRST) else "-"
        rows.append(
            (
                label, f"{medians[label]:.0f}", f"{rates[0]:.0f} to {rates[-1]:.0f}", share, str(every.num_failed),
                _pair(every.ttft), _pair(every.gap), _multiples(every.multiples), f"{_busiest(runs):.2f}",
            )
        )  # fmt: skip
    return _table(head, rows)


def _notes(result: MixResult) -> list[str]:
    runs = [run for each in result.runs.values() for run in each]
    every = figures_of_all(runs)
    notes = [f"{kind} was left out: {reason}" for kind, reason in result.left_out.items()]
    notes += [f"{count} x {error}" for error, count in every.errors.items()]
    if every.num_shortened:
        notes.append(f"{every.num_shortened} prompts were shortened to the context of {result.server.context_tokens}")
    if every.num_cut:
        notes.append(f"{every.num_cut} answers were under way long after the end, so they were cut off")
    if (state := result.state) is None:
        notes.append("the server shows no /metrics, so nobody knows what it still holds")
    else:
        shown = ", ".join(f"{name} {value:g}" for name, value in state.gauges.items())
        counted = ", ".join(f"{name} {value:g}" for name, value in state.counters.items())
        notes.append(
            f"the server {'holds nothing' if state.is_empty else 'STILL HOLDS SOMETHING'} afterwards ({shown})"
        )
        notes.append(f"the server counted {counted or 'nothing'}")
    busiest = _busiest(runs)
    notes.append(f"the busiest of {len(runs[0].busy)} load generators took {busiest:.2f} of a core")
    if busiest > BUSY:
        notes.append(f"THE GENERATOR MAY BE THE BOUND, as that is over {BUSY:.0%} of a core; give more --generators")
    return ["", *(f"- {note}" for note in notes)]


def _busiest(runs: Sequence[MixRun]) -> float:
    return max(share for run in runs for share in run.busy)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _pair(values: Percentiles | None) -> str:
    return "-" if values is None else f"{values.p50:.1f} / {values.p99:.1f}"


def _multiples(values: _Multiples | None) -> str:
    return "-" if values is None else f"{values.p99:.1f} / {values.p99_9:.1f} / {values.max:.1f}"


def _stalls(values: _Multiples | None) -> str:
    return "-" if values is None else f"{values.num_stalls} of {values.num_gaps}"


def _server_record(result: MixResult, requests: bool) -> dict[str, Any]:
    return {
        "name": result.server.target.name,
        "dialect": result.server.dialect.name,
        "model": result.server.target.model,
        "context_tokens": result.server.context_tokens,
        "left_out": dict(result.left_out),
        "state": None if result.state is None else asdict(result.state),
        "loads": {label: _load_record(runs, requests) for label, runs in result.runs.items()},
    }


def _load_record(runs: Sequence[MixRun], requests: bool) -> dict[str, Any]:
    figures = figures_by_kind(runs)
    listed = [_request_record(run, index) for run in runs for index in range(len(run.served))] if requests else None
    return {
        "rounds": [
            {"duration_s": run.duration_s, "output_tokens_per_s": output_rate(run), "generators": run.busy}
            for run in runs
        ],
        "median_output_tokens_per_s": statistics.median(map(output_rate, runs)),
        "kinds": {each.kind: asdict(each) for each in figures if each.kind != _ALL},
        _ALL: asdict(figures[-1]),
        "requests": listed,
    }


def _request_record(run: MixRun, index: int) -> dict[str, Any]:
    served = run.served[index]
    return {
        "kind": served.kind,
        "due_s": served.due_s - run.start_s,
        "first_s": served.first_s - run.start_s if served.first_s is not None else None,
        "end_s": served.ended_s - run.start_s,
        "words": served.num_words,
        "max_tokens": served.max_tokens,
        "prompt_tokens": served.prompt_tokens,
        "output_tokens": served.output_tokens,
        "deltas": served.num_deltas,
        "left": served.left,
        "error": served.error,
    }


# The figures of a mix: for each kind, and for all, what was answered, how fast, and how evenly.

_ALL = "all"
_LONG_GAP = 20.0
"""A gap of more than this multiple of its stream's median is counted as a stall."""


@dataclass(frozen=True, slots=True)
class _Multiples:
    """Gaps between the deltas of streams, as multiples of their stream's median. Deltas of one read have no gap.

    Attributes:
        p50, p99, p99_9, max: over all gaps.
        num_gaps: of streams with two gaps and more.
        num_stalls: gaps above 20 times the median.
    """

    p50: float
    p99: float
    p99_9: float
    max: float
    num_gaps: int
    num_stalls: int


@dataclass(frozen=True, slots=True)
class _KindFigures:
    """The requests of one kind, or of all.

    Attributes:
        num_requests: sent. num_failed: of them not answered whole. num_left: clients that left, as they were asked to.
        num_cut: under way when the load's time was over. num_shortened: that the context did not hold.
        errors: what failed, and how often.
        prompt_tokens, output_tokens: within the load's time. The server's counts; of a client that left or was cut,
            the words of a prompt whose answer had begun, and the deltas.
        prompt_tokens_per_s, output_tokens_per_s: over the load's time.
        ttft: to the first text; gap: between deltas of a stream. Milliseconds.
        multiples: the gaps beside their stream's median; None without any.
    """

    kind: str
    num_requests: int
    num_failed: int
    num_left: int
    num_cut: int
    num_shortened: int
    errors: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Percentiles | None
    gap: Percentiles | None
    multiples: _Multiples | None


def figures_by_kind(runs: Sequence[MixRun]) -> list[_KindFigures]:
    """Figures of each kind over the rounds of one load, in the kinds' alphabetical order, and last of all together."""
    kinds = sorted({each.kind for run in runs for each in run.served})
    return [*(_figures(kind, runs) for kind in kinds), figures_of_all(runs)]


def figures_of_all(runs: Sequence[MixRun]) -> _KindFigures:
    """Figures of all kinds together."""
    return _figures(_ALL, runs)


def output_rate(run: MixRun) -> float:
    """Output tokens per second of all kinds of a run."""
    return sum(_tokens_within(run, each)[1] for each in run.served) / run.duration_s


@dataclass(frozen=True, slots=True)
class _SettledRates:
    """Tokens per second of the requests that ended within the later part of a load's time, prompt and answer alike.

    A load's first requests come all at once, and at its end prompts have been read whose answers are still to come: the
    shorter the load, the more of its tokens are of prompts. These are whole requests, so their tokens are in the mix's
    own ratio.

    Attributes:
        num_requests: that have begun to answer and ended.
    """

    num_requests: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float


def settled_rates(run: MixRun, settle_s: float) -> _SettledRates:
    """The rates once a load has run for `settle_s`."""
    begin_s, end_s = run.start_s + settle_s, run.start_s + run.duration_s
    ended = [each for each in run.served if each.error is None and each.num_deltas and begin_s <= each.ended_s <= end_s]
    prompts = sum(each.prompt_tokens or each.num_words for each in ended)
    seconds = max(end_s - begin_s, 1e-9)
    return _SettledRates(len(ended), prompts / seconds, sum(each.output_tokens for each in ended) / seconds)


def _figures(kind: str, runs: Sequence[MixRun]) -> _KindFigures:
    taken = [(run, each) for run in runs for each in run.served if kind in (each.kind, _ALL)]
    served = [each for _, each in taken]
    duration_s = sum(run.duration_s for run in runs)
    counts = [_tokens_within(run, each) for run, each in taken]
    prompt_tokens, output_tokens = (round(sum(count[place] for count in counts)) for place in (0, 1))
    good = [each for each in served if each.error is None]
    errors = Counter(each.error for each in served if each.error is not None)
    gaps_s = np.concatenate([np.empty(0, np.float32), *(each.gaps_s for each in good)])
    return _KindFigures(
        kind=kind,
        num_requests=len(served),
        num_failed=sum(errors.values()),
        num_left=sum(each.left for each in served),
        num_cut=sum(each.was_cut for each in served),
        num_shortened=sum(each.was_shortened for each in served),
        errors=dict(errors),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        ttft=Percentiles.of_seconds([each.first_s - each.due_s for each in good if each.first_s is not None]),
        gap=_percentiles(gaps_s),
        multiples=_multiples_of(good),
    )


def _tokens_within(run: MixRun, served: Served) -> tuple[float, float]:
    """Prompt tokens and output tokens of a request that fall into the load's time.

    An answer's tokens are spread over its deltas: a delta may hold several, and a token may have no text.
    """
    if served.error is not None:
        return 0.0, 0.0
    if not served.num_deltas:
        is_inside = served.ended_s <= run.start_s + run.duration_s and not (served.left or served.was_cut)
        return float(is_inside) * served.prompt_tokens, float(is_inside) * served.output_tokens
    prompt_tokens = served.prompt_tokens or served.num_words
    return prompt_tokens * float(served.num_within > 0), served.output_tokens * served.num_within / served.num_deltas


def _percentiles(values_s: NDArray[np.float32]) -> Percentiles | None:
    """As `Percentiles.of_seconds`, for millions of values."""
    if not len(values_s):
        return None
    p50, p90, p99 = (1000 * float(value) for value in np.percentile(values_s, (50, 90, 99)))
    return Percentiles(1000 * float(values_s.mean(dtype=np.float64)), p50, p90, p99, 1000 * float(values_s.max()))


def _multiples_of(served: Sequence[Served]) -> _Multiples | None:
    found = [each.gaps_s / each.median_gap_s for each in served if len(each.gaps_s) > 1]
    if not found:
        return None
    every = np.concatenate(found)
    p50, p99, p99_9 = (float(value) for value in np.percentile(every, (50, 99, 99.9)))
    return _Multiples(p50, p99, p99_9, float(every.max()), len(every), int((every > _LONG_GAP).sum()))
