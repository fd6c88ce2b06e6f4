"""Two loads beside each other, by their rounds: how far apart they are, and whether rounds are farther apart than that.

The ratio is that of the rounds' geometric means, its interval Welch's at 95 % for the difference of the means of the
logarithms: of rounds of one and the same server, one comparison in twenty lies outside.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realizar.errors import InvalidRequestError

# Of each figure that is compared, whether more of it is better.
_COMPARED: Mapping[str, bool] = {
    "request_throughput": True,
    "output_throughput": True,
    "total_token_throughput": True,
    "request_goodput": True,
    **{f"{which}_{name}_ms": False for name in ("ttft", "tpot", "itl", "e2el") for which in ("median", "p99")},
}
# Student's t that 95 % of values lie within, by the degrees of freedom from 1 to 30.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.960

Rounds = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times a figure is that of another load: the second over the first.

    `low` and `high` bound the noise around it; they are None where a load has a single round.
    """

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Ratio:
        """The ratio of positive values, one a round."""
        logs = [[math.log(value) for value in values] for values in (first, second)]
        between = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
        if min(len(first), len(second)) < 2:
            return cls(math.exp(between), None, None)
        errors = [statistics.variance(each) / len(each) for each in logs]
        terms = [error**2 / (len(each) - 1) for error, each in zip(errors, logs, strict=True)]
        freedom = int(sum(errors) ** 2 / sum(terms) + 1e-9) if sum(terms) else 1
        t = _T[freedom - 1] if freedom <= len(_T) else _NORMAL
        around = t * math.sqrt(sum(errors))
        return cls(*(math.exp(between + shift) for shift in (0.0, -around, around)))

    def verdict(self, *, more_is_better: bool) -> str:
        if self.low is None or self.high is None:
            return "unknown: one round"
        if self.low <= 1 <= self.high:
            return "within the noise"
        return "better" if (self.value > 1) == more_is_better else "worse"


def compare_rounds(names: tuple[str, str], first: Rounds, second: Rounds) -> list[str]:
    """A table of the figures of two loads, the second's over the first's."""
    lines = [f"| | {names[0]} | {names[1]} | {names[1]} / {names[0]} | {names[1]} is |", "|---|---:|---:|---:|---|"]
    for name, more_is_better in _COMPARED.items():
        values = [[value for each in rounds if (value := each.get(name))] for rounds in (first, second)]
        if all(values):
            ratio = Ratio.of(*values)
            shown = f"{ratio.value:.3f}" + ("" if ratio.low is None else f" ({ratio.low:.3f} to {ratio.high:.3f})")
            verdict = ratio.verdict(more_is_better=more_is_better)
            lines.append(f"| {name} | {_spread(values[0])} | {_spread(values[1])} | {shown} | {verdict} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):,.5g}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.5g} to {max(values):,.5g})"


def compare_saved(first: Path, second: Path) -> str:
    """The loads of two files that `bench-serve --json` wrote: those of one label, server by server.

    It raises InvalidRequestError if a file is none of these, or they have no load in common.
    """
    records = [_read(path) for path in (first, second)]
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    tables = []
    for one, other in zip(*(record["servers"] for record in records), strict=False):
        for label in (label for label in one["loads"] if label in other["loads"]):
            title = (
                f"{one['name']}, {label}"
                if one["name"] == other["name"]
                else f"{one['name']}, {other['name']}, {label}"
            )
            rounds = (server["loads"][label]["rounds"] for server in (one, other))
            tables.append("\n".join([title, "", *compare_rounds(names, *rounds)]))
    if not tables:
        raise InvalidRequestError(f"{first} and {second} have no load in common", "compare")
    loads = [record["load"] for record in records]
    differing = sorted(name for name in {*loads[0], *loads[1]} if loads[0].get(name) != loads[1].get(name))
    notes = [f"- the loads differ in {name}: {loads[0].get(name)} and {loads[1].get(name)}" for name in differing]
    return "\n\n".join([*tables, *(["\n".join(notes)] if notes else [])])


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for server in record["servers"]:
            for load in server["loads"].values():
                dict(load["rounds"][0])
        return {"servers": record["servers"], "load": dict(record["load"])}
    except (ValueError, TypeError, LookupError, AttributeError):
        raise InvalidRequestError(f"{path} is not a file of bench-serve --json", "compare") from None
