"""`realizar ps` lists the running servers of this user."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from realizar.cli.options.arguments import Json
from realizar.cli.process_memory import tree_bytes
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
    """How many replicas are in each state, in brackets; empty without replicas."""
    counts = Counter(states)
    return f" (replicas: {', '.join(f'{count} {state}' for state, count in counts.items())})" if counts else ""


def _duration(seconds: float) -> str:
    """A time in its two largest units."""
    for place, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            rest, smaller = (_UNITS[place + 1]) if place + 1 < len(_UNITS) else (1, "s")
            return f"{int(seconds // size)} {unit} {int(seconds % size // rest)} {smaller}"
    return f"{int(seconds)} s"
