"""`run_server` runs the main process: it opens the port, starts the engine, drains on a signal, and shuts down.

Connections are served here, or in API processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import uvicorn
from starlette.applications import Starlette

from realizar.backends.load_progress import LoadProgress
from realizar.engine.process.messages import Loading
from realizar.errors import RealizarError
from realizar.server.http.listen import uvicorn_config
from realizar.server.http.memory_return import keep_little_memory
from realizar.server.settings import ServerSettings

SWITCH_INTERVAL_S = 0.0005
"""Seconds that a worker thread keeps the interpreter from the event loop, which asks for it after every write."""
LAST_ANSWERS_S = 10
"""Seconds for complete answers to be sent, once no request is open."""
_POLL_S = 0.1


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers; `StopSignals` handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Served(Protocol):
    """The engine of a server's one model, or its several models.

    Attributes:
        loading: the stage and the progress of loading, until it is ready.
        num_open: requests that have not ended.
    """

    @property
    def loading(self) -> Loading | None: ...

    @property
    def num_open(self) -> int: ...

    async def start(self) -> None:
        """Start; returns before it is ready."""

    async def wait_ready(self) -> object:
        """Wait until requests are accepted; RealizarError, as of `wait_dead`, where they never will be."""

    async def wait_dead(self) -> RealizarError:
        """Wait until requests will never be accepted again, and return the reason."""

    async def drain(self) -> None:
        """Refuse new requests and wait for the open ones."""

    async def close(self, *, at_once: bool = False) -> None:
        """End all engines; `at_once` waits for no step. Idempotent."""


class Front(Protocol):
    """A server that takes connections and answers requests."""

    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Makes the event loop; None for asyncio's own."""

    async def serve(self, listener: socket.socket) -> None:
        """Serve until `stop`."""

    def drain(self) -> None:
        """Called once, when the engine refuses new requests from now on."""

    def stop(self, *, at_once: bool) -> None:
        """Have `serve` end, when the last answers are sent or at once."""


class OwnFront:
    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        self._config = uvicorn_config(app, settings, timeout_graceful_shutdown=LAST_ANSWERS_S)
        self._server = QuietServer(self._config)

    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        return self._config.get_loop_factory()

    async def serve(self, listener: socket.socket) -> None:
        await self._server.serve(sockets=[listener])

    def drain(self) -> None:
        """See `Front`. The application sees the engine's state."""

    def stop(self, *, at_once: bool) -> None:
        self._server.should_exit = True
        self._server.force_exit |= at_once


def open_port(host: str, port: int) -> socket.socket:
    """Open a listening socket, before the slow parts of the start; port 0 takes a free one. RealizarError: it can't."""
    if not 0 <= port <= 65535:  # the resolver would take the port modulo 65536
        raise RealizarError(f"--port must be between 0 and 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RealizarError(f"the server can't listen on {host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise RealizarError(f"the server can't listen on {host} port {port}: {error.strerror}") from error
    return listener


def run_server(
    front: Front,
    served: Served,
    listener: socket.socket,
    *,
    loading: LoadProgress,
    ready: Callable[[], None],
    draining: Callable[[int], None],
    hang_up: Callable[[], None] | None = None,
) -> int:
    """Serve until a signal. The exit status is 0 after draining, or 128 plus the number of a second signal.

    Args:
        served: not started yet; closed at the end.
        loading: callback for the progress of loading. ready: callback when requests are accepted.
        draining: callback with the number of open requests.
        hang_up: callback for SIGHUP; None leaves that signal alone.

    Raises:
        RealizarError: the engine could not load, or is gone for good.
    """
    keep_little_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=front.loop_factory()) as runner:
        return runner.run(_serve(front, served, listener, loading, ready, draining, hang_up))


async def _serve(
    front: Front,
    served: Served,
    listener: socket.socket,
    loading: LoadProgress,
    ready: Callable[[], None],
    draining: Callable[[int], None],
    hang_up: Callable[[], None] | None,
) -> int:
    serving = asyncio.create_task(front.serve(listener))
    dead = asyncio.create_task(served.wait_dead())
    announcing = asyncio.create_task(_announce(served, loading, ready))
    with StopSignals(hang_up) as signals:
        try:
            await served.start()
            await asyncio.wait((serving, dead, signals.first), return_when=asyncio.FIRST_COMPLETED)
            if signals.first.done():
                draining(served.num_open)
                front.drain()
                drained = asyncio.create_task(served.drain())
                await asyncio.wait((drained, dead, signals.second), return_when=asyncio.FIRST_COMPLETED)
                drained.cancel()
            error = dead.result() if dead.done() else None
            front.stop(at_once=False)
            if not signals.second.done():
                await asyncio.wait((serving, signals.second), return_when=asyncio.FIRST_COMPLETED)
        finally:
            announcing.cancel()
            dead.cancel()
            front.stop(at_once=True)
            await served.close(at_once=signals.second.done())
            await serving
    if error is not None:
        raise error
    return 128 + signals.second.result() if signals.second.done() else 0


async def _announce(served: Served, loading: LoadProgress, ready: Callable[[], None]) -> None:
    waiting: asyncio.Future[object] = asyncio.ensure_future(served.wait_ready())
    waiting.add_done_callback(lambda task: task.cancelled() or task.exception())  # `wait_dead` reports the error
    while not (await asyncio.wait((waiting,), timeout=_POLL_S))[0]:
        if served.loading is not None:
            loading(served.loading.what, served.loading.share)
    if waiting.exception() is None:
        ready()


class StopSignals:
    """SIGTERM and SIGINT as futures: the first signal drains the server, the second stops it at once.

    `hang_up` is called at SIGHUP; None leaves that signal alone. The SIGHUP of a terminal that is closed is no wish of
    anyone: it drains the server, as it would end any program, and means nothing to one that `nohup` started.
    """

    def __init__(self, hang_up: Callable[[], None] | None) -> None:
        self._loop, self._hang_up = asyncio.get_running_loop(), hang_up
        self.first: asyncio.Future[int] = self._loop.create_future()
        self.second: asyncio.Future[int] = self._loop.create_future()
        self._had_terminal = _has_terminal()
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note, int(number))
        if self._hang_up is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._take_hang_up, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
        if self._hang_up is not None:
            self._loop.remove_signal_handler(signal.SIGHUP)

    def _take_hang_up(self, hang_up: Callable[[], None]) -> None:
        if not self._had_terminal or _has_terminal():
            hang_up()
            return
        self._had_terminal = False
        if not self._outlives_terminal:
            self._note(int(signal.SIGHUP))

    def _note(self, number: int) -> None:
        waiting = self.second if self.first.done() else self.first
        if not waiting.done():
            waiting.set_result(number)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
