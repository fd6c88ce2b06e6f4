"""`CompileQueue`: the grammars that wait to be compiled, with a share for each client.

Clients take turns, and each client's grammars are compiled in order. A grammar that several requests wait for is
compiled once. A grammar that nobody waits for any more is not compiled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from realizar.errors import EngineDeadError, QueueFullError, RealizarError
from realizar.sampling_params import StructuredOutput

Report = Callable[[RealizarError | None], None]


@dataclass(eq=False, slots=True)
class Ticket:
    """A request's place in the queue. `on_done` is called once, unless the ticket is cancelled first."""

    structured: StructuredOutput
    client: str
    on_done: Report


@dataclass(eq=False, slots=True)
class CompileJob:
    """A grammar to compile, with the tickets of the requests that wait for it. `is_taken`: it is being compiled, which
    `stop` ends.
    """

    structured: StructuredOutput
    tickets: list[Ticket] = field(default_factory=list)
    is_taken: bool = False
    stop: Callable[[], object] | None = None


class CompileQueue:
    """The queue of grammars, of which a client may have so many waiting. Thread-safe."""

    def __init__(self, most_per_client: int) -> None:
        self._most = most_per_client
        self._changed = threading.Condition()
        self._jobs: dict[StructuredOutput, CompileJob] = {}
        self._waiting: OrderedDict[str, deque[Ticket]] = OrderedDict()  # the client whose turn it is comes first
        self._closed = False

    def put(self, ticket: Ticket) -> None:
        """Queue a request's grammar; QueueFullError at the client's limit, EngineDeadError once the queue is closed."""
        with self._changed:
            if self._closed:
                raise EngineDeadError("the engine was closed")
            waiting = self._waiting.get(ticket.client, ())
            if len(waiting) >= self._most:
                raise QueueFullError(
                    f"{len(waiting)} of your grammars wait to be compiled (limit {self._most}); try again later"
                )

            job = self._jobs.setdefault(ticket.structured, CompileJob(ticket.structured))
            job.tickets.append(ticket)
            if not job.is_taken:
                self._waiting.setdefault(ticket.client, deque()).append(ticket)
                self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a ticket. If no other request waits for its grammar, a running compilation is stopped. Idempotent."""
        with self._changed:
            job = self._jobs.get(ticket.structured)
            if job is None or ticket not in job.tickets:
                return
            job.tickets.remove(ticket)
            self._remove(ticket)
            if job.tickets:
                return
            stop = job.stop
            del self._jobs[ticket.structured]  # a later request starts a new job
        if stop is not None:
            stop()

    def take(self) -> CompileJob | None:
        """Wait for the next grammar to compile, by turns of the clients. None when the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            client, tickets = self._waiting.popitem(last=False)
            job = self._jobs[tickets[0].structured]
            job.is_taken = True
            self._waiting[client] = tickets
            for ticket in job.tickets:
                self._remove(ticket)
            return job

    def finish(self, job: CompileJob, error: RealizarError | None) -> None:
        """Report to the waiting requests that a grammar is compiled, or its error."""
        with self._changed:
            if self._jobs.get(job.structured) is job:
                del self._jobs[job.structured]
            tickets, job.tickets = job.tickets, []
            for ticket in tickets:
                self._remove(ticket)
        for ticket in tickets:
            ticket.on_done(error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            jobs = list(self._jobs.values())
            self._changed.notify_all()
        for job in jobs:
            stop = job.stop  # which ends with the compilation
            if stop is not None:
                stop()
            self.finish(job, EngineDeadError("the engine was closed"))

    def _remove(self, ticket: Ticket) -> None:
        line = self._waiting.get(ticket.client)
        if line is not None and ticket in line:
            line.remove(ticket)
            if not line:
                del self._waiting[ticket.client]
