"""`ServerHandle`: the engine process's handle of the fork server; `Child`: what is known of a worker's process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from realizar.frames import Channel, ChannelError
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
_ANSWER_LIMIT_S = 5.0  # to fork, or to wait for a killed process: milliseconds


class ServerError(Exception):
    """The fork server can't be started, or can't fork; one line. `lasting`: another try would fail in the same way."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


@dataclass(eq=False, slots=True)
class Child:
    """A worker's process, as far as the fork server has told of it.

    Attributes:
        pid: valid until it is reaped; None before it is known.
        refusal: the reason why it was not started.
        is_killed: True once it is to end. is_over: True once it has ended, or is to, and is to be reaped.
        is_reaped: True once the server was told so. status: its exit status, or the negative number of a signal.
    """

    pid: int | None = None
    refusal: str | None = None
    is_killed: bool = False
    is_over: bool = False
    is_reaped: bool = False
    status: int | None = None


class ServerHandle:
    """Starts a fork server and sends it commands, the first of which is `read`. Thread-safe.

    Only `read` and `close` wait: what the server answers to others is taken in by `take_answers`.

    Attributes:
        alive: False once it has ended, or has not answered in time; its children have ended then, or do so now.

    Args:
        masks_descriptor: descriptor of the shared memory for masks.
        command: the command to start; the descriptors of its socket and of the masks are appended.

    Raises:
        ServerError: the server can't be started.
    """

    def __init__(self, masks_descriptor: int, command: Sequence[str] = SERVER_COMMAND) -> None:
        self._lock = threading.Lock()
        ours, theirs = _pair()
        self._channel: Channel[FromServer] = Channel(ours, FromServer)
        self._asked: deque[tuple[Child, float]] = deque()  # children of commands without an answer, and since when
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(masks_descriptor)],
                    pass_fds=(theirs.fileno(), masks_descriptor),
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
            self._channel.send(vocabulary, _START_LIMIT_S)
            answer = self._channel.receive(_START_LIMIT_S)
        except BaseException as error:
            self.close()
            if isinstance(error, ChannelError):
                raise ServerError(f"its process failed: {error}") from error
            raise
        if not isinstance(answer, Done):
            self.close()
            raise ServerError(answer.reason if isinstance(answer, Refused) else "an unexpected answer", lasting=True)

    def fork(self, place: int, memory_bytes: int) -> tuple[Child, Channel[FromWorker]]:
        """Start a worker, without waiting for it; returns its process and the channel to it. See `Fork`.

        Raises:
            ServerError: there are no sockets for it, or the server has died; `alive` says which.
        """
        ours, theirs = _pair()
        child = Child()
        with theirs, self._lock:
            try:
                self._post(Fork(place, memory_bytes), child)
                self._channel.send_descriptor(theirs.fileno())
            except (ServerError, ChannelError) as error:
                ours.close()
                self.alive = False
                raise ServerError(f"its process failed: {error}") from error
        return child, Channel(ours, FromWorker)

    def kill(self, child: Child) -> None:
        """End a worker, from any thread; idempotent."""
        with self._lock:
            child.is_killed = True
            self._kill(child)

    def reap(self, child: Child) -> None:
        """Ask for the exit status of a worker that has closed its channel, or was killed; idempotent."""
        with self._lock:
            child.is_over = True
            self._reap(child)

    def is_explained(self, child: Child) -> bool:
        """True once a worker's exit status is known, or will not be."""
        return child.status is not None or child.refusal is not None or not self.alive

    def take_answers(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take in what the server has answered, without waiting; one that does not answer in time is ended."""
        with self._lock:
            if not self.alive:
                return
            try:
                while (answer := self._channel.receive_now()) is not None:
                    child, _ = self._asked.popleft()
                    if isinstance(answer, Forked):
                        child.pid = answer.pid
                        if child.is_killed:
                            self._kill(child)
                        if child.is_over:
                            self._reap(child)
                    elif isinstance(answer, Reaped):
                        child.status = answer.status
                    elif isinstance(answer, Refused):
                        child.refusal = answer.reason
            except (ChannelError, IndexError):
                self.alive = False
            if self._asked and clock() > self._asked[0][1] + _ANSWER_LIMIT_S:
                self.alive = False
            if not self.alive:
                self._process.kill()

    def stop(self) -> None:
        """End the server without waiting; `read` raises ServerError."""
        self._process.kill()

    def close(self) -> None:
        """End the server and all its processes; idempotent."""
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _post(self, command: Fork | Reap, child: Child) -> None:
        if not self.alive:
            raise ServerError("its process has ended")
        try:
            self._channel.post(command)
            if not self._channel.flush():
                raise ChannelError("it does not read what it is sent")
        except ChannelError as error:
            self.alive = False
            raise ServerError(f"its process failed: {error}") from error
        self._asked.append((child, time.monotonic()))

    def _reap(self, child: Child) -> None:
        if child.pid is not None and not child.is_reaped:
            self._kill(child)
            child.is_reaped = True
            with suppress(ServerError):
                self._post(Reap(child.pid), child)

    def _kill(self, child: Child) -> None:
        """The pid is not reused before the server has reaped the process, which it does when it is told to."""
        if child.pid is not None and not child.is_reaped and self.alive:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)


class Servers:
    """Keeps a fork server for a service. Thread-safe; `running` waits, `now` does not.

    Args:
        new_server: makes one that has read nothing yet. Raises ServerError.
        vocabulary: what it reads.
    """

    def __init__(self, new_server: Callable[[], ServerHandle], vocabulary: Vocabulary) -> None:
        self._new_server, self._vocabulary = new_server, vocabulary
        self._lock = threading.Lock()
        self.current: ServerHandle | None = None
        self.starting: ServerHandle | None = None  # it reads the vocabulary, while the lock is held
        self._starter: threading.Thread | None = None
        self._failure: ServerError | None = None
        self._closed = False

    def running(self) -> ServerHandle:
        """The fork server, which is started if none is alive. Raises ServerError."""
        with self._lock:
            if self._closed:
                raise ServerError("the engine is being closed")
            if self.current is not None and not self.current.alive:
                self.current.close()
                self.current = None
            if self.current is None:
                self.current = self._started()
            return self.current

    def now(self) -> ServerHandle | None:
        """The fork server; None while one is being started. Raises ServerError where that has failed."""
        server = self.current
        if server is not None and server.alive:
            return server
        if self._starter is not None and self._starter.is_alive():
            return None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._starter = threading.Thread(target=self._start, name="realizar-grammar-server", daemon=True)
        self._starter.start()
        return None

    def close(self) -> None:
        """End the server. Idempotent."""
        self._closed = True  # before the look at `starting`: a server that is noted later finds this
        if (starting := self.starting) is not None:
            starting.stop()
        with self._lock:
            server, self.current = self.current, None
        if server is not None:
            server.close()
        if self._starter is not None:
            self._starter.join()

    def _start(self) -> None:
        try:
            self.running()
        except ServerError as error:
            self._failure = error

    def _started(self) -> ServerHandle:
        self.starting = server = self._new_server()
        try:
            if self._closed:
                server.stop()
            server.read(self._vocabulary)
        finally:
            self.starting = None
        return server


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise ServerError(f"there are no sockets for its process: {error.strerror}") from error
