"""`GrammarService` compiles and follows grammars over a model's vocabulary, in processes of their own."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from realizar.errors import InvalidRequestError, QueueFullError, RealizarError, RequestFailedError
from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens, refusal
from realizar.structured.regex_masks import MOST_STATES
from realizar.structured.workers.compile_queue import CompileJob, CompileQueue, Report, Ticket
from realizar.structured.workers.grammar_rows import GrammarRow, KnownGrammar
from realizar.structured.workers.mask_memory import MaskMemory
from realizar.structured.workers.mask_requests import MaskRequests
from realizar.structured.workers.messages import Drop, Loaded, Refused, Vocabulary
from realizar.structured.workers.worker import (
    SERVER_COMMAND,
    ServerError,
    ServerHandle,
    Worker,
    WorkerDiedError,
    WorkerFactory,
    WorkerLimits,
)
from realizar.structured.workers.worker_pool import WorkerPool

_LOG = logging.getLogger(__name__)
_RETRY_S = 5.0
_KNOWN_GRAMMARS = 16  # grammars whose states are all known
_MOST_USED_BYTES = 16 << 20  # by a process that compiles others too: each is taken to have as much as the largest


class GrammarService:
    """Compiles grammars on threads of their own, with a share for each client, and computes masks of rows.

    A new grammar is compiled in a process without rows first, of which there are a few; each compiles one grammar after
    the other. If one takes long, its process follows the grammar's rows too; else workers that grammars share do, and
    compile it again.

    The engine calls the methods of `rows`, `masks`, `advance`, `open_row` and `close_row` from one thread; the other
    methods are thread-safe. The first process starts with the first grammar, or with `start`.

    `clock` gives monotonic seconds, for the expiry of refusals. `known` has the grammars that are compiled.
    """

    def __init__(
        self,
        tokens: GrammarTokens,
        *,
        limits: WorkerLimits | None = None,
        server_command: Sequence[str] = SERVER_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or WorkerLimits()
        slots, drafts = self._limits.slots, self._limits.drafts
        num_lines = 0 if drafts else _KNOWN_GRAMMARS * MOST_STATES  # a row with drafts is asked about each time
        vocabulary = Vocabulary(tokens, slots, drafts, num_lines)
        self.num_words = tokens.num_words
        self._memory = MaskMemory(tokens.num_words, slots, drafts, num_lines=num_lines)
        self._factory = WorkerFactory(lambda: ServerHandle(self._memory, server_command), vocabulary, self._memory)
        self._pool = WorkerPool(self._factory, self._limits)
        self.rows = MaskRequests(self._memory, self._pool, self._condemn)
        self._closed = False
        self.known = KnownGrammars(self._limits, self._pool.drop, clock)
        self._queue = CompileQueue(self._limits.queued_per_client)
        self._idle = list[Worker]()  # processes that compile, and have nothing to do
        self._num_compiling = 0
        self._compile_lock = threading.Lock()
        self._threads = list[threading.Thread]()
        self._thread_lock = threading.Lock()

    def start(self) -> None:
        """Read the vocabulary now, in the background, so that the first grammar does not wait for it."""
        with self._thread_lock:
            while len(self._threads) < self._limits.compilers:
                name = f"realizar-grammars-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._compile_all, name=name, daemon=True))
                self._threads[-1].start()

    def prepare(self, structured: StructuredOutput, client: str = "") -> None:
        """Compile a grammar, unless it is known, and wait for it.

        Raises:
            InvalidRequestError: the grammar is malformed, not supported, impossible or too heavy.
            RequestFailedError: no process could finish it, which may be the machine's fault.
            QueueFullError: there is no room for it now. EngineDeadError: the service was closed.
        """
        while not self.known.has(structured):
            done: SimpleQueue[RealizarError | None] = SimpleQueue()
            ticket = self.prepare_later(structured, client, done.put)
            try:
                error = done.get()
            finally:
                self.cancel(ticket)
            if error is not None:
                raise error
        self.known.check(structured)

    def prepare_later(self, structured: StructuredOutput, client: str, on_done: Report) -> Ticket:
        """Queue a client's grammar. `on_done` is called on another thread with the result: None or an error.

        Raises QueueFullError where too many of the client's grammars wait, EngineDeadError once the service is closed.
        """
        ticket = Ticket(structured, client, on_done)
        self._queue.put(ticket)
        self.start()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a ticket. If no other request waits for its grammar, it is not compiled. Idempotent."""
        self._queue.cancel(ticket)

    def open_row(self, structured: StructuredOutput, output: Sequence[int], begun: Sequence[int] = ()) -> GrammarRow:
        """Make a row at the grammar's begin, or after some output. The row has an error if its grammar was refused.

        `begun` are ids before the output that the grammar takes in first. Raises RequestFailedError for too many rows.
        """
        grammar = self.known.follow(structured)
        try:
            row = self.rows.open(grammar, [*begun, *output])
        except RequestFailedError:
            self.known.unfollow(grammar)
            raise
        row.num_begun = len(begun)
        return row

    def close_row(self, row: GrammarRow) -> None:
        self.known.unfollow(row.grammar)
        self.rows.close(row)

    def close(self) -> None:
        """End all processes; waiting requests get an error. Idempotent."""
        self._queue.close()
        self._closed = True
        self._factory.close()
        for thread in self._threads:
            thread.join()
        for worker in self._idle:
            self._factory.end(worker)
        self.known.close()
        self._pool.close()
        self._memory.close()

    def _compile_all(self) -> None:
        try:
            self._factory.running()
        except ServerError as error:
            if not self._closed:
                _LOG.warning("structured output is not available now: %s", error)
        while (job := self._queue.take()) is not None:
            outcome: RealizarError | None = None
            try:
                self._run(job)
            except RealizarError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - one grammar must not cost the others their compiler
                _LOG.exception("a grammar could not be compiled")
                outcome = RequestFailedError(f"the grammar can't be compiled: {type(error).__name__}")
            self._queue.finish(job, outcome)

    def _run(self, job: CompileJob) -> None:
        """Compile a grammar, unless it is known, and remember the result.

        Raises InvalidRequestError or RequestFailedError where it is refused, QueueFullError without room for its
        process.
        """
        if self.known.has(job.structured):
            return
        self.known.drop_surplus(self._num_compiling)
        with self._compile_lock:
            self._admit(job)
            self._num_compiling += 1
        try:
            grammar = self._compile(job)
        except (InvalidRequestError, RequestFailedError) as error:
            cause: ErrorCause = "request" if isinstance(error, InvalidRequestError) else "engine"
            self.known.refuse(job.structured, str(error), cause)
            raise
        except ServerError as error:
            if error.lasting:
                raise InvalidRequestError(f"structured output is not possible with this model: {error}") from error
            raise QueueFullError(f"structured output is not possible now: {error}", _RETRY_S) from error
        else:
            if grammar is not None:
                self.known.add(grammar)
        finally:
            with self._compile_lock:
                self._num_compiling -= 1

    def _admit(self, job: CompileJob) -> None:
        """Raise QueueFullError where there is no room for a grammar beside those that are known or being compiled."""
        count, size_bytes = self.known.usage()
        count += self._num_compiling
        if count >= self._limits.grammars:
            raise QueueFullError(
                f"open requests have {count} different grammars, which is the limit; try again later", _RETRY_S
            )
        if size_bytes >= self._limits.total_bytes:
            raise QueueFullError("the grammars of open requests use all memory for grammars; try again later", _RETRY_S)
        clients = {ticket.client for ticket in tuple(job.tickets)}
        if clients and not any(map(self.known.has_share, clients)):
            raise QueueFullError(
                "the grammars of this client's open requests use all of its share; try again later", _RETRY_S
            )

    def _compile(self, job: CompileJob) -> KnownGrammar | None:
        """Compile a grammar; None if nobody waits for it any more.

        After a crash the compilation is tried once more, in case the process was ended from outside.

        Raises:
            InvalidRequestError: the grammar is refused, or its process dies of it. ServerError: no process can start.
            RequestFailedError: its process dies, and the machine may be at fault.
        """
        tries, find = 2, self._idle_or_new
        cause: ErrorCause = "request"  # unless a death has another cause
        while True:
            try:
                return self._compile_once(KnownGrammar(job.structured), job, find())
            except WorkerDiedError as death:
                if not job.tickets:
                    return None
                tries, find = tries - 1, self._new  # an idle process may have been ended from outside too
                cause = "engine" if death.cause == "engine" else cause
                if death.out_of_time or not tries:
                    _LOG.warning("compiling a grammar %s; its request is refused", death)
                    error = refusal(job.structured, f"compiling it {death}")
                    raise (error if cause == "request" else RequestFailedError(str(error))) from death

    def _compile_once(self, grammar: KnownGrammar, job: CompileJob, worker: Worker) -> KnownGrammar | None:
        """Compile a grammar; raises also WorkerDiedError."""
        limits = self._limits
        job.stop = worker.kill
        is_kept = is_used_again = False
        try:
            if not job.tickets:
                return None
            answer = worker.compile(grammar.number, grammar.structured, limits.compile_cpu_s, limits.compile_s)
            if isinstance(answer, Refused):
                raise InvalidRequestError(answer.reason, "structured")
            assert isinstance(answer, Loaded)
            grammar.memory_bytes = answer.memory_bytes
            if answer.cpu_s > limits.heavy_s:
                is_kept = grammar.is_alone = True
                grammar.compiled_in, worker.owner, worker.grammars = worker, grammar.number, {grammar.number}
                grammar.copies = 1
            is_used_again = not is_kept and answer.memory_bytes <= _MOST_USED_BYTES
            return grammar
        finally:
            job.stop = None
            if is_used_again and job.tickets:  # else it may be killed at any time
                worker.post(Drop(grammar.number))
                with self._compile_lock:
                    self._idle.append(worker)
            elif not is_kept:
                self._factory.end(worker)

    def _idle_or_new(self) -> Worker:
        """A process that can compile a grammar. Raises ServerError."""
        with self._compile_lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_served:
                    return worker
                self._factory.end(worker)
        return self._new()

    def _new(self) -> Worker:
        worker = self._factory.new(self._limits.memory_bytes, may_wait=True)
        assert worker is not None
        return worker

    def _condemn(self, grammar: KnownGrammar, reason: str, cause: ErrorCause) -> None:
        """Refuse a grammar from now on, after one row has ended its worker by itself."""
        error = refusal(grammar.structured, reason)
        _LOG.warning("%s", error)
        self.known.refuse(grammar.structured, str(error), cause)


