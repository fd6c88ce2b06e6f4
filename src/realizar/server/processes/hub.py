"""`Hub` runs the API processes: it hands connections and deltas to them, and requests of all of them to one engine.

What is counted over all processes is counted here: queue, suspects, restarts, metrics. A connection goes to the process
that has room for the most, so that each may have its share, and to one that is late to answer only where all are.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvicorn

from realizar.engine.frontend.async_link import EngineLink
from realizar.engine.frontend.questions import Questions, send_reply
from realizar.engine.frontend.shared_engine import SharedEngine, StateEvent
from realizar.engine.frontend.tasks import Tasks
from realizar.engine.process.child import ChildProcess, LivenessPolicy, growing_pause_s
from realizar.engine.process.messages import (
    Abort,
    Add,
    Ask,
    CachedKeys,
    EngineLost,
    Question,
    Reply,
)
from realizar.errors import EngineDeadError, InvalidRequestError, RealizarError
from realizar.server.figures import own_samples
from realizar.server.metrics import MetricSamples, add_samples, exposition_of
from realizar.server.processes.messages import (
    ConnectionsClosed,
    Drain,
    FromProcess,
    Start,
    Started,
    Stop,
    ToProcess,
)

_LOG = logging.getLogger(__name__)
PROCESS_COMMAND = (sys.executable, "-m", "realizar.cli.api_process")
_ACCEPTED_AT_ONCE = 64
_PAUSE_S = 0.1  # without descriptors
_SAMPLES_PATIENCE_S = 1.0
_STOP_S = 15.0  # for a process to send its last answers
_FIRST_DELAY_S, _LONGEST_DELAY_S, _STEADY_S = 0.25, 30.0, 60.0
_MAX_FAILED_STARTS = 5

_LATE_PINGS = 3  # unanswered ones after which other processes get the connections


class Hub:
    """The API processes of one server: a `Front` whose requests come back to the engine.

    Args:
        link: of `engine`, to which all requests go.
        starts: the first message of each process.
        model_name: the label of every metric.
        command: the command to start; the descriptors of its sockets are appended.
        more_samples: gives further metrics, once the engine's figures are there.
        max_queued: as of `AsyncEngine`.
    """

    def __init__(
        self,
        link: EngineLink,
        starts: Sequence[Start],
        model_name: str,
        command: Sequence[str] = PROCESS_COMMAND,
        more_samples: Callable[[], tuple[MetricSamples, ...]] = tuple,
        max_queued: int | None = None,
    ) -> None:
        self._starts, self._model_name, self._command = starts, model_name, command
        self._more_samples = more_samples
        self.engine: SharedEngine[ApiProcess] = SharedEngine(
            link, lambda process, event: process.send(event), self._note_state, max_queued=max_queued
        )
        self._processes: list[ApiProcess] = []
        self._tasks = Tasks()
        self._samples: dict[ApiProcess, tuple[MetricSamples, ...]] = {}
        self._retired: tuple[MetricSamples, ...] = ()  # of processes that have ended
        self._last_state: StateEvent | None = None
        self._listener: socket.socket | None = None
        self._listens = self._draining = False
        self._stopping = asyncio.Event()

    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        return uvicorn.Config("").get_loop_factory()

    async def serve(self, listener: socket.socket) -> None:
        """Run the processes until `stop`.

        RealizarError: a process ends before it takes a connection, again and again, and no other one takes any.
        """
        self._listener = listener
        listener.setblocking(False)
        keeping = [asyncio.create_task(self._keep(start)) for start in self._starts]
        try:
            await asyncio.gather(*keeping)
        finally:
            self._stopping.set()
            self._listen(wanted=False)
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, self._tasks.cancel(), return_exceptions=True)
            for process in list(self._processes):
                self.engine.abandon(process)
                await process.reap()

    def drain(self) -> None:
        self._draining = True
        self._broadcast(Drain())

    def stop(self, *, at_once: bool) -> None:
        """End the processes, when their answers are complete or `at_once`."""
        self._stopping.set()
        self._listen(wanted=False)
        self._broadcast(Stop())
        for process in self._processes:
            self._tasks.start(self._end_late(process, 0.0 if at_once else _STOP_S))

    async def _end_late(self, process: ApiProcess, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await process.reap()

    def _note_state(self, event: StateEvent) -> None:
        if isinstance(event, EngineLost):
            event = EngineLost(event.error, event.restarting, blame=False)  # the engine of this process knows whom
            self._last_state = None
        elif isinstance(event, CachedKeys):
            return
        else:
            self._last_state = event
        self._broadcast(event)

    async def _keep(self, start: Start) -> None:
        """Run one process after another, until the server ends."""
        failed = ends = 0
        while not self._stopping.is_set():
            process = ApiProcess(self._take)
            self._processes.append(process)
            started_s = time.monotonic()
            try:
                await process.start(self._command, start)
                if self._last_state is not None:
                    process.send(self._last_state)
                if self._draining:
                    process.send(Drain())
                if self._stopping.is_set():
                    process.send(Stop())
                how = await process.wait_end()
            except OSError as error:
                how = f"could not be started: {error}"
            finally:
                self._processes.remove(process)
                await process.reap()
                self._abandon(process)
            if self._stopping.is_set():
                return
            failed = 0 if process.has_started else failed + 1
            if failed >= _MAX_FAILED_STARTS and not any(other.takes_connections for other in self._processes):
                raise RealizarError(f"an API process {how}, {failed} times before it took a connection")
            ends = 1 if time.monotonic() - started_s > _STEADY_S else ends + 1
            delay_s = growing_pause_s(ends, _FIRST_DELAY_S, _LONGEST_DELAY_S)
            _LOG.error("an API process %s; another one is started in %.2g s", how, delay_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    def _abandon(self, process: ApiProcess) -> None:
        """End the requests of a process that is gone, and keep what it counted."""
        self.engine.abandon(process)
        process.asked.fail(EngineDeadError("the process is gone"))
        self._retired = add_samples((self._retired, self._samples.pop(process, ())))

    def _take(self, process: ApiProcess, message: FromProcess) -> None:
        match message:
            case Add(request):
                self.engine.add(process, request)
            case Abort(request_id, choice):
                self.engine.abort(process, request_id, choice)
            case Ask():
                self._tasks.start(send_reply(message, self._asked_for(message.what), process.send))
            case ConnectionsClosed(count):
                process.num_connections -= count
            case Started():
                self._listen(wanted=not self._stopping.is_set())
            case Reply():  # of samples, which count although they may be late
                self._samples[process] = message.value or ()
                process.asked.resolve(message)

    async def _asked_for(self, what: Question) -> bytes | None:
        if what == "exposition":
            return await self._exposition()
        if what != "clear_cache":
            raise InvalidRequestError(f"the main process does not {what}")
        await self.engine.clear_cache()
        return None

    def _broadcast(self, message: ToProcess) -> None:
        for process in self._processes:
            process.send(message)

    async def _exposition(self) -> bytes:
        """The metrics of all processes; one that is busy counts as it last did."""
        asked = [each.asked.ask("samples", _SAMPLES_PATIENCE_S) for each in self._processes if each.takes_connections]
        await asyncio.gather(*asked, return_exceptions=True)
        stats = await self.engine.stats()
        summed = add_samples((self._retired, *self._samples.values()))
        return exposition_of({self._model_name: stats}, (*summed, *own_samples(), *self._more_samples()))

    def _listen(self, *, wanted: bool) -> None:
        """Accept connections, or leave them waiting."""
        if self._listener is None or wanted == self._listens:
            return
        loop, self._listens = asyncio.get_running_loop(), wanted
        if wanted:
            loop.add_reader(self._listener.fileno(), self._accept)
        else:
            loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        """Hand waiting connections over, each to the process that has room for the most."""
        for _ in range(_ACCEPTED_AT_ONCE):
            ready = [process for process in self._processes if process.takes_connections]
            if not ready or self._listener is None:
                self._listen(wanted=False)
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _LOG.error("no connection could be accepted: %s", error)
                self._listen(wanted=False)
                asyncio.get_running_loop().call_later(_PAUSE_S, self._listen_again)
                return
            with connection:
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ready.sort(key=lambda process: (process.is_late, process.num_connections - process.max_connections))
                any(process.hand_over(connection) for process in ready)

    def _listen_again(self) -> None:
        self._listen(wanted=not self._stopping.is_set())


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
