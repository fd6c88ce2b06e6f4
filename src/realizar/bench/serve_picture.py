"""The latency picture of a load: what share of first texts, gaps and answers came within what time. Writes SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from realizar.bench.serve_client import Answered
from realizar.bench.serve_run import LoadRun

_COLOURS = ("#2a6f97", "#e0a458", "#8d99ae", "#6a994e")
_PANELS: tuple[tuple[str, Callable[[Answered], list[float]]], ...] = (
    ("Until the first text", lambda answered: [answered.ttft_s]),
    ("Between texts", lambda answered: answered.gaps_s),
    ("Until the whole answer", lambda answered: [answered.e2e_s]),
)
_WIDTH, _HEIGHT, _TOP, _BOTTOM, _LEFT, _GAP = 960, 340, 76, 44, 44, 60
_MAX_POINTS = 200


def latency_svg(runs: Sequence[LoadRun], title: str) -> str:
    """Three panels with a curve for each run; time in milliseconds on a logarithmic axis, percent of all upwards."""
    width = (_WIDTH - _LEFT - 20 - _GAP * (len(_PANELS) - 1)) / len(_PANELS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for index, run in enumerate(runs):
        x = _LEFT + 190 * index
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{x + 18}" y="42">{escape(run.target.name)}</text>')
    for index, (label, values_of) in enumerate(_PANELS):
        values = [sorted(1000 * value for each in run.good for value in values_of(each)) for run in runs]
        parts += _panel(label, values, _LEFT + index * (width + _GAP), width)
    return "\n".join([*parts, "</svg>", ""])


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _panel(label: str, curves: Sequence[Sequence[float]], left: float, width: float) -> list[str]:
    everything = [value for curve in curves for value in curve if value > 0]
    low = 10.0 ** math.floor(math.log10(min(everything, default=1.0)))
    high = 10.0 ** math.ceil(math.log10(max(everything, default=10.0)))
    high = max(high, low * 10)
    parts = [f'<text x="{left:.1f}" y="{_TOP - 10}" font-weight="bold">{escape(label)}</text>']
    for share in (0, 50, 90, 99, 100):
        y = _y(share)
        parts.append(f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        if share != 99:
            parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end" font-size="10">{share}</text>')
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x = _x(10.0**power, low, high, left, width)
        base = _y(0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{base:.1f}" stroke="#f0f0f0"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{base + 16:.1f}" text-anchor="middle" font-size="10">{10.0**power:g}</text>'
        )
    middle = left + width / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 8}" text-anchor="middle" fill="#555555">ms</text>')
    for index, curve in enumerate(curves):
        if curve:
            points = " ".join(
                f"{_x(value, low, high, left, width):.1f},{_y(share):.1f}" for share, value in _thinned(curve)
            )
            line = f'<polyline points="{points}" fill="none" stroke="{_colour(index)}" stroke-width="2"'
            parts.append(f'{line} stroke-linejoin="round"/>')
    return parts


def _thinned(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """Percent of all, and the value that so many reach, at no more than some hundred places."""
    count = len(ordered)
    places = (
        range(count) if count <= _MAX_POINTS else [round(i * (count - 1) / _MAX_POINTS) for i in range(_MAX_POINTS + 1)]
    )
    return [(0.0, ordered[0]), *((100 * (place + 1) / count, ordered[place]) for place in places)]


def _x(value: float, low: float, high: float, left: float, width: float) -> float:
    return left + width * math.log(max(value, low) / low) / math.log(high / low)


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share / 100)
