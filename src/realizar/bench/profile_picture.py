"""The picture of a step: a bar per part, its dark end what memory alone would take. Writes SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape

from realizar.bench.profile import PartProfile, StepProfile

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 760, 110, 200, 64, 24
_BAR, _BOUND = "#a9c8dc", "#2a6f97"


def profile_svg(profile: StepProfile, title: str) -> str:
    """Parts in the order of a step, milliseconds from left to right."""
    longest = max((part.ms for part in profile.parts), default=0.0) or 1.0
    height = _TOP + _ROW * len(profile.parts) + 36
    coverage = profile.sum_ms / profile.wall_ms
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<rect x="12" y="34" width="12" height="12" fill="{_BAR}"/><text x="30" y="44">time in a step</text>',
        f'<rect x="130" y="34" width="12" height="12" fill="{_BOUND}"/>',
        f'<text x="148" y="44">reading its bytes at {profile.limit_gb_per_s:.0f} GB/s</text>',
    ]
    for index, part in enumerate(profile.parts):
        parts += _bar(part, _TOP + _ROW * index, (_WIDTH - _LEFT - _RIGHT) / longest, profile.limit_gb_per_s)
    summary = f"the parts take {profile.sum_ms:.3f} ms, {coverage:.0%} of a step's {profile.wall_ms:.3f} ms"
    parts.append(f'<text x="12" y="{height - 12}" fill="#555555">{escape(summary)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(part: PartProfile, top: float, scale: float, limit_gb_per_s: float) -> list[str]:
    width = part.ms * scale
    bound = min(width, part.bytes_read / limit_gb_per_s / 1e6 * scale)
    label = f"{part.ms:.3f} ms, {part.share_of_step:.0%}"
    if part.bytes_read:
        label += f"; {part.share_of_limit:.0%} of limit"
    return [
        f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(part.part)}</text>',
        f'<rect x="{_LEFT}" y="{top + 3}" width="{width:.1f}" height="16" fill="{_BAR}"/>',
        f'<rect x="{_LEFT}" y="{top + 3}" width="{bound:.1f}" height="16" fill="{_BOUND}"/>',
        f'<text x="{_LEFT + width + 6:.1f}" y="{top + 15}">{escape(label)}</text>',
    ]
