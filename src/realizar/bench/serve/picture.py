"""The latency picture of a load: the shares of first texts, gaps and answers by their times. Writes SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from realizar.bench.picture import SERIES, legend, line, svg, text
from realizar.bench.serve.client import Answer

_PANELS: tuple[tuple[str, Callable[[Answer], Iterable[float]]], ...] = (
    ("Until the first text", lambda answer: [answer.ttft_s] if len(answer.deltas_s) else []),
    ("Between texts", lambda answer: answer.gaps_s.tolist()),
    ("Until the whole answer", lambda answer: [answer.e2el_s]),
)
_WIDTH, _TOP, _PLOT_HEIGHT, _LEFT, _GAP = 960, 76, 220, 44, 60
_MARKED = (50, 90, 99)  # percent: drawn as dots, and written out below
_MAX_POINTS = 200
_MAX_TICKS = 6


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
