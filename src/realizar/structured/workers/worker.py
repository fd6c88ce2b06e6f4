"""The engine process's handles of the fork server and the workers; `WorkerFactory` starts these. `WorkerLimits`."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from realizar.ipc.frames import Channel, ChannelError, ChannelTimeoutError
from realizar.ipc.process_limits import signal_name, start_process
from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.mask_memory import MOST_WORKERS, NO_RING, MaskMemory
from realizar.structured.workers.messages import (
    Done,
    Dropped,
    End,
    Ended,
    Fork,
    Forked,
    FromServer,
    FromWorker,
    Load,
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


class ServerHandle:
    """Starts a fork server and sends it commands, the first of which is `read`. Thread-safe.

    Only `read` and `close` wait: what the server answers to others is taken in by `take_answers`. Once it has ended, or
    has not answered in time, `alive` is false; its children have ended then, or do so now.

    The descriptors of its socket, of the shared memory and of its ring are appended to `command`. Raises ServerError
    where the server can't be started.
    """

    def __init__(self, memory: MaskMemory, command: Sequence[str] = SERVER_COMMAND) -> None:
        self._lock = threading.Lock()
        try:
            ring = () if memory.ring == NO_RING else (memory.ring,)
            self._process, ours = start_process(command, memory.descriptor, *ring)
        except OSError as error:
            raise ServerError(f"its process can't be started: {error.strerror}") from error
        self._channel: Channel[FromServer] = Channel(ours, FromServer)
        self._asked: deque[tuple[Worker, float]] = deque()  # those of commands without an answer, and since when
        self.alive = True

    def read(self, vocabulary: Vocabulary) -> None:
        """Have the server read the vocabulary, and wait for that. The server is closed where it fails.

        Raises ServerError where it refuses the vocabulary, or has ended.
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

    def fork(self, worker: Worker, memory_bytes: int) -> Channel[FromWorker]:
        """Start a worker, without waiting for it; returns the channel to it. See `Fork`.

        Raises ServerError without sockets for it, or where the server has died; `alive` says which.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ServerError(f"there are no sockets for its process: {error.strerror}") from error
        with theirs, self._lock:
            try:
                self._post(Fork(worker.place, memory_bytes), worker)
                self._channel.send_descriptor(theirs.fileno())
            except (ServerError, ChannelError) as error:
                ours.close()
                self.alive = False
                raise ServerError(f"its process failed: {error}") from error
        return Channel(ours, FromWorker)

    def end(self, worker: Worker) -> None:
        """Kill a worker, unless it has ended, and ask for its exit status; from any thread, idempotent."""
        with self._lock:
            if not worker.is_ended:
                worker.is_ended = True
                with suppress(ServerError):
                    self._post(End(worker.place), worker)

    def take_answers(self) -> None:
        """Take in what the server has answered, without waiting; one that does not answer in time is ended."""
        with self._lock:
            if not self.alive:
                return
            try:
                while (answer := self._channel.receive_now()) is not None:
                    worker, _ = self._asked.popleft()
                    if isinstance(answer, Forked):
                        worker.known_pid = answer.pid
                    elif isinstance(answer, Ended):
                        worker.status = answer.status
                    elif isinstance(answer, Refused):
                        worker.refusal = answer.reason
            except (ChannelError, IndexError):
                self.alive = False
            if self._asked and time.monotonic() > self._asked[0][1] + _ANSWER_LIMIT_S:
                self.alive = False
            if not self.alive:
                self._process.kill()

    def stop(self) -> None:
        """End the server without waiting; `read` raises ServerError."""
        self._process.kill()

    def close(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _post(self, command: Fork | End, worker: Worker) -> None:
        if not self.alive:
            raise ServerError("its process has ended")
        try:
            self._channel.post(command)
            if not self._channel.flush():
                raise ChannelError("it does not read what it is sent")
        except ChannelError as error:
            self.alive = False
            raise ServerError(f"its process failed: {error}") from error
        self._asked.append((worker, time.monotonic()))


_END_S = 10.0  # for a process that was killed


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of the grammars' time, memory and number.

    Attributes:
        compilers: grammars that are compiled at a time, before rows follow them.
        compile_cpu_s: processor seconds of a compilation. The heaviest grammars within the size bounds take half a
            second.
        compile_s: seconds of a compilation, in case its process hangs.
        heavy_s: processor seconds of a compilation beyond which a grammar has a worker of its own.
        stall_s: seconds in which a worker that grammars share must get on with something.
        step_s: seconds in which a worker with a single grammar must.
        memory_bytes: memory of one grammar and its rows; the heaviest takes about 50 MB.
        total_bytes: memory of all grammars, above which none is compiled.
        grammars: number of grammars, including those of waiting requests.
        workers: that grammars share, at most.
        idle: number of idle grammars that are kept for later requests.
        queued_per_client: grammars of one client that may wait to be compiled.
        slots: rows that may follow grammars, those that have ended while their masks were computed among them.
        drafts: of a row.
    """

    compilers: int = 2
    compile_cpu_s: int = 3
    compile_s: float = 60.0
    heavy_s: float = 0.05
    stall_s: float = 1.0
    step_s: float = 10.0
    memory_bytes: int = 256 << 20
    total_bytes: int = 2 << 30
    grammars: int = 256
    workers: int = 1
    idle: int = 32
    queued_per_client: int = 128
    slots: int = 1024
    drafts: int = 16


