"""`EngineChild`: one engine process as its parent sees it, from its start to its last breath."""

from __future__ import annotations

import asyncio
import itertools
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
from realizar.engine.process.transport import FrameError, FrameReader, encode_frame
from realizar.errors import EngineDeadError, RealizarError

_LOG = logging.getLogger(__name__)
_LEVELS = logging.getLevelNamesMapping()
_LAST_WORDS_S = 0.5  # a dead process's status comes at once; one that only closed its socket is not waited for


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """When an engine counts as dead, and how often another one is tried.

    Attributes:
        ping_interval_s: between questions whether it lives.
        max_missed_pings: questions in a row that may stay open.
        max_stopped_pings: the same, of a process that the system says is stopped, as by SIGSTOP: a long step answers.
        start_limit_s: time to give the first sign of life in.
        step_limit_s: longest step.
        first_delay_s: before a second engine; doubled for each one after it, up to `longest_delay_s`.
        steady_s: an engine that was ready for so long starts the count of crashes anew.
        max_crashes: crashes in a row, while no request was open, after which no other engine is started.
        file_poll_s: between looks at the model's files while they are why none can be started.
        shutdown_s: time to end in when told to.
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
    """How an engine ended.

    Attributes:
        error: why, as the engine said or as its exit status tells.
        reported: whether the engine said so itself.
        ready_s: how long it was ready; None if it never was.
    """

    error: RealizarError
    reported: bool
    ready_s: float | None


class EngineChild(asyncio.Protocol):
    """A process and the socket to it. `start`, `watch` until it ends, then `reap`."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._reader: FrameReader[Event] = FrameReader(Event)
        self._ended: asyncio.Future[RealizarError | None] = asyncio.get_running_loop().create_future()
        self._reported = False
        self._ready_at_s: float | None = None
        self._tickets = itertools.count()
        self._heard = False
        self._missed_pings = 0
        self._step_s = 0.0
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str]) -> None:
        """Start the process; its last argument is the descriptor of its socket.

        A start that is cancelled is finished first: half a process could be neither waited for nor closed.

        Raises:
            OSError: it can't be started.
        """
        starting = asyncio.create_task(self._start(command))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait((starting,))
            starting.exception()  # seen: nobody waits for this start any more
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
        """Pass a command on; never waits. Raises FrameError."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(command))

    async def watch(self, liveness: LivenessPolicy) -> ChildEnd:
        """Wait until the engine has ended, or is to be taken for dead."""
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
        """Tell the engine to end, and see that it does."""
        if self._process is not None:
            self.send(Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        await self.reap()

    async def reap(self) -> None:
        """Kill the process if it still runs, and leave nothing of it behind."""
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
        """For the event loop; its socket transports write, whether or not they say so by their class."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """For the event loop: events, in order."""
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
        """For the event loop: the engine has closed its end, most likely by dying."""
        self._transport = None
        self._end(None)

    def _end(self, error: RealizarError | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    async def _ping(self, liveness: LivenessPolicy) -> None:
        """Missed questions are counted, and not the time: this process may itself have been held up."""
        interval_s = liveness.ping_interval_s
        while True:
            most = liveness.max_missed_pings if self._heard else liveness.start_limit_s / interval_s
            if self._missed_pings >= most:
                self._end(EngineDeadError(f"the engine has not answered {self._missed_pings} questions in a row"))
            if self._missed_pings >= min(most, liveness.max_stopped_pings) and self._is_stopped():
                self._end(EngineDeadError("the engine's process is stopped"))
            if self._step_s > liveness.step_limit_s:
                self._end(EngineDeadError(f"a step of the engine has run for {self._step_s:.0f} s"))
            self._missed_pings += 1
            self.send(Ping(next(self._tickets)))
            await asyncio.sleep(interval_s)

    def _is_stopped(self) -> bool:
        """Whether a signal has stopped the process; not by a debugger, who means to go on. Known on Linux alone."""
        if self._process is None:
            return False
        try:
            status = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return status.rpartition(")")[2].split()[:1] == ["T"]

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
        """Pass on what the process and the libraries in it print."""
        if process.stdout is None:
            return
        rest = b""
        while data := await process.stdout.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > 1 << 16:
                lines, rest = [*lines, rest], b""
            for line in lines:
                _log_line(line)
        if rest:
            _log_line(rest)


def _log_line(line: bytes) -> None:
    """Log what an engine said, at the level that it says; what a library prints is a warning."""
    text = line.decode(errors="replace").rstrip()
    first, _, rest = text.partition(" ")
    level = _LEVELS.get(first)
    if level is None:
        _LOG.warning("engine: %s", text)
    else:
        _LOG.log(level, "engine: %s", rest)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
