"""Functions for this folder's SVG pictures, with named colours that follow the viewer's light or dark mode."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

# Name: in light, in dark. Series have a contrast of 3 and more to the page in either.
_COLOURS = {
    "page": ("#ffffff", "#15171a"),
    "ink": ("#1f1e1b", "#e9e7e3"),
    "muted": ("#68645c", "#a19f9a"),
    "grid": ("#e5e1d8", "#31363c"),
    "first": ("#1f6b8f", "#6db8dc"),
    "second": ("#b06f14", "#e8b468"),
    "third": ("#6b7588", "#a3adbf"),
    "fourth": ("#4c7d33", "#93c572"),
    "pale": ("#a9c8dc", "#2f566b"),
}
SERIES = ("first", "second", "third", "fourth")


def _rules(dark: bool) -> str:
    return "".join(
        f".{name}{{fill:{colours[dark]}}}.line-{name}{{stroke:{colours[dark]};fill:none}}"
        for name, colours in _COLOURS.items()
    )


def svg(width: float, height: float, parts: Iterable[str]) -> str:
    """A picture of some size in pixels: parts over its page. Texts are in ink unless their class says otherwise."""
    style = f"text{{fill:{_COLOURS['ink'][0]}}}{_rules(False)}"
    dark = f"text{{fill:{_COLOURS['ink'][1]}}}{_rules(True)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"',
        ' font-family="system-ui, sans-serif" font-size="12">',
        f"<style>{style}@media (prefers-color-scheme: dark){{{dark}}}</style>",
        f'<rect class="page" width="{width:g}" height="{height:g}"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, kind: str = "") -> str:
    """A line of text, its base at `y`. `kind` is a colour's name, or `bold`."""
    bold = ' font-weight="bold"' if kind == "bold" else f' class="{kind}"' if kind else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{place}{bold}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, thickness: float = 1) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="line-{colour}" {place} stroke-width="{thickness:g}"/>'


def legend(x: float, y: float, names: Iterable[tuple[str, str]]) -> list[str]:
    parts = []
    for name, colour in names:
        parts += [bar(x, y, 12, 12, colour), text(x + 18, y + 10, name)]
        x += 42 + 6.6 * len(name)
    return parts