class WorkerDiedError(Exception):
    """A worker has ended or was ended; the message continues "compiling it" or "following it".

    `out_of_time`: the process was ended because it took too long. `cause`: `request` if it crashed or used up its
    processor time, which the grammar may cause again; `engine` if it exceeded a time limit, as on a machine that swaps,
    or if its end is unexplained. `is_own`: false if it ended with the fork server, whatever it did.
    """

    def __init__(self, reason: str, *, out_of_time: bool, cause: ErrorCause = "engine", is_own: bool = True) -> None:
        super().__init__(reason)
        self.out_of_time, self.cause, self.is_own = out_of_time, cause, is_own


class Worker:
    """One process, which one thread uses; only `kill` may be called by others. ServerError: it can't be started.

    Attributes:
        place: its index in the columns of the workers in the shared memory.
        channel: what it has sent; its end is the worker's.
        owner: the number of the only grammar that it may have; 0 for a worker that grammars share.
        grammars: numbers of those that it has been told to load. num_loading: those that it has not answered for.
        slots: of the rows that it follows, and of some that have ended.
        is_doomed: it was ended; rows go to another one when its channel says so.
        is_dismissed: nobody needs it.
        known_pid: of its process, as far as the fork server has told. refusal: the reason why it was not started.
        is_ended: the server was told to end it. status: its exit status, or the negative number of a signal.
        progress: of the shared memory, when it was looked at last. stalled_s: for so long it has got on with nothing,
            though there was something to do.
    """

    def __init__(self, server: ServerHandle, place: int, memory_bytes: int) -> None:
        self._server, self.place = server, place
        self.known_pid: int | None = None
        self.refusal: str | None = None
        self.status: int | None = None
        self.is_ended = False
        self.channel = server.fork(self, memory_bytes)
        self.owner = 0
        self.grammars: set[int] = set()
        self.slots: set[int] = set()
        self.num_loading = self.progress = 0
        self.stalled_s = 0.0
        self.is_doomed = self.is_dismissed = False
        self._limit_s: float | None = None  # it was ended as it took longer

    @property
    def pid(self) -> int | None:
        """Of its process; None as long as the fork server has not told."""
        self._server.take_answers()
        return self.known_pid

    @property
    def is_served(self) -> bool:
        """False once the fork server has ended, and it with it."""
        return self._server.alive

    def post(self, record: Any) -> None:
        """Send it a message without waiting. That it is gone is found by what is read from it."""
        with suppress(ChannelError):
            self.channel.post(record)

    def flush(self) -> None:
        """Send what it had no room for, and hear what the fork server says."""
        with suppress(ChannelError):
            self.channel.flush()
        self._server.take_answers()

    def compile(self, number: int, structured: StructuredOutput, cpu_s: int, limit_s: float) -> FromWorker:
        """Have it compile a grammar, and wait for the answer. Raises WorkerDiedError."""
        try:
            self.channel.send(Load(number, structured, cpu_s), limit_s)
            while isinstance(answer := self.channel.receive(limit_s), Dropped):
                pass  # the grammar before
            return answer
        except ChannelTimeoutError:
            self.end_late(limit_s)
        except ChannelError:
            pass
        raise self._awaited_death(cpu_s)

    def end_late(self, limit_s: float) -> None:
        """End it, as it has not got on in time."""
        self._limit_s, self.is_doomed = limit_s, True
        self.kill()

    def kill(self) -> None:
        """End the process, from any thread, without waiting; idempotent."""
        self._server.end(self)

    def close(self) -> None:
        """End the process without waiting, and close the channel; idempotent."""
        self.kill()
        self.channel.close()

    def death(self, cpu_s: int | None = None) -> WorkerDiedError | None:
        """How it has ended, once its channel has, given its processor time; None as long as that is not known."""
        self._server.take_answers()
        self._server.end(self)
        status = self.status
        if status is None and self.refusal is None and self._server.alive:
            return None
        if self._limit_s is not None:
            return WorkerDiedError(f"took longer than {self._limit_s:g} s", out_of_time=True)
        if self.refusal is not None:
            return WorkerDiedError(f"found no process: {self.refusal}", out_of_time=False, is_own=False)
        if cpu_s is not None and status == -signal.SIGXCPU:
            return WorkerDiedError(f"took longer than {cpu_s} s", out_of_time=True, cause="request")
        if status is not None and status < 0:
            return WorkerDiedError(f"crashed ({signal_name(-status)})", out_of_time=False, cause="request")
        cause: ErrorCause = "request" if status else "engine"
        return WorkerDiedError("ended its process", out_of_time=False, cause=cause, is_own=status is not None)

    def _awaited_death(self, cpu_s: int) -> WorkerDiedError:
        end_s = time.monotonic() + _END_S
        while (death := self.death(cpu_s)) is None:
            if time.monotonic() > end_s:
                return WorkerDiedError("ended its process", out_of_time=False)
            time.sleep(1e-4)
        return death


