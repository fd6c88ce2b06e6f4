"""The bandwidth picture: bytes of weights read per second in decode, by program, under the read limit. Writes SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from realizar.bench.peers import IK, IK_REPACKED, LLAMACPP, OURS, Row

_COLOURS = {LLAMACPP: "#8d99ae", IK: "#e0a458", OURS: "#2a6f97"}
_WIDTH, _LEFT, _TOP, _PLOT_HEIGHT, _BOTTOM = 760, 60, 64, 260, 70


def roofline_svg(rows: Sequence[Row], title: str) -> str:
    """One group of bars per model and number of threads; a dark line over each group is its read limit.

    A model that the last-level cache holds may stand above the line.
    """
    bars = [_bars(row) for row in rows]
    top = max([row.limit_gb_per_s for row in rows] + [value for group in bars for value in group.values()], default=1.0)
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if top / s <= 8), 1000)
    ceiling = step * (int(top / step) + 1)
    height = _TOP + _PLOT_HEIGHT + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_legend(),
        *(_grid_line(value, ceiling) for value in range(0, ceiling + 1, step)),
    ]
    group_width = (_WIDTH - _LEFT - 20) / max(len(rows), 1)
    for index, (row, values) in enumerate(zip(rows, bars, strict=True)):
        parts += _group(row, values, _LEFT + index * group_width, group_width, ceiling)
    return "\n".join([*parts, "</svg>", ""])


def _bars(row: Row) -> dict[str, float]:
    """GB/s by program; ik_llama.cpp's better variant stands for both."""
    values = {name: row.achieved_gb_per_s(name) for name in (LLAMACPP, IK, IK_REPACKED, OURS)}
    best = max((value for name in (IK, IK_REPACKED) if (value := values[name]) is not None), default=None)
    chosen = {LLAMACPP: values[LLAMACPP], IK: best, OURS: values[OURS]}
    return {name: value for name, value in chosen.items() if value is not None}


def _y(value: float, ceiling: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - value / ceiling)


def _legend() -> list[str]:
    parts = []
    for index, (name, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 130 * index
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="42">{escape(name)}</text>')
    x = _LEFT + 130 * len(_COLOURS)
    parts.append(f'<line x1="{x}" x2="{x + 24}" y1="38" y2="38" stroke="#1b1b1b" stroke-width="2"/>')
    parts.append(f'<text x="{x + 30}" y="42">read limit</text>')
    return parts


def _grid_line(value: int, ceiling: float) -> str:
    y = _y(value, ceiling)
    line = f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
    return (
        f'{line}<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}{" GB/s" if value == 0 else ""}</text>'
    )


def _group(row: Row, values: dict[str, float], left: float, width: float, ceiling: float) -> list[str]:
    parts = []
    bar = width * 0.8 / max(len(_COLOURS), 1)
    base = _y(0, ceiling)
    for index, (name, colour) in enumerate(_COLOURS.items()):
        if name in values:
            x, y = left + width * 0.1 + index * bar, _y(values[name], ceiling)
            shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.9:.1f}" height="{base - y:.1f}" fill="{colour}"/>'
            middle, number = x + bar * 0.45, f"{values[name]:.1f}"
            label = f'<text x="{middle:.1f}" y="{y - 3:.1f}" text-anchor="middle" font-size="9">{number}</text>'
            parts += [shape, label]
    y = _y(row.limit_gb_per_s, ceiling)
    x1, x2 = left + width * 0.06, left + width * 0.94
    parts.append(f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#1b1b1b" stroke-width="2"/>')
    middle = left + width / 2
    parts.append(f'<text x="{middle:.1f}" y="{base + 18:.1f}" text-anchor="middle">{escape(row.model)}</text>')
    threads = f"{row.threads} thread{'s' if row.threads > 1 else ''}"
    parts.append(f'<text x="{middle:.1f}" y="{base + 34:.1f}" text-anchor="middle" fill="#555555">{threads}</text>')
    return parts
