"""`ServerHandle`: the engine process's handle of the fork server."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from realizar.structured.workers.bell import NO_BELL
from realizar.structured.workers.channel import Channel, ChannelError
from realizar.structured.workers.messages import (
    Done,
    Fork,
    Forked,
    FromServer,
    FromWorker,
    Reap,
    Reaped,
    Refused,
    Vocabulary,
)

SERVER_COMMAND = (sys.executable, "-m", "realizar.structured.workers.fork_server")
_START_LIMIT_S = 120.0  # for reading the vocabulary, which takes 2 s for 256,000 tokens on an idle machine
_ANSWER_LIMIT_S = 5.0  # to fork, or to wait for a killed process: milliseconds; a step of the engine may wait meanwhile


class ServerError(Exception):
    """The fork server can't be started, or can't fork; one line. `lasting`: another try would fail in the same way."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


class ServerHandle:
    """Starts a fork server and sends it commands, the first of which is `read`. Thread-safe.

    Args:
        masks_descriptor: descriptor of the shared memory for masks.
        bell: descriptor of the bell that wakes the grammars' processes, or NO_BELL.
        command: the command to start; the descriptors of its socket, of the masks and of the bell are appended.

    Raises:
        ServerError: the server can't be started.
    """

    def __init__(self, masks_descriptor: int, bell: int, command: Sequence[str] = SERVER_COMMAND) -> None:
        self._lock = threading.Lock()
        ours, theirs = _pair()
        self._channel: Channel[FromServer] = Channel(ours, FromServer)
        shared = [masks_descriptor, *([bell] if bell != NO_BELL else [])]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(masks_descriptor), str(bell)],
                    pass_fds=(theirs.fileno(), *shared),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # keeps the terminal's signals away from it
                )
            except OSError as error:
                self._channel.close()
                raise ServerError(f"its process can't be started: {error.strerror}") from error
        self.alive = True

    def read(self, vocabulary: Vocabulary) -> None:
        """Have the server read the vocabulary, and wait for that. The server is closed where it fails.

        Raises:
            ServerError: it refuses the vocabulary, or has ended.
        """
        try:
            answer = self._ask(vocabulary, _START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Refused):
            self.close()
            raise ServerError(answer.reason, lasting=True)

    def fork(self) -> tuple[int, Channel[FromWorker]]:
        """Start a grammar's process; returns its pid, which stays valid until `reap`, and the channel to it.

        Raises:
            ServerError: no process can be forked, or the server has died; `alive` says which.
        """
        ours, theirs = _pair()
        channel: Channel[FromWorker] = Channel(ours, FromWorker)
        try:
            with theirs, self._lock:
                answer = self._exchange(Fork(), _ANSWER_LIMIT_S, theirs.fileno())
        except ServerError:
            channel.close()
            raise
        if not isinstance(answer, Forked):
            channel.close()
            raise ServerError(answer.reason if isinstance(answer, Refused) else "its server started no process")
        return answer.pid, channel

    def reap(self, pid: int) -> int | None:
        """Get the exit status of a process that was killed or has closed its channel; None if the server is gone."""
        with suppress(ServerError):
            answer = self._ask(Reap(pid), _ANSWER_LIMIT_S)
            if isinstance(answer, Reaped):
                return answer.status
        return None

    def kill(self) -> None:
        """End the server without waiting; whoever waits for its answer gets ServerError."""
        self._process.kill()

    def close(self) -> None:
        """End the server and all its processes; idempotent."""
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _ask(self, command: Vocabulary | Reap, timeout_s: float) -> FromServer:
        with self._lock:
            return self._exchange(command, timeout_s)

    def _exchange(
        self, command: Vocabulary | Fork | Reap, timeout_s: float, descriptor: int | None = None
    ) -> FromServer:
        if not self.alive:
            raise ServerError("its process has ended")
        try:
            self._channel.send(command, timeout_s)
            if descriptor is not None:
                self._channel.send_descriptor(descriptor)
            answer = self._channel.receive(timeout_s)
        except ChannelError as error:
            self.alive = False
            raise ServerError(f"its process failed: {error}") from error
        if not isinstance(answer, Done | Refused | Forked | Reaped):
            raise ServerError("its process sent an unexpected answer")
        return answer


def _pair() -> tuple[socket.socket, socket.socket]:
    """Make a pair of connected sockets. Raises ServerError."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise ServerError(f"there are no sockets for its process: {error.strerror}") from error
