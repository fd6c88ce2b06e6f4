"""`Pulls`: models that clients fetch from the network, one after another, where the server's operator allows it.

`fetch_in_process` fetches a model in a process of its own, which ends with the request for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec

from realizar.engine.frontend.places import Places
from realizar.engine.frontend.tasks import Changes, Tasks
from realizar.errors import HubError, QueueFullError, RealizarError, UnknownModelError
from realizar.hub.pull_process import COMMAND
from realizar.request import Client
from realizar.server.models.names import shutting_down

_LOG = logging.getLogger(__name__)
MOST_PULLS = 8
"""Pulls that run or wait, over all clients, who share these places."""
_LONGEST_LINE = 1 << 20
_END_S = 5.0
"""Seconds for a process that is given up to end by itself."""


@dataclass(frozen=True, slots=True)
class PullEvent:
    """A part of a pull's progress, `status` in words.

    `digest` is of the file that is meant, with its kind in front, such as `sha256:`; `total` and `completed` are bytes.
    """

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


Report: TypeAlias = Callable[[PullEvent], None]


Fetch: TypeAlias = Callable[[str, Report], Awaitable[Path]]
"""Fetches a model of a name; when it is cancelled nothing of it goes on. Raises HubError: it can't be fetched."""


class _Pull:
    """A pull that runs or waits. Only the last event of each file is kept, so that slow readers cost nothing."""

    def __init__(self) -> None:
        self.num_followers = 0
        self.changed = Changes()
        self.task: asyncio.Task[None]
        self._events: dict[str, tuple[int, PullEvent]] = {}
        self._number = 0

    def report(self, event: PullEvent) -> None:
        self._number += 1
        self._events[event.digest or event.status] = self._number, event
        self.changed.note()

    def since(self, number: int) -> list[tuple[int, PullEvent]]:
        return sorted((each for each in self._events.values() if each[0] > number), key=lambda each: each[0])


class _Turns:
    """Lets one pull go on at a time: of the clients who wait, that of the one whose last turn is longest ago."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._numbers = itertools.count(1)
        self._last: dict[str, int] = {}  # the number of a client's last turn
        self._taken = False

    @asynccontextmanager
    async def of(self, client: str) -> AsyncGenerator[None]:
        if self._taken:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((client, waiter))
            try:
                await waiter
            except asyncio.CancelledError:
                if (client, waiter) in self._waiting:
                    self._waiting.remove((client, waiter))
                else:
                    self._pass_on()
                raise
        self._taken = True
        self._last[client] = next(self._numbers)
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._taken = bool(self._waiting)
        if not self._waiting:
            self._last.clear()
            return
        chosen = min(self._waiting, key=lambda each: self._last.get(each[0], 0))
        self._waiting.remove(chosen)
        chosen[1].set_result(None)


class Pulls:
    """Pulls by name. Those who ask for one name share a pull, which is given up when the last of them has gone.

    `add` has the server serve what `fetch` has fetched.
    """

    def __init__(self, fetch: Fetch, add: Callable[[str, Path], Awaitable[None]]) -> None:
        self._fetch, self._add = fetch, add
        self._turns, self._places = _Turns(), Places()
        self._pulls: dict[str, _Pull] = {}
        self._tasks = Tasks()
        self._closed = False

    async def events(self, name: str, client: Client) -> AsyncGenerator[PullEvent]:
        """Pull a model for a client, which is served at the end.

        QueueFullError: too many pulls wait, and the client has its share. EngineUnavailableError: the server shuts
        down. HubError: the model can't be fetched or served.
        """
        pull = self._pulls.get(name) or self._begin(name, client)
        pull.num_followers += 1
        shown = 0
        try:
            while True:
                changed, ended = pull.changed.next, pull.task.done()
                for number, event in pull.since(shown):
                    shown = number
                    yield event
                if ended:
                    break
                await changed.wait()
            if pull.task.cancelled():
                raise shutting_down()
            pull.task.result()
        finally:
            pull.num_followers -= 1
            if not pull.num_followers and not pull.task.done():
                self._pulls.pop(name, None)
                pull.task.cancel()

    async def close(self) -> None:
        self._closed = True
        await self._tasks.cancel()

    def _begin(self, name: str, client: Client) -> _Pull:
        if self._closed:
            raise shutting_down()
        if not self._places.has_room(client, 1, MOST_PULLS):
            raise QueueFullError(f"{MOST_PULLS} pulls run or wait already; try again later", 30.0)
        pull = self._pulls[name] = _Pull()
        pull.task = self._tasks.start(self._run(name, pull, client))
        self._places.take(client)

        def ended(task: asyncio.Task[None]) -> None:
            self._places.give(client)
            if self._pulls.get(name) is pull:
                del self._pulls[name]
            if not task.cancelled():
                task.exception()  # followers raise it; one that has gone does not
            pull.changed.note()

        pull.task.add_done_callback(ended)
        return pull

    async def _run(self, name: str, pull: _Pull, client: Client) -> None:
        pull.report(PullEvent("pulling manifest"))
        async with self._turns.of(client.name):
            _LOG.info("%s: being pulled for a client", name)
            try:
                path = await self._fetch(name, pull.report)
                pull.report(PullEvent("writing manifest"))
                await self._serve(name, path)
            except asyncio.CancelledError:
                _LOG.info("%s: not pulled: nobody waits for it any more", name)
                raise
            except Exception as error:
                _LOG.warning("%s: not pulled: %s", name, error)
                raise
        _LOG.info("%s: pulled", name)

    async def _serve(self, name: str, path: Path) -> None:
        try:
            await self._add(name, path)
        except RealizarError as error:
            raise HubError(f"{name} was pulled, and can't be served: {error}") from error


async def fetch_in_process(name: str, report: Report, mmproj: str = "auto") -> Path:
    """See `Fetch`. The files lie where `realizar pull` has them, with an encoder of images where `mmproj` is `auto`.

    UnknownModelError: no model has the name.
    """
    process = await asyncio.create_subprocess_exec(
        *COMMAND, name, mmproj, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, limit=_LONGEST_LINE
    )
    try:
        return await _read(name, cast("asyncio.StreamReader", process.stdout), report)
    finally:
        if process.returncode is None:
            await _end(process)


async def _read(name: str, lines: asyncio.StreamReader, report: Report) -> Path:
    files: dict[str, dict[str, Any]] = {}
    async for line in lines:
        record = msgspec.json.decode(line)
        if "path" in record:
            return Path(record["path"])
        if "unknown" in record:
            raise UnknownModelError(record["unknown"])
        if "error" in record:
            raise HubError(record["error"])
        if "files" in record:
            files = {file["label"]: file for file in record["files"]}
        elif (file := files.get(record["label"])) is not None:
            report(_event(file, record["done"]))
    raise HubError(f"{name}: the process that pulled it has ended")


def _event(file: dict[str, Any], done: int) -> PullEvent:
    digest, size = file["digest"], file["size_bytes"]
    if digest is None:
        return PullEvent(f"pulling {file['label']}")
    return PullEvent(f"pulling {digest.partition(':')[2][:12]}", digest, size, done)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