class WorkerFactory:
    """Starts workers, with a fork server that it keeps. Thread-safe."""

    def __init__(self, new_server: Callable[[], ServerHandle], vocabulary: Vocabulary, memory: MaskMemory) -> None:
        self._new_server, self._vocabulary, self.memory = new_server, vocabulary, memory
        self._free = deque(range(MOST_WORKERS))  # a place is used again as late as can be
        self._lock = threading.Lock()
        self.current: ServerHandle | None = None
        self.starting: ServerHandle | None = None  # it reads the vocabulary, while the lock is held
        self._starter: threading.Thread | None = None
        self._failure: ServerError | None = None
        self._closed = False

    def new(self, memory_bytes: int, *, may_wait: bool) -> Worker | None:
        """Start a worker; None while the fork server is being started, unless that may be waited for.

        Raises ServerError where that can't be.
        """
        server = self.running() if may_wait else self._now()
        if server is None:
            return None
        try:
            return self._forked(server, memory_bytes)
        except ServerError:
            if server.alive:
                raise
        return self._forked(self.running(), memory_bytes) if may_wait else None

    def end(self, worker: Worker) -> None:
        worker.close()
        self._free.append(worker.place)

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

    def _now(self) -> ServerHandle | None:
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
        self._closed = True  # before the look at `starting`: a server that is noted later finds this
        if (starting := self.starting) is not None:
            starting.stop()
        with self._lock:
            server, self.current = self.current, None
        if server is not None:
            server.close()
        if self._starter is not None:
            self._starter.join()

    def _forked(self, server: ServerHandle, memory_bytes: int) -> Worker:
        try:
            place = self._free.popleft()
        except IndexError:
            raise ServerError(f"there are {MOST_WORKERS} processes") from None
        memory = self.memory
        memory.working[place] = memory.progress[place] = memory.sleeping[place] = 0
        try:
            return Worker(server, place, memory_bytes)
        except ServerError:
            self._free.append(place)
            raise

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
