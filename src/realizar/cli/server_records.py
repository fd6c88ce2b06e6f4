"""Records of running servers, one file each, for `realizar ps`.

A server locks its file as long as it lives. `realizar ps` deletes files whose lock is free: their servers have ended.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from realizar.errors import HubError

ServerState: TypeAlias = Literal["loading", "ready", "draining"]

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 1 << 16
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A running server.

    Attributes:
        pid: of its main process. pid_namespace: the numbers' own space, as containers have; "" where it is unknown.
        models: names of its models. model_states: of several, in the same order; empty for a single one.
        started_s: Unix time.
        device: a description of the device, once a model is loaded; of several devices, with commas.
        device_bytes: memory of GPUs that models take, as planned where there are several; 0 on a CPU, whose memory is
            that of the processes.
        replica_states: of the replicas of a single model, in their order; empty without any.
    """

    pid: int
    pid_namespace: str
    url: str
    models: list[str]
    started_s: float
    state: ServerState = "loading"
    device: str = ""
    device_bytes: int = 0
    model_states: list[str] = field(default_factory=list)
    replica_states: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """A record from a file; None where it is malformed."""
        try:
            values = json.loads(text)
            found = cls(**{each.name: values[each.name] for each in fields(cls)})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        numbers = (found.pid, found.started_s, found.device_bytes)
        states = (found.state, *found.model_states, *found.replica_states)
        texts = (found.pid_namespace, found.url, found.device, *found.models, *states)
        fits = all(isinstance(number, int | float) for number in numbers) and all(isinstance(s, str) for s in texts)
        return found if fits else None


def pid_namespace() -> str:
    """The name of the space that this process's pids are of; "" where the system does not say."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def servers_folder() -> Path | None:
    from realizar.hub.folders import user_state

    try:
        return user_state() / "servers"
    except HubError:
        return None


class Announcement:
    """The record of this process's server, in a file that is locked until `close`; `folder` None writes none.

    A folder that can't be written costs the listing alone: the log says so once.
    """

    def __init__(self, folder: Path | None, record: ServerRecord) -> None:
        self._path = None if folder is None else folder / f"{secrets.token_hex(8)}{_SUFFIX}"
        self._record = record
        self._descriptor: int | None = None
        self.update()

    def update(self, **changes: Any) -> None:
        """Change fields of the record. The new file is locked before it takes the old one's name."""
        self._record = replace(self._record, **changes)
        if self._path is None or sys.platform == "win32":
            return
        import fcntl

        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(descriptor, json.dumps(asdict(self._record)).encode())
                partial.replace(self._path)
            except OSError:
                os.close(descriptor)
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            _LOG.warning("realizar ps does not list this server: %s: %s", self._path.parent, error.strerror or error)
            self.close()
            self._path = None
            return
        before, self._descriptor = self._descriptor, descriptor
        if before is not None:
            os.close(before)

    def close(self) -> None:
        """Delete the record. Idempotent."""
        if self._descriptor is not None and self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def announced(url: str, models: Sequence[str]) -> closing[Announcement]:
    """A context in which this process is listed as a server of these models, which begins to load them."""
    record = ServerRecord(os.getpid(), pid_namespace(), url, list(models), time.time())
    return closing(Announcement(servers_folder(), record))


def running_servers(folder: Path | None) -> list[ServerRecord]:
    """The records of servers that run, the oldest first. Files of servers that have ended are deleted."""
    if folder is None or sys.platform == "win32":
        return []
    found = [_read(path) for path in sorted(folder.glob(f"*{_SUFFIX}")) if not path.name.startswith(".")]
    return sorted((record for record in found if record is not None), key=lambda record: record.started_s)


def _read(path: Path) -> ServerRecord | None:
    """The record of a file; None where its server has ended, or where it is not a record."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ServerRecord.parse(os.read(descriptor, _MOST_BYTES))
    except OSError:
        return None
    else:
        with suppress(OSError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:  # no newer record took its name meanwhile
                path.unlink()
        return None
    finally:
        os.close(descriptor)
