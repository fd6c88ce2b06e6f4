"""The report of loads: a table, the servers beside each other, and what was left out, failed, or was left over.

`latency_svg` draws the shares of first texts, gaps and answers by their times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from realizar.bench.picture import SERIES, legend, line, svg, text
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

_PANELS: tuple[tuple[str, Callable[[Answer], Iterable[float]]], ...] = (
    ("Until the first text", lambda answer: [answer.ttft_s] if len(answer.deltas_s) else []),
    ("Between texts", lambda answer: answer.gaps_s.tolist()),
    ("Until the whole answer", lambda answer: [answer.e2el_s]),
)
_WIDTH, _TOP, _PLOT_HEIGHT, _LEFT, _GAP = 960, 76, 220, 44, 60
_MARKED = (50, 90, 99)  # percent: drawn as dots, and written out below
_MAX_POINTS = 200
_MAX_TICKS = 6


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


def latency_svg(loads: Sequence[tuple[str, Iterable[Answer]]], title: str) -> str:
    """Three panels with a curve of the whole answers of each load, by its name, and its median, p90 and p99 below.

    Time in milliseconds is on a logarithmic axis that begins and ends where the curves do; percent of all go upwards.
    """
    width = (_WIDTH - _LEFT - 20 - _GAP * (len(_PANELS) - 1)) / len(_PANELS)
    names = [(name, _colour(index)) for index, (name, _) in enumerate(loads)]
    whole = [[each for each in answers if each.is_whole] for _, answers in loads]
    parts = [text(_LEFT, 20, title, size=14, kind="bold"), *legend(_LEFT, 32, names)]
    for index, (label, values_of) in enumerate(_PANELS):
        values = [sorted(1000 * value for each in answers for value in values_of(each)) for answers in whole]
        parts += _panel(label, values, _LEFT + index * (width + _GAP), width)
    return svg(_WIDTH, _TOP + _PLOT_HEIGHT + 56 + 16 * len(loads), parts)


def _colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def _panel(label: str, curves: Sequence[Sequence[float]], left: float, width: float) -> list[str]:
    everything = [value for curve in curves for value in curve if value > 0]
    low, high = _bounds(min(everything, default=1.0), max(everything, default=10.0))
    parts = [text(left, _TOP - 10, label, kind="bold")]
    for share in (0, 25, 50, 75, 90, 100):
        y = _y(share)
        parts += [line(left, y, left + width, y, "grid"), text(left - 6, y + 4, str(share), anchor="end", size=10)]
    for tick in _ticks(low, high):
        x = _x(tick, low, high, left, width)
        parts.append(line(x, _TOP, x, _y(0), "grid"))
        parts.append(text(x, _y(0) + 16, f"{tick:g}", anchor="middle", size=10))
    parts.append(text(left + width, _y(0) + 30, "ms", anchor="end", kind="muted", size=10))
    for index, curve in enumerate(curves):
        if curve:
            parts += _curve(curve, _colour(index), lambda value: _x(value, low, high, left, width))
        parts.append(text(left, _y(0) + 48 + 16 * index, _figures(curve), size=11, kind=_colour(index)))
    return parts


def _curve(ordered: Sequence[float], colour: str, x_of: Callable[[float], float]) -> list[str]:
    points = " ".join(f"{x_of(value):.1f},{_y(share):.1f}" for share, value in _thinned(ordered))
    dots = [
        f'<circle class="{colour}" cx="{x_of(_reached(ordered, share)):.1f}" cy="{_y(share):.1f}" r="3.5"/>'
        for share in _MARKED
    ]
    return [
        f'<polyline class="line-{colour}" points="{points}" stroke-width="2" stroke-linejoin="round"/>',
        *dots,
    ]


def _figures(ordered: Sequence[float]) -> str:
    if not ordered:
        return "no answers"
    figures = (f"{'median' if share == 50 else f'p{share}'} {_reached(ordered, share):.3g}" for share in _MARKED)
    return " · ".join(figures) + " ms"


def _reached(ordered: Sequence[float], share: float) -> float:
    """The least value that this percent of all do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def _bounds(least: float, most: float) -> tuple[float, float]:
    """Round numbers (1, 2 or 5 times a power of ten) around all values."""
    low = max(tick for tick in _round_numbers(least) if tick <= least * (1 + 1e-9))
    high = min(tick for tick in _round_numbers(most) if tick >= most * (1 - 1e-9))
    return (low, high) if high > low else (low, low * 10)


def _round_numbers(near: float) -> list[float]:
    power = math.floor(math.log10(near))
    return [round(digit * 10.0**exponent, 12) for exponent in range(power - 1, power + 2) for digit in (1, 2, 5)]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from one to the other; powers of ten alone where they would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [tick for power in powers for digit in digits if low <= (tick := digit * 10.0**power) * (1 + 1e-9)]
        ticks = [tick for tick in ticks if tick <= high * (1 + 1e-9)]
        if len(ticks) <= _MAX_TICKS:
            return ticks
    return ticks


def _thinned(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """The percentage of values up to a value, and that value, at no more than `_MAX_POINTS` + 1 places."""
    count = len(ordered)
    places = (
        range(count) if count <= _MAX_POINTS else [round(i * (count - 1) / _MAX_POINTS) for i in range(_MAX_POINTS + 1)]
    )
    return [(0.0, ordered[0]), *((100 * (place + 1) / count, ordered[place]) for place in places)]


def _x(value: float, low: float, high: float, left: float, width: float) -> float:
    return left + width * math.log(max(value, low) / low) / math.log(high / low)


def _y(share: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - share / 100)
