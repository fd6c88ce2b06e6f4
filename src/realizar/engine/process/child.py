"""`EngineChild`: the handle of one engine process, from its start to its end; `ChildProcess` is what handles share."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from realizar.engine.process.begun import BegunEngine
from realizar.engine.process.messages import (
    Event,
    Failed,
    Load,
    Ping,
    Pong,
    Ready,
    Shutdown,
)
from realizar.errors import EngineDeadError, RealizarError
from realizar.ipc.error_records import restore_error
from realizar.ipc.frames import FrameError, FrameReader, encode_frame
from realizar.ipc.process_limits import end_of, start_process, state_of

_LOG = logging.getLogger(__name__)
_LEVELS = logging.getLevelNamesMapping()
_LAST_WORDS_S = 0.5  # a dead process's status comes at once; a process that only closed its socket is not waited for
_MAX_WAITING_BYTES = 512 << 20  # unread records: a process that lets more lie is not working any more
_Received = TypeVar("_Received")


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """The rules by which an engine counts as dead, and by which another one is started.

    Attributes:
        ping_interval_s: seconds between pings.
        max_missed_pings: unanswered pings in a row that are tolerated.
        max_stopped_pings: the same for a process that the system reports as stopped (SIGSTOP). A process in a long step
            answers pings.
        start_limit_s: seconds until the first sign of life.
        step_limit_s: longest step, in seconds.
        first_delay_s: delay before the second engine; it doubles for each later engine, up to `longest_delay_s`.
        steady_s: an engine that was ready for so long resets the count of crashes.
        max_crashes: crashes in a row without open requests, after which no other engine is started.
        file_poll_s: seconds between checks of the model's files while they keep an engine from starting.
        shutdown_s: seconds that an engine may take to shut down.
    """

    ping_interval_s: float = 1.0
    max_missed_pings: int = 30
    max_stopped_pings: int = 5
    start_limit_s: float = 120.0
    step_limit_s: float = 900.0
    first_delay_s: float = 0.25
    longest_delay_s: float = 30.0
    steady_s: float = 60.0
    max_crashes: int = 5
    file_poll_s: float = 1.0
    shutdown_s: float = 5.0


def growing_pause_s(number: int, first_s: float, longest_s: float) -> float:
    """Seconds before another try after `number` failed ones in a row, 1 or more: twice as long each time."""
    return min(first_s * 2.0 ** min(number - 1, 30), longest_s)


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of an engine.

    Attributes:
        error: the reason, from the engine's report (`reported`) or from its exit status.
        ready_s: seconds that the engine was ready; None if it never was.
    """

    error: RealizarError
    reported: bool
    ready_s: float | None


def is_stopped(process: subprocess.Popen[bytes] | None) -> bool:
    """True if a signal has stopped a process (a debugger's stop does not count). Only Linux reports it."""
    return process is not None and state_of(process.pid) == "T"


