"""The report of loads: a table, the servers beside each other, and what was left out, failed, or was left over."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from realizar.bench.serve.client import Answer
from realizar.bench.serve.compare import ServerRuns
from realizar.bench.serve.figures import LATENCIES, Figures, figures_of, output_rate
from realizar.bench.serve.load import LoadRun
from realizar.bench.serve.noise import compare_rounds

BUSY = 0.7
"""Share of a core above which the load generator itself may be the bound."""
_FIRST = "greedy"
_FEW = 4
"""Loads or kinds that stand beside each other; more stand below each other, with fewer figures."""

Objectives = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Shown:
    """One column or line of a table: a load of a server, or one of its kinds.

    `share` is of the rate of the greedy load; None where that is not sent in turn. `busiest` is the share of a core
    that a generator took at the most; None for a kind.
    """

    name: str
    figures: Figures
    rates: Sequence[float]
    share: float | None = None
    busiest: float | None = None


def as_markdown(results: Sequence[ServerRuns], objectives: Objectives | None = None) -> str:
    """Tables and notes. Several servers are compared with the first one."""
    labels = list(dict.fromkeys(label for result in results for label in result.runs))
    shown = [
        _shown_load(_name(result, label, len(results) > 1, len(labels) > 1), result, label, objectives)
        for label in labels
        for result in results
        if label in result.runs
    ]
    parts = ["\n".join(_table(shown))]
    for result in results:
        for label, runs in result.runs.items():
            if len(kinds := _kinds(runs)) > 1:
                title = _name(result, label, len(results) > 1, True)
                each = [_Shown(kind, figures_of(runs, kind, objectives), []) for kind in kinds]
                parts.append("\n".join([f"Kinds of {title}:", "", *_table(each, are_many=True)]))
    for label in labels:
        parts += [
            "\n".join(
                [*([f"{label}:", ""] if len(labels) > 1 else []), *_compared(other, results[0], label, objectives)]
            )
            for other in results[1:]
            if label in other.runs and label in results[0].runs
        ]
    parts += [notes for result in results if (notes := _notes(result, several=len(results) > 1))]
    return "\n\n".join(parts)


def _name(result: ServerRuns, label: str, several_servers: bool, several_labels: bool) -> str:
    names = [result.server.name] * (several_servers or not several_labels) + [label] * several_labels
    return ", ".join(names)


def _shown_load(name: str, result: ServerRuns, label: str, objectives: Objectives | None) -> _Shown:
    runs = result.runs[label]
    medians = {label: statistics.median(map(output_rate, runs)) for label, runs in result.runs.items()}
    share = medians[label] / medians[_FIRST] if len(medians) > 1 and medians.get(_FIRST) else None
    busiest = max(share for run in runs for share in run.busy)
    return _Shown(name, figures_of(runs, None, objectives), list(map(output_rate, runs)), share, busiest)


def _kinds(runs: Sequence[LoadRun]) -> list[str]:
    return sorted({each.request.kind for run in runs for each in run.answers})


def _compared(first: ServerRuns, second: ServerRuns, label: str, objectives: Objectives | None) -> list[str]:
    rounds = [[figures_of([run], None, objectives).as_record() for run in each.runs[label]] for each in (first, second)]
    names = (first.server.name, second.server.name)
    return compare_rounds(names, *rounds) if names[0] != names[1] else []


def _table(shown: Sequence[_Shown], *, are_many: bool = False) -> list[str]:
    """Figures that anything has; loads side by side, or many below each other with the main figures."""
    are_many = are_many or len(shown) > _FEW
    rows = [(label, [cell(each) for each in shown]) for label, is_main, cell in _ROWS if is_main or not are_many]
    filled = [[label, *(cell or "-" for cell in cells)] for label, cells in rows if any(cells)]
    lines = [["", *(each.name for each in shown)], *filled]
    if are_many:
        lines = [list(line) for line in zip(*lines, strict=True)]
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return [f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]]


def _rates(shown: _Shown) -> str:
    if len(shown.rates) < 2:
        return f"{shown.figures.output_throughput:.1f}"
    return f"{statistics.median(shown.rates):.1f} ({min(shown.rates):.1f} to {max(shown.rates):.1f})"


def _latency(name: str) -> Callable[[_Shown], str | None]:
    def cell(shown: _Shown) -> str | None:
        found = shown.figures.latencies[name]
        if found is None:
            return None
        return f"{found.mean:.1f} / {found.median:.1f} / {found.p90:.1f} / {found.p99:.1f}"

    return cell


def _goodput(shown: _Shown) -> str | None:
    figures = shown.figures
    if figures.met is None:
        return None
    return f"{figures.met / figures.duration:.2f} ({figures.met / max(figures.requests, 1):.0%})"


def _multiples(shown: _Shown) -> str | None:
    found = shown.figures.multiples
    return None if found is None else f"{found.p99:.1f} / {found.p99_9:.1f} / {found.max:.1f}"


def _stalls(shown: _Shown) -> str | None:
    found = shown.figures.multiples
    return None if found is None else f"{found.num_stalls} of {found.num_gaps}"


_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
# Of each line: its label, whether it is a main one, and its cell of a load; a line without cells is left away.
_ROWS: tuple[tuple[str, bool, Callable[[_Shown], str | None]], ...] = (
    ("requests (failed)", True, lambda shown: f"{shown.figures.requests} ({shown.figures.failed})"),
    ("clients that left", True, lambda shown: f"{shown.figures.left}" if shown.figures.left else None),
    ("duration, s", False, lambda shown: f"{shown.figures.duration:.2f}"),
    (
        "tokens in, out",
        False,
        lambda shown: f"{shown.figures.total_input_tokens}, {shown.figures.total_output_tokens}",
    ),
    ("requests/s", False, lambda shown: f"{shown.figures.completed / shown.figures.duration:.2f}"),
    ("input tokens/s", True, lambda shown: f"{shown.figures.input_throughput:.1f}"),
    ("output tokens/s", True, _rates),
    (f"of {_FIRST}", True, lambda shown: None if shown.share is None else f"{shown.share:.2f}"),
    (
        "total tokens/s",
        False,
        lambda shown: f"{shown.figures.input_throughput + shown.figures.output_throughput:.1f}",
    ),
    *(
        (f"{_NAMES[name]}, ms: mean / median / p90 / p99", name in ("ttft", "itl"), _latency(name))
        for name in LATENCIES
    ),
    ("goodput, requests/s (share)", True, _goodput),
    ("ITL / its stream's median: p99 / p99.9 / max", True, _multiples),
    ("of them over 20", True, _stalls),
    ("sent late, p99 ms", False, lambda shown: f"{shown.figures.late_ms:.1f}"),
    (
        "busiest load generator, share of a core",
        False,
        lambda shown: None if shown.busiest is None else f"{shown.busiest:.2f}",
    ),
)


def _notes(result: ServerRuns, *, several: bool) -> str:
    every = figures_of(result.all_runs)
    notes = [f"{kind} was left out: {reason}" for kind, reason in result.left_out.items()]
    notes += [f"{count} x {error}" for error, count in every.errors.items()]
    if every.shortened:
        notes.append(f"{every.shortened} prompts were shortened to the context of {result.server.context_tokens}")
    if every.cut:
        notes.append(f"{every.cut} answers were under way long after the end, so they were cut off")
    if (state := result.state) is None:
        notes.append("the server shows no /metrics, so what it still holds is unknown")
    elif state.gauges:
        shown, counted = (
            ", ".join(f"{name} {value:g}" for name, value in each.items()) for each in (state.gauges, state.counters)
        )
        holds = "holds nothing" if state.is_empty else "STILL HOLDS SOMETHING"
        notes += [f"the server {holds} afterwards ({shown})", f"the server counted {counted or 'nothing'}"]
    if state is not None:
        notes += [
            f"replica {name}: {', '.join(f'{what} {count:g}' for what, count in counts.items())}"
            for name, counts in state.replicas.items()
        ]
    if (busiest := max(share for run in result.all_runs for share in run.busy)) > BUSY:
        notes.append(
            f"THE GENERATOR MAY BE THE BOUND: the busiest of {len(result.all_runs[0].busy)} took {busiest:.2f} of a"
            f" core, over {BUSY:.0%}; give more --generators"
        )
    return "\n".join(
        [
            *([f"{result.server.name} ({result.server.dialect.name}'s names of fields):"] if several and notes else []),
            *(f"- {note}" for note in notes),
        ]
    )


def as_record(
    results: Sequence[ServerRuns],
    load: Mapping[str, Any],
    objectives: Objectives | None = None,
    *,
    requests: bool = True,
) -> dict[str, Any]:
    """Everything, for JSON: the load, the figures of each label, round and kind, and each request unless not wanted."""

    def load_record(runs: Sequence[LoadRun]) -> dict[str, Any]:
        rounds = [{**figures_of([run], None, objectives).as_record(), "generators": run.busy} for run in runs]
        return {
            "figures": figures_of(runs, None, objectives).as_record(),
            "rounds": rounds,
            "kinds": {kind: figures_of(runs, kind, objectives).as_record() for kind in _kinds(runs)},
            "requests": [_request_record(run, each) for run in runs for each in run.answers] if requests else None,
        }

    servers = [
        {
            "name": result.server.name,
            "dialect": result.server.dialect.name,
            "model": result.server.model,
            "context_tokens": result.server.context_tokens,
            "left_out": dict(result.left_out),
            "state": None if result.state is None else asdict(result.state),
            "loads": {label: load_record(runs) for label, runs in result.runs.items()},
        }
        for result in results
    ]
    return {"load": dict(load), "servers": servers}


def _request_record(run: LoadRun, answer: Answer) -> dict[str, Any]:
    """A request; its times are seconds after it was due."""
    return {
        "kind": answer.request.kind,
        "due_s": answer.due_s - run.start_s,
        "late_s": answer.sent_s - answer.due_s,
        "deltas_s": [round(float(delta_s) - answer.due_s, 6) for delta_s in answer.deltas_s],
        "end_s": answer.e2el_s,
        "prompt_length": answer.request.prompt_length,
        "max_tokens": answer.request.max_tokens,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "left": answer.left,
        "error": answer.error,
    }
