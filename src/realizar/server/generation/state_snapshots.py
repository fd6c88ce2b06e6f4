"""`StateSnapshots`: what a request did with snapshots of states, for its usage and its line in the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from realizar.engine.process.messages import EngineInfo
from realizar.outputs import SnapshotUse
from realizar.server.http.request import note


class StateSnapshots(msgspec.Struct):
    """An extension of every dialect's usage: as `SnapshotUse` has them, of all prompts and choices of a request."""

    taken: int
    restored: int
    fetched: int
    dropped: int


def state_snapshots(info: EngineInfo, use: SnapshotUse) -> StateSnapshots | UnsetType:
    """The snapshots that a request used by now; unset for a model that keeps none.

    `info` is of the engine as the request began, since it may be gone when the answer ends.
    """
    return StateSnapshots(**asdict(use)) if info.capacity.num_snapshots else UNSET


def note_snapshots(request: Request, info: EngineInfo, uses: Iterable[SnapshotUse]) -> StateSnapshots | UnsetType:
    """Note the snapshots that the prompts of an ended request used; returns them for its usage."""
    used = SnapshotUse.total(uses)
    note(request, **snapshot_notes(used))
    return state_snapshots(info, used)


def snapshot_notes(use: SnapshotUse) -> dict[str, int]:
    """The snapshots that a request used by now, for its line in the log: those kinds of which there were any."""
    return {f"snapshots_{name}": count for name, count in asdict(use).items() if count}