# `KnownGrammars`: the compiled grammars with their users, and the refused grammars.

_MOST_REFUSALS = 1024
_MOST_REFUSED_CHARACTERS = 16 << 20
_MEMORY_S = 600.0  # for refusals that the machine may have caused


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a grammar; it is forgotten at `until_s` of the clock."""

    reason: str
    cause: ErrorCause
    until_s: float


class KnownGrammars:
    """The known grammars. Thread-safe. `drop` is called with one that no row will follow any more."""

    def __init__(
        self, limits: WorkerLimits, drop: Callable[[KnownGrammar], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._drop, self._clock = limits, drop, clock
        self._lock = threading.RLock()
        self._grammars: OrderedDict[StructuredOutput, KnownGrammar] = OrderedDict()  # last requested last
        self._retired: list[KnownGrammar] = []
        self._refusals: OrderedDict[StructuredOutput, Refusal] = OrderedDict()

    def has(self, structured: StructuredOutput) -> bool:
        with self._lock:
            return structured in self._grammars or self._refusal(structured) is not None

    def check(self, structured: StructuredOutput) -> None:
        """Raise the error of a refused grammar: InvalidRequestError, or RequestFailedError if the machine caused it."""
        with self._lock:
            refusal = self._refusal(structured)
            if refusal is not None:
                self._refusals.move_to_end(structured)
                if refusal.cause == "request":
                    raise InvalidRequestError(refusal.reason, "structured")
                raise RequestFailedError(refusal.reason)

    def acquire(
        self, request_id: str, structured: StructuredOutput, is_open: Callable[[str], bool], client: str = ""
    ) -> bool:
        """Acquire a compiled grammar for a request until the request has ended; False if it is not compiled.

        Raises InvalidRequestError or RequestFailedError where the grammar was refused.
        """
        with self._lock:
            self.check(structured)
            for grammar in self._all():
                grammar.users = {user: whose for user, whose in grammar.users.items() if is_open(user)}
            found = self._grammars.get(structured)
            if found is None:
                return False
            found.users[request_id] = client
            self._grammars.move_to_end(structured)
            return True

    def add(self, grammar: KnownGrammar) -> None:
        with self._lock:
            if (other := self._grammars.get(grammar.structured)) is not None:  # of a request that was cancelled
                self._retired.append(other)
            self._grammars[grammar.structured] = grammar

    def refuse(self, structured: StructuredOutput, reason: str, cause: ErrorCause) -> None:
        """Remember a refusal, as long as there is room, or for some minutes if the machine may have caused it."""
        with self._lock:
            self.forget(structured)
            known = self._refusal(structured)
            if known is not None and known.cause == "request":
                return
            until_s = math.inf if cause == "request" else self._clock() + _MEMORY_S
            self._refusals[structured] = Refusal(reason, cause, until_s)
            num_characters = sum(len(each.value) for each in self._refusals)
            while len(self._refusals) > _MOST_REFUSALS or num_characters > _MOST_REFUSED_CHARACTERS:
                num_characters -= len(self._refusals.popitem(last=False)[0].value)

    def forget(self, structured: StructuredOutput) -> None:
        """Have no new row follow a grammar, as the state that its rows share may have reached its limits."""
        with self._lock:
            grammar = self._grammars.pop(structured, None)
            if grammar is not None:
                self._retired.append(grammar)

    def follow(self, structured: StructuredOutput) -> KnownGrammar:
        """The grammar of a new row, which may be refused. One that was forgotten is known again."""
        with self._lock:
            found, refusal = self._grammars.get(structured), self._refusal(structured)
            if found is None and refusal is not None:
                found = KnownGrammar(structured, refusal=(refusal.reason, refusal.cause))
                self._retired.append(found)
            elif found is None:
                found = self._grammars[structured] = KnownGrammar(structured)
            found.num_rows += 1
            return found

    def unfollow(self, grammar: KnownGrammar) -> None:
        with self._lock:
            grammar.num_rows -= 1

    def drop_surplus(self, num_coming: int = 0) -> None:
        """Drop what nobody uses, as far as there is no room for it beside so many that are being compiled."""
        with self._lock:
            surplus = [grammar for grammar in self._retired if not grammar.num_rows]
            self._retired = [grammar for grammar in self._retired if grammar.num_rows]
            idle = [grammar for grammar in self._grammars.values() if grammar.idle]
            count, size_bytes = self.usage()
            count += num_coming
            while idle and (
                len(idle) > self._limits.idle
                or count >= self._limits.grammars
                or size_bytes >= self._limits.total_bytes
            ):
                grammar = idle.pop(0)
                del self._grammars[grammar.structured]
                surplus.append(grammar)
                count, size_bytes = count - 1, size_bytes - grammar.size_bytes
        for grammar in surplus:
            self._drop(grammar)

    def usage(self) -> tuple[int, int]:
        """The number of grammars and the memory that they use together, in bytes."""
        with self._lock:
            grammars = self._all()
            return len(grammars), _size_bytes(grammars)

    def has_share(self, client: str) -> bool:
        """True if a client may have one more grammar. A client may use as much as is left free, so one alone gets half.

        The client "" is the process's own user, which has no bound.
        """
        with self._lock:
            used = [each for each in self._all() if not each.idle]
            held = [each for each in used if client in each.users.values()]
            most, most_bytes = self._limits.grammars - len(used), self._limits.total_bytes - _size_bytes(used)
            return not client or (len(held) < most and _size_bytes(held) < most_bytes)

    def close(self) -> None:
        with self._lock:
            grammars = self._all()
            self._grammars.clear()
            self._retired.clear()
        for grammar in grammars:
            self._drop(grammar)

    def _all(self) -> tuple[KnownGrammar, ...]:
        return (*self._grammars.values(), *self._retired)

    def _refusal(self, structured: StructuredOutput) -> Refusal | None:
        refusal = self._refusals.get(structured)
        if refusal is not None and self._clock() >= refusal.until_s:
            del self._refusals[structured]
            return None
        return refusal


def _size_bytes(grammars: Iterable[KnownGrammar]) -> int:
    return sum(grammar.size_bytes for grammar in grammars)
