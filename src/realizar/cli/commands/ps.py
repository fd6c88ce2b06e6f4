"""`realizar ps` lists the running servers of this user."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from realizar.cli.options.arguments import Json
from realizar.cli.server_records import ServerRecord, pid_namespace, running_servers, servers_folder
from realizar.cli.terminal.printable import printable
from realizar.sizes import format_bytes

_TITLES = ("pid", "model", "address", "state", "device", "memory", "running")
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def ps_command(*, as_json: Json = False) -> None:
    """List your running servers: model, address, state, memory of all its processes, and how long it has run."""
    here, now_s = pid_namespace(), time.time()
    servers = running_servers(servers_folder())
    if as_json:
        print(json.dumps({"servers": [_record(server, here, now_s) for server in servers]}))
        return
    if not servers:
        print("no server of yours is running", file=sys.stderr)
        return
    rows = [_TITLES, *(_row(server, here, now_s) for server in servers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _memory(server: ServerRecord, here: str) -> int | None:
    """None for a server of another container, whose pid is another process's here."""
    return tree_bytes(server.pid) if server.pid_namespace == here else None


def _record(server: ServerRecord, here: str, now_s: float) -> dict[str, object]:
    record = asdict(server)
    del record["pid_namespace"]
    return {**record, "memory_bytes": _memory(server, here), "running_s": max(now_s - server.started_s, 0.0)}


def _row(server: ServerRecord, here: str, now_s: float) -> tuple[str, ...]:
    memory = _memory(server, here)
    device = server.device or "-"
    if server.device_bytes:
        device += f", {format_bytes(server.device_bytes)} there"
    cells = (
        str(server.pid),
        ", ".join(_named(server)) or "-",
        server.url,
        server.state + _replicas(server.replica_states),
        device,
        "unknown" if memory is None else format_bytes(memory),
        _duration(max(now_s - server.started_s, 0.0)),
    )
    return tuple(map(printable, cells))


def _named(server: ServerRecord) -> list[str]:
    """The names of a server's models, of several each with its state."""
    if len(server.model_states) != len(server.models):
        return server.models
    states = ("not loaded" if state == "known" else state for state in server.model_states)
    return [f"{name} ({state})" for name, state in zip(server.models, states, strict=True)]


def _replicas(states: Sequence[str]) -> str:
    counts = Counter(states)
    return f" (replicas: {', '.join(f'{count} {state}' for state, count in counts.items())})" if counts else ""


def _duration(seconds: float) -> str:
    for place, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            rest, smaller = (_UNITS[place + 1]) if place + 1 < len(_UNITS) else (1, "s")
            return f"{int(seconds // size)} {unit} {int(seconds % size // rest)} {smaller}"
    return f"{int(seconds)} s"


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
