"""The picture of a step: a bar per part, its dark end what reading its bytes alone would take. Writes SVG."""

from __future__ import annotations

from realizar.bench.picture import bar, legend, svg, text
from realizar.bench.profile import PartProfile, StepProfile, coverage, limit_label, limit_line

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 760, 110, 200, 64, 24


def profile_svg(profile: StepProfile, title: str) -> str:
    """Parts in the order of a step and the rest of it, milliseconds from left to right."""
    longest = max(profile.rest_ms, *(part.ms for part in profile.parts)) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    below = _TOP + _ROW * len(profile.parts)
    parts = [
        text(12, 20, title, size=14, kind="bold"),
        *legend(12, 34, [("time in a step", "pale"), ("reading its bytes at the limit", "first")]),
    ]
    for index, part in enumerate(profile.parts):
        parts += _part(part, _TOP + _ROW * index, scale, profile.limit_gb_per_s)
    rest = f"{profile.rest_ms:.3f} ms, {profile.rest_ms / profile.wall_ms:.0%}"
    parts += _labelled("rest", rest, below, profile.rest_ms * scale, "grid")
    parts.append(text(12, below + _ROW + 20, coverage(profile), kind="muted", size=11))
    parts.append(text(12, below + _ROW + 36, f"limit: {limit_line(profile)}", kind="muted", size=11))
    return svg(_WIDTH, below + _ROW + 50, parts)


def _part(part: PartProfile, top: float, scale: float, limit_gb_per_s: float) -> list[str]:
    width = part.ms * scale
    bound = min(width, part.bytes_read / limit_gb_per_s / 1e6 * scale)
    label = f"{part.ms:.3f} ms, {part.share_of_step:.0%}"
    if part.bytes_read:
        share = limit_label(part.share_of_limit)
        label += f"; {share} of limit" if share.endswith("%") else f"; {share}"
    return [*_labelled(part.part, label, top, width, "pale"), bar(_LEFT, top + 3, bound, 16, "first")]


def _labelled(name: str, label: str, top: float, width: float, colour: str) -> list[str]:
    return [
        text(_LEFT - 8, top + 15, name, anchor="end"),
        bar(_LEFT, top + 3, width, 16, colour),
        text(_LEFT + width + 6, top + 15, label),
    ]
