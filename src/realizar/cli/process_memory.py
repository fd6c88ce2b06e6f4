"""The memory of a process and its descendants, from /proc. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path

_PROC = Path("/proc")
_PROPORTIONAL = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


def tree_bytes(pid: int) -> int | None:
    """Bytes of a process and all below it; pages that several share count once. None where the system does not say."""
    sizes = [size for each in _tree(pid) if (size := _process_bytes(each)) is not None]
    return sum(sizes) if sizes else None


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        fields = _text(folder / "stat").rpartition(")")[2].split()
        if len(fields) > 1:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += (child for child in children.get(each, ()) if child not in found)
    return found


def _process_bytes(pid: int) -> int | None:
    """Its proportional share of the pages that it maps, or, where that can't be read, all that are resident."""
    for name, pattern in (("smaps_rollup", _PROPORTIONAL), ("status", _RESIDENT)):
        match = pattern.search(_text(_PROC / str(pid) / name))
        if match:
            return int(match.group(1)) * 1024
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
