"""The bandwidth picture: bytes of weights read per second in decode, by program, under the read limit. Writes SVG."""

from __future__ import annotations

from collections.abc import Sequence

from peers.compare import IK, IK_REPACKED, LLAMACPP, OURS, Row
from realizar.bench.picture import bar, legend, line, svg, text

_COLOURS = {LLAMACPP: "third", IK: "second", OURS: "first"}
_WIDTH, _LEFT, _TOP, _PLOT_HEIGHT, _BOTTOM = 760, 60, 64, 260, 50
_LABEL = 9  # height of a number over its bar


def roofline_svg(rows: Sequence[Row], title: str) -> str:
    """One group of bars per model and number of threads; a line over each group is its read limit.

    A model that the last-level cache holds may stand above the line.
    """
    bars = [_bars(row) for row in rows]
    top = max([row.limit_gb_per_s for row in rows] + [value for group in bars for value in group.values()], default=1.0)
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if top / s <= 8), 1000)
    ceiling = step * (int(top / step) + 1)
    x = _LEFT + sum(42 + 6.6 * len(name) for name in _COLOURS)
    parts = [
        text(_LEFT, 20, title, size=14, kind="bold"),
        *legend(_LEFT, 32, _COLOURS.items()),
        line(x, 38, x + 24, 38, "ink", 2),
        text(x + 30, 42, "read limit"),
        *(part for value in range(0, ceiling + 1, step) for part in _grid_line(value, ceiling)),
    ]
    group_width = (_WIDTH - _LEFT - 20) / max(len(rows), 1)
    for index, (row, values) in enumerate(zip(rows, bars, strict=True)):
        parts += _group(row, values, _LEFT + index * group_width, group_width, ceiling)
    return svg(_WIDTH, _TOP + _PLOT_HEIGHT + _BOTTOM, parts)


def _bars(row: Row) -> dict[str, float]:
    """GB/s by program; ik_llama.cpp's better variant stands for both."""
    values = {name: row.achieved_gb_per_s(name) for name in (LLAMACPP, IK, IK_REPACKED, OURS)}
    best = max((value for name in (IK, IK_REPACKED) if (value := values[name]) is not None), default=None)
    chosen = {LLAMACPP: values[LLAMACPP], IK: best, OURS: values[OURS]}
    return {name: value for name, value in chosen.items() if value is not None}


def _y(value: float, ceiling: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - value / ceiling)


def _grid_line(value: int, ceiling: float) -> list[str]:
    y = _y(value, ceiling)
    label = f"{value}{' GB/s' if value == 0 else ''}"
    return [line(_LEFT, y, _WIDTH - 20, y, "grid"), text(_LEFT - 8, y + 4, label, anchor="end")]


def _group(row: Row, values: dict[str, float], left: float, width: float, ceiling: float) -> list[str]:
    parts = []
    pitch, base, limit = width * 0.8 / len(_COLOURS), _y(0, ceiling), _y(row.limit_gb_per_s, ceiling)
    for index, (name, colour) in enumerate(_COLOURS.items()):
        if name in values:
            x, y = left + width * 0.1 + index * pitch, _y(values[name], ceiling)
            middle = x + pitch * 0.45
            parts.append(bar(x, y, pitch * 0.9, base - y, colour))
            parts.append(text(middle, _label_y(y, limit), f"{values[name]:.1f}", anchor="middle", size=10))
    parts.append(line(left + width * 0.06, limit, left + width * 0.94, limit, "ink", 2))
    middle = left + width / 2
    threads = f"{row.threads} thread{'s' if row.threads > 1 else ''}"
    parts.append(text(middle, base + 18, row.model, anchor="middle"))
    parts.append(text(middle, base + 34, threads, anchor="middle", kind="muted"))
    return parts


def _label_y(bar_y: float, limit_y: float) -> float:
    """The base of the number over a bar: where the limit's line would go through it, over that line."""
    base = bar_y - 4
    return limit_y - 5 if base - _LABEL - 2 < limit_y < base + 4 else base
