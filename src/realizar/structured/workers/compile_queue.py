"""`CompileQueue`: grammars that wait to be compiled, a share for each client.

Clients take turns, and each client's grammars are compiled in their order. A grammar that several requests wait for is
compiled once; one that nobody waits for any more is not compiled.
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
    """One request's place in the queue. `on_done` is called once, unless the ticket is cancelled before."""

    structured: StructuredOutput
    client: str
    on_done: Report


@dataclass(eq=False, slots=True)
class CompileJob:
    """A grammar that is wanted: the tickets of those that wait for it. `stop` ends it while it runs."""

    structured: StructuredOutput
    tickets: list[Ticket] = field(default_factory=list)
    stop: Callable[[], object] | None = None

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits."""
        return bool(self.tickets)


class CompileQueue:
    """Thread-safe.

    Args:
        most_per_client: grammars of one client that may wait.
    """

    def __init__(self, most_per_client: int) -> None:
        self._most = most_per_client
        self._news = threading.Condition()
        self._jobs: dict[StructuredOutput, CompileJob] = {}
        self._waiting: OrderedDict[str, deque[Ticket]] = OrderedDict()  # the client whose turn it is comes first
        self._closed = False

    def put(self, ticket: Ticket) -> None:
        """Queue a request's grammar.

        Raises:
            QueueFullError: so many of its client's wait already. EngineDeadError: the queue is closed.
        """
        with self._news:
            if self._closed:
                raise EngineDeadError("the engine was closed")
            waiting = self._waiting.get(ticket.client, ())
            if len(waiting) >= self._most:
                raise QueueFullError(f"{len(waiting)} of your grammars wait to be compiled (limit {self._most})")

            job = self._jobs.setdefault(ticket.structured, CompileJob(ticket.structured))
            job.tickets.append(ticket)
            self._waiting.setdefault(ticket.client, deque()).append(ticket)
            self._news.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Wait for a grammar no more; one that is being compiled for nobody else is stopped. Idempotent."""
        with self._news:
            job = self._jobs.get(ticket.structured)
            if job is None or ticket not in job.tickets:
                return
            job.tickets.remove(ticket)
            self._leave(ticket)
            if job.wanted:
                return
            stop = job.stop
            del self._jobs[ticket.structured]  # who asks for it from now on begins anew
        if stop is not None:
            stop()

    def take(self) -> CompileJob | None:
        """The next grammar to compile, in turns; waits for one. None when the queue is closed."""
        with self._news:
            while not self._waiting and not self._closed:
                self._news.wait()
            if self._closed:
                return None
            client, tickets = self._waiting.popitem(last=False)
            job = self._jobs[tickets[0].structured]
            self._waiting[client] = tickets
            for ticket in job.tickets:
                self._leave(ticket)
            return job

    def finish(self, job: CompileJob, error: RealizarError | None) -> None:
        """Tell those who wait that a grammar is compiled, or why it is not."""
        with self._news:
            if self._jobs.get(job.structured) is job:
                del self._jobs[job.structured]
            tickets, job.tickets = job.tickets, []
            for ticket in tickets:
                self._leave(ticket)
        for ticket in tickets:
            ticket.on_done(error)

    def close(self) -> None:
        """Take no more; what waits is refused."""
        with self._news:
            self._closed = True
            jobs = list(self._jobs.values())
            self._news.notify_all()
        for job in jobs:
            if job.stop is not None:
                job.stop()
            self.finish(job, EngineDeadError("the engine was closed"))

    def _leave(self, ticket: Ticket) -> None:
        """Take a ticket out of its client's line; empty lines are removed."""
        line = self._waiting.get(ticket.client)
        if line is not None and ticket in line:
            line.remove(ticket)
            if not line:
                del self._waiting[ticket.client]
