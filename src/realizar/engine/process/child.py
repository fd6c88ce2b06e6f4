"""`EngineChild`: the parent's handle of one engine process, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from realizar.engine.process.messages import Command, Event, Failed, Ping, Pong, Ready, Shutdown, restore_error
from realizar.errors import EngineDeadError, RealizarError
from realizar.frames import FrameError, FrameReader, encode_frame

_LOG = logging.getLogger(__name__)
_LEVELS = logging.getLevelNamesMapping()
_LAST_WORDS_S = 0.5  # a dead process's status comes at once; a process that only closed its socket is not waited for


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


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of an engine.

    Attributes:
        error: the reason, from the engine's report or from its exit status.
        reported: True if the engine reported the reason.
        ready_s: seconds that the engine was ready; None if it never was.
    """

    error: RealizarError
    reported: bool
    ready_s: float | None


def is_stopped(process: asyncio.subprocess.Process | None) -> bool:
    """True if a signal has stopped a process (a debugger's stop does not count). Only Linux reports it."""
    if process is None:
        return False
    try:
        status = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[:1] == ["T"]


class EngineChild(asyncio.Protocol):
    """A process and the socket to it. `start`, `watch` until it ends, then `reap`.

    Args:
        label: begins its lines in the log.
    """

    def __init__(self, on_event: Callable[[Event], None], label: str = "engine") -> None:
        self._on_event, self._label = on_event, label
        self._reader: FrameReader[Event] = FrameReader(Event)
        self._ended: asyncio.Future[RealizarError | None] = asyncio.get_running_loop().create_future()
        self._reported = False
        self._ready_at_s: float | None = None
        self._heard = False
        self._missed_pings = 0
        self._step_s = 0.0
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str]) -> None:
        """Start the process; its last argument is the descriptor of its socket.

        A cancelled start is completed first, because half a process could be neither waited for nor closed.

        Raises:
            OSError: the process can't be started.
        """
        starting = asyncio.create_task(self._start(command))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait((starting,))
            starting.exception()  # retrieved, so that asyncio does not warn: nobody waits for this start any more
            raise

    async def _start(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
            # In a session of its own: a signal to the terminal's group is for the parent, which drains.
            self._process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._output = asyncio.create_task(self._log_output(self._process))

    def send(self, command: Command) -> None:
        """Pass a command on without waiting. Raises FrameError."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(command))

    async def watch(self, liveness: LivenessPolicy) -> ChildEnd:
        """Wait until the engine has ended or counts as dead."""
        pings = asyncio.create_task(self._ping(liveness))
        try:
            error = await asyncio.shield(self._ended)
        finally:
            pings.cancel()
        if error is None:
            error = EngineDeadError(await self._last_words())
        ready_s = None if self._ready_at_s is None else time.monotonic() - self._ready_at_s
        return ChildEnd(error, self._reported, ready_s)

    async def stop(self, timeout_s: float) -> None:
        """Ask the engine to shut down, and kill it after the timeout."""
        if self._process is not None:
            self.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        await self.reap()

    async def reap(self) -> None:
        """Kill the process if it still runs, and free its resources."""
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
        if self._output is not None:
            await asyncio.wait((self._output,), timeout=1)
            self._output.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop. Its socket transports can write, although some classes don't declare it."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with received bytes; handles their events in order."""
        if self._ended.done():
            return
        try:
            events = self._reader.feed(data)
        except FrameError as error:
            self._end(EngineDeadError(f"the engine sent {error}"))
            return
        if events:
            self._heard, self._missed_pings = True, 0
        for event in events:
            if isinstance(event, Pong):
                self._step_s = event.step_s
            elif isinstance(event, Failed):
                self._reported = True
                self._end(restore_error(event.error))
            else:
                if isinstance(event, Ready):
                    self._ready_at_s = time.monotonic()
                self._on_event(event)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop when the engine has closed its end, most likely by dying."""
        self._transport = None
        self._end(None)

    def _end(self, error: RealizarError | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    async def _ping(self, liveness: LivenessPolicy) -> None:
        """Send pings. Missed pings count, and seconds do not, because this process may have been delayed itself."""
        interval_s = liveness.ping_interval_s
        while True:
            most = liveness.max_missed_pings if self._heard else liveness.start_limit_s / interval_s
            if self._missed_pings >= most:
                self._end(EngineDeadError(f"the engine has not answered {self._missed_pings} pings in a row"))
            if self._missed_pings >= min(most, liveness.max_stopped_pings) and is_stopped(self._process):
                self._end(EngineDeadError("the engine's process is stopped"))
            if self._step_s > liveness.step_limit_s:
                self._end(EngineDeadError(f"a step of the engine has run for {self._step_s:.0f} s"))
            self._missed_pings += 1
            self.send(Ping())
            await asyncio.sleep(interval_s)

    async def _last_words(self) -> str:
        if self._process is None:
            return "the engine process was not started"
        try:
            status = await asyncio.wait_for(self._process.wait(), _LAST_WORDS_S)
        except TimeoutError:
            return "the engine process closed its connection"
        if status >= 0:
            return f"the engine process ended with status {status}"
        return f"the engine process was killed by {_signal_name(-status)}"

    async def _log_output(self, process: asyncio.subprocess.Process) -> None:
        """Log the output of the process and of its libraries."""
        if process.stdout is None:
            return
        rest = b""
        while data := await process.stdout.read(1 << 16):
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
