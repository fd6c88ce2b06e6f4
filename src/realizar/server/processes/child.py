"""`ApiProcess`: the main process's handle of one API process, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from realizar.engine.clients.questions import Questions
from realizar.engine.process.child import LivenessPolicy, is_stopped
from realizar.engine.process.messages import Ping, Pong
from realizar.frames import FrameError, FrameReader, encode_frame
from realizar.server.processes.messages import FromProcess, Start, Started, ToProcess

_LOG = logging.getLogger(__name__)
_LAST_WORDS_S = 0.5
_LATE_PINGS = 3  # unanswered ones after which other processes get the connections
_MAX_WAITING_BYTES = 256 << 20  # unread messages: a process that lets more lie is not working any more


class ApiProcess(asyncio.Protocol):
    """A process with two sockets: one for messages, and one that hands connections over.

    Args:
        on_message: called with everything it sends.
        liveness: rules of pings, by which it counts as dead.

    Attributes:
        takes_connections: it has said that it is ready for them, and lives. has_started: it has said so.
        asked: what it was asked for.
        num_connections: handed over, and not known to be closed. max_connections: its share.
    """

    def __init__(
        self, on_message: Callable[[ApiProcess, FromProcess], None], liveness: LivenessPolicy | None = None
    ) -> None:
        self._on_message, self._liveness = on_message, liveness or LivenessPolicy()
        self.asked = Questions(self.send)
        self._missed_pings = 0
        self._fault: str | None = None
        self._reader: FrameReader[FromProcess] = FrameReader(FromProcess)
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._handing: socket.socket | None = None
        self._ended = asyncio.Event()
        self._knows_start = False
        self.takes_connections = self.has_started = False
        self.num_connections = self.max_connections = 0

    async def start(self, command: Sequence[str], start: Start) -> None:
        """Start the process; its last two arguments are the descriptors of its sockets.

        Raises:
            OSError: the process can't be started.
        """
        self.max_connections = start.settings.max_connections
        messages, its_messages = socket.socketpair()
        self._handing, its_handing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._handing.setblocking(False)
        messages.setblocking(False)
        with its_messages, its_handing:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=messages)
            descriptors = its_messages.fileno(), its_handing.fileno()
            # In a session of its own: a signal to the terminal's group is for the main process, which drains.
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._knows_start = True
        self.send(start)

    @property
    def pid(self) -> int:
        """The id of the process; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_late(self) -> bool:
        """True if it has answered nothing for a while: it may hang."""
        return self._missed_pings > _LATE_PINGS

    def send(self, message: ToProcess) -> None:
        """Pass a message on without waiting; it is lost if the process is gone, or before `start` is done.

        Raises:
            FrameError: the message is too large.
        """
        if not self._knows_start or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode_frame(message))
        if self._transport.get_write_buffer_size() > _MAX_WAITING_BYTES:
            _LOG.error("API process %d reads nothing and is ended", self.pid)
            self._transport.abort()

    def hand_over(self, connection: socket.socket) -> bool:
        """Hand a connection over; False if the process has too many that it has not looked at."""
        if self._handing is None:
            return False
        try:
            socket.send_fds(self._handing, [b"c"], [connection.fileno()])
        except OSError:
            return False
        self.num_connections += 1
        return True

    async def wait_end(self) -> str:
        """Wait until the process ends or hangs, or its socket closes, and free its resources; returns how it ended."""
        process = self._process
        if process is not None:
            ended, exited = asyncio.create_task(self._ended.wait()), asyncio.create_task(process.wait())
            pings = asyncio.create_task(self._ping())
            try:
                await asyncio.wait((ended, exited), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait((exited,), timeout=_LAST_WORDS_S)  # its status comes a moment after its socket's end
            finally:
                pings.cancel()
                ended.cancel()
                exited.cancel()
        await self.kill()
        if self._fault is not None:
            return self._fault
        if process is None or process.returncode is None:
            return "was not started"
        status = process.returncode
        return f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"

    async def kill(self) -> None:
        """Kill the process if it still runs, and free its resources."""
        self.takes_connections = False
        if self._transport is not None:
            self._transport.abort()
        if self._handing is not None:
            self._handing.close()
            self._handing = None
        if self._process is not None:
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with received bytes."""
        try:
            messages = self._reader.feed(data)
        except FrameError as error:
            _LOG.error("API process %d sent %s", self.pid, error)
            self._end()
            return
        if messages:
            self._missed_pings = 0
        for message in messages:
            if isinstance(message, Started):
                self.takes_connections = self.has_started = True
            if not isinstance(message, Pong):
                self._on_message(self, message)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop when the process has closed its end, most likely by dying."""
        self._transport = None
        self._end()

    async def _ping(self) -> None:
        """Send pings. Missed pings count, and seconds do not, because this process may have been delayed itself."""
        rules = self._liveness
        while True:
            most = rules.max_missed_pings if self.has_started else rules.start_limit_s / rules.ping_interval_s
            if self._missed_pings >= min(most, rules.max_stopped_pings) and is_stopped(self._process):
                self._fault = "was stopped"
            elif self._missed_pings >= most:
                self._fault = f"answered none of {self._missed_pings} pings"
            if self._fault is not None:
                self._end()
                return
            self._missed_pings += 1
            self.send(Ping())
            await asyncio.sleep(rules.ping_interval_s)

    def _end(self) -> None:
        self.takes_connections = False
        self._ended.set()
