"""Limits that Linux control groups put on this process, as containers and service managers set them. Version 1 and 2.

A group's limit holds for all groups below it, so the least one from this process's group up to the root counts. Inside
of a container the root is often the container's own group, whatever path the process is given: both are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # bytes; version 1 writes the largest multiple of a page for no limit


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that a group's processes may use together, and those free; pages of files that the kernel gives up are."""

    limit_bytes: int
    free_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The narrowest limits of this process; None where there is none, or no Linux. `root` holds `proc` and `sys`."""
    found = []
    for folder in _folders(root, "memory"):
        for limit_name, usage_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit = _integer(folder / limit_name)
            if limit is None or limit >= _UNLIMITED:
                continue
            # Active ones too: a model's pages become active when it is loaded again, and are given up like the others.
            files = sum(_stat(folder / "memory.stat", prefix + name) for name in ("inactive_file", "active_file"))
            used = (_integer(folder / usage_name) or 0) - files
            found.append(MemoryLimit(limit, max(0, limit - max(0, used))))
    if not found:
        return None
    return MemoryLimit(min(each.limit_bytes for each in found), min(each.free_bytes for each in found))


def processor_quota(root: Path = Path("/")) -> float | None:
    """Processors whose time this process may use, such as 1.5; None where there is no quota, or no Linux."""
    found = []
    for folder in _folders(root, "cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's groups that a controller is in charge of, from its own up to the root."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        match = re.fullmatch(r"\d+:([^:]*):(/.*)", line)
        if match is None or (match[1] and controller not in match[1].split(",")):
            continue
        top = root / "sys/fs/cgroup"
        path = match[2].strip("/")
        names = [] if not path or ".." in path.split("/") else path.split("/")
        # Version 1 mounts a folder per controller, or one for several that some systems give no other name.
        for mount in [top] if not match[1] else sorted({top / controller, top / match[1]}):
            for depth in range(len(names) + 1):
                yield mount.joinpath(*names[:depth])


def _stat(path: Path, name: str) -> int:
    match = re.search(rf"^{name} (\d+)$", read_text(path), re.MULTILINE)
    return int(match[1]) if match else 0


def _integer(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.isdecimal() else None


def read_text(path: Path) -> str:
    """A file of the system without the blanks around it; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