class ChildProcess(asyncio.Protocol, Generic[_Received]):
    """A process and the socket to it, as the base of a handle. `start` it, `wait_end`, then `reap`."""

    def __init__(self, received_type: Any, liveness: LivenessPolicy) -> None:
        self._reader: FrameReader[_Received] = FrameReader(received_type)
        self._liveness = liveness
        self._fault: str | None = None
        self._ended = asyncio.Event()
        self._is_started = self._heard = False
        self._missed_pings = 0
        self._step_s = 0.0
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._status: asyncio.Future[int] | None = None  # of its exit

    @property
    def pid(self) -> int:
        """0 before it is started."""
        return 0 if self._process is None else self._process.pid

    async def _run(
        self, command: Sequence[str], first: Any, handed: Sequence[socket.socket] = (), output: int | None = None
    ) -> None:
        """Start the process, and send it a first record; its last arguments are the descriptors of its sockets.

        It raises OSError if the process can't be started.

        Args:
            handed: sockets of its own, beside that of the records.
            output: as of `start_process`.
        """
        process, ours = start_process(command, *(each.fileno() for each in handed), output=output)
        await self._look_after(process, ours, first)

    async def _look_after(self, process: subprocess.Popen[bytes], ours: socket.socket, first: Any = None) -> None:
        """Wait for a process that runs, and for what it sends; send it a first record, if it has none yet.

        A cancelled call is completed first, because half a process could be neither waited for nor closed.
        """
        loop = asyncio.get_running_loop()
        self._process, self._status = process, loop.create_future()
        waiting = (process, loop, self._status)
        threading.Thread(target=_wait_for, args=waiting, name=f"wait-{process.pid}", daemon=True).start()
        ours.setblocking(False)
        connecting = asyncio.create_task(self._connect(ours, first))
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            await asyncio.wait((connecting,))
            connecting.exception()  # retrieved, so that asyncio does not warn: nobody waits for it any more
            raise

    async def _connect(self, ours: socket.socket, first: Any) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self._is_started = True
        if first is not None:
            self.send(first)  # before anything that others send

    def send(self, record: Any) -> None:
        """Pass a record on without waiting; it is lost if the process is gone, or before `start` is done.

        It raises FrameError if the record is too large.
        """
        if not self._is_started or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode_frame(record))
        if self._transport.get_write_buffer_size() > _MAX_WAITING_BYTES:
            _LOG.error("process %d reads nothing and is ended", self.pid)
            self._transport.abort()

    async def wait_end(self) -> str:
        """Wait until the process has ended or counts as dead; returns how, as words that follow its name."""
        pings = asyncio.create_task(self._ping())
        try:
            await self._ended.wait()
        finally:
            pings.cancel()
        return self._fault or await self._last_words()

    async def reap(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None and self._status is not None:
            if not self._status.done():
                self._process.kill()
            await asyncio.shield(self._status)

    def take(self, record: _Received) -> None:
        """Called with each record but answers to pings."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Its socket transports can write, although some classes don't declare it."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if self._ended.is_set():
            return
        try:
            records = self._reader.feed(data)
        except FrameError as error:
            self._end(f"sent {error}")
            return
        if records:
            self._heard, self._missed_pings = True, 0
        for record in records:
            if isinstance(record, Pong):
                self._step_s = record.step_s
            else:
                self.take(record)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end(None)

    def _end(self, fault: str | None) -> None:
        if not self._ended.is_set():
            self._fault = fault
            self._ended.set()

    async def _ping(self) -> None:
        """Send pings. Missed pings count, and seconds do not, because this process may have been delayed itself."""
        rules = self._liveness
        while True:
            most = rules.max_missed_pings if self._heard else rules.start_limit_s / rules.ping_interval_s
            if self._missed_pings >= most:
                self._end(f"answered none of {self._missed_pings} pings")
            elif self._missed_pings >= rules.max_stopped_pings and is_stopped(self._process):
                self._end("was stopped")
            elif self._step_s > rules.step_limit_s:
                self._end(f"has run one step for {self._step_s:.0f} s")
            self._missed_pings += 1
            self.send(Ping())
            await asyncio.sleep(rules.ping_interval_s)

    async def _last_words(self) -> str:
        if self._status is None:
            return "was not started"
        try:
            status = await asyncio.wait_for(asyncio.shield(self._status), _LAST_WORDS_S)
        except TimeoutError:
            return "closed its connection"
        return end_of(status)


def _wait_for(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, status: asyncio.Future[int]) -> None:
    """Give a loop the status of a process that has ended: a loop's own processes can't have been started before it."""
    found = process.wait()
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_give, status, found)


def _give(status: asyncio.Future[int], found: int) -> None:
    if not status.done():
        status.set_result(found)


class EngineChild(ChildProcess[Event]):
    """An engine's process. `label` begins its lines in the log."""

    def __init__(self, on_event: Callable[[Event], None], liveness: LivenessPolicy, label: str = "engine") -> None:
        super().__init__(Event, liveness)
        self._on_event, self._label = on_event, label
        self._error: RealizarError | None = None
        self._ready_at_s: float | None = None
        self._output: asyncio.Task[None] | None = None
        self._pipe: asyncio.ReadTransport | None = None

    async def start(self, command: Sequence[str], load: Load) -> None:
        await self._run(command, load, output=subprocess.PIPE)

    async def take_over(self, begun: BegunEngine) -> None:
        """Go on with a process that was begun, and has its load."""
        await self._look_after(*begun.take())

    async def _connect(self, ours: socket.socket, first: Any) -> None:
        assert self._process is not None
        output = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(output)
        self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._process.stdout)
        self._output = asyncio.create_task(self._log_output(output))
        await super()._connect(ours, first)

    async def watch(self) -> ChildEnd:
        how = await self.wait_end()
        ready_s = None if self._ready_at_s is None else time.monotonic() - self._ready_at_s
        error = self._error or EngineDeadError(f"the engine process {how}")
        return ChildEnd(error, self._error is not None, ready_s)

    async def stop(self, timeout_s: float) -> None:
        if self._status is not None:
            self.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._status), timeout_s)
        await self.reap()

    async def reap(self) -> None:
        await super().reap()
        if self._output is not None:
            await asyncio.wait((self._output,), timeout=1)
            self._output.cancel()
        if self._pipe is not None:
            self._pipe.close()

    def take(self, record: Event) -> None:
        if self._ended.is_set():
            return
        if isinstance(record, Failed):
            self._error = restore_error(record.error)
            self._end("failed")
            return
        if isinstance(record, Ready):
            self._ready_at_s = time.monotonic()
        self._on_event(record)

    async def _log_output(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while data := await output.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > 1 << 16:
                lines, rest = [*lines, rest], b""
            for line in lines:
                _log_line(self._label, line)
        if rest:
            _log_line(self._label, rest)


def _log_line(label: str, line: bytes) -> None:
    """Log a line of an engine's output at its own level; other lines are warnings of libraries."""
    text = line.decode(errors="replace").rstrip()
    first, _, rest = text.partition(" ")
    level = _LEVELS.get(first)
    if level is None:
        _LOG.warning("%s: %s", label, text)
    else:
        _LOG.log(level, "%s: %s", label, rest)
