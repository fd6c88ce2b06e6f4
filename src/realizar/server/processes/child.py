"""`ApiProcess`: the main process's handle of one API process, from its start to its end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from realizar.engine.clients.questions import Questions
from realizar.engine.process.child import ChildProcess, LivenessPolicy
from realizar.server.processes.messages import FromProcess, Start, Started

_LATE_PINGS = 3  # unanswered ones after which other processes get the connections


class ApiProcess(ChildProcess[FromProcess]):
    """A process with two sockets: one for messages, and one that hands connections over.

    Attributes:
        takes_connections: it has said that it is ready for them (`has_started`), and lives.
        num_connections: handed over, and not known to be closed. max_connections: its share.
    """

    def __init__(
        self, on_message: Callable[[ApiProcess, FromProcess], None], liveness: LivenessPolicy | None = None
    ) -> None:
        super().__init__(FromProcess, liveness or LivenessPolicy())
        self._on_message = on_message
        self.asked = Questions(self.send)
        self._handing: socket.socket | None = None
        self.has_started = self.takes_connections = False
        self.num_connections = self.max_connections = 0

    async def start(self, command: Sequence[str], start: Start) -> None:
        self.max_connections = start.settings.max_connections
        self._handing, its_handing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._handing.setblocking(False)
        with its_handing:
            await self._run(command, start, (its_handing,))

    @property
    def is_late(self) -> bool:
        """True if it has answered nothing for a while: it may hang."""
        return self._missed_pings > _LATE_PINGS

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

    async def reap(self) -> None:
        self.takes_connections = False
        if self._handing is not None:
            self._handing.close()
            self._handing = None
        await super().reap()

    def take(self, record: FromProcess) -> None:
        if isinstance(record, Started):
            self.takes_connections = self.has_started = True
        self._on_message(self, record)

    def _end(self, fault: str | None) -> None:
        self.takes_connections = False
        super()._end(fault)
