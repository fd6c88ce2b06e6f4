"""The report of a mix: a table by kind, or of kinds in turn, and what was left out, failed, or was left over."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from realizar.bench.mix.compare import MIX, MixResult
from realizar.bench.mix.figures import (
    ALL,
    LONG_GAP,
    KindFigures,
    Multiples,
    figures_by_kind,
    figures_of_all,
    output_rate,
)
from realizar.bench.mix.generators import MixRun
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


def _kinds_table(figures: Sequence[KindFigures]) -> list[str]:
    head = (
        "kind", "requests", "failed", "left", "prompt tokens/s", "output tokens/s", "first text, ms p50 / p99",
        "between, ms p50 / p99", "between / its median: p99 / p99.9 / max", f"over {LONG_GAP:g}x",
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


def _multiples(values: Multiples | None) -> str:
    return "-" if values is None else f"{values.p99:.1f} / {values.p99_9:.1f} / {values.max:.1f}"


def _stalls(values: Multiples | None) -> str:
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
        "kinds": {each.kind: asdict(each) for each in figures if each.kind != ALL},
        ALL: asdict(figures[-1]),
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
