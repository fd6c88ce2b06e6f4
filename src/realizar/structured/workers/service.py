"""`GrammarService`: grammars over a model's vocabulary, compiled and followed in processes of their own."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.errors import InvalidRequestError, QueueFullError, RealizarError, RequestFailedError
from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.kind_names import refusal
from realizar.structured.workers.compile_queue import CompileJob, CompileQueue, Report, Ticket
from realizar.structured.workers.followed import FollowedGrammar, FollowedRow
from realizar.structured.workers.known_grammars import KnownGrammars
from realizar.structured.workers.mask_memory import MaskMemory
from realizar.structured.workers.masks import StepMasks
from realizar.structured.workers.messages import Vocabulary
from realizar.structured.workers.server_handle import SERVER_COMMAND, ServerError, ServerHandle
from realizar.structured.workers.worker import GrammarWorker, WorkerDiedError, WorkerLimits

_LOG = logging.getLogger(__name__)
_RETRY_S = 5.0


class GrammarService:
    """Compiles grammars on a thread of its own, a share for each client, and computes masks of rows.

    `masks`, `open_row` and `close_row` are for the engine, one at a time; everything else is thread-safe. No process is
    started before the first grammar, or `start`.

    Args:
        token_bytes: what each id adds to the text; `Tokenizer.vocabulary_bytes`.
        special_ids: control tokens, which are no text.
        end_ids: ids that end an answer.
        vocab_size: logits per row; ids from `len(token_bytes)` on are never allowed.
        encode: text to ids without special ones, for text that a grammar leaves no choice about; else greedy.
        limits: what grammars may take.
        clock: seconds, monotonic, by which refusals are forgotten.

    Raises:
        InvalidRequestError: there are no end ids, so that no output could be complete.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Collection[int],
        end_ids: Collection[int],
        vocab_size: int,
        encode: Callable[[str], Sequence[int]] | None = None,
        *,
        limits: WorkerLimits | None = None,
        server_command: Sequence[str] = SERVER_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ends = tuple(sorted({index for index in end_ids if index < vocab_size}))
        if not ends:
            raise InvalidRequestError("structured output needs a token that ends an answer; the model has none")
        self._limits = limits or WorkerLimits()
        self._vocabulary = Vocabulary(
            tuple(token_bytes[:vocab_size]),
            tuple(special_ids),
            ends,
            vocab_size,
            encode is not None,
            self._limits.memory_bytes,
        )
        self._encode = encode
        self._command = tuple(server_command)
        self.num_words = -(-vocab_size // 32)
        self._memory = MaskMemory()
        self._masks = StepMasks(self._memory, self.num_words, self._limits.step_s, self._revive, self._condemn)
        self._server: ServerHandle | None = None
        self._server_lock = threading.Lock()
        self._closed = False
        self._known = KnownGrammars(self._limits, clock)
        self._queue = CompileQueue(self._limits.queued_per_client)
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._keys = itertools.count()

    def start(self) -> None:
        """Read the vocabulary now, in the background: the first grammar would wait for it."""
        with self._thread_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compile_all, name="realizar-grammars", daemon=True)
                self._thread.start()

    def prepare(self, structured: StructuredOutput, client: str = "") -> None:
        """Compile a grammar, unless that was done before; waits for it.

        Raises:
            InvalidRequestError: it is malformed, not supported, impossible or too heavy.
            RequestFailedError: no process came to an end with it, which may be the machine's fault.
            QueueFullError: there is no room for it now. EngineDeadError: the service was closed.
        """
        while not self._known.has(structured):
            done = threading.Event()
            errors: list[RealizarError] = []

            def report(error: RealizarError | None, done: threading.Event = done, errors: Any = errors) -> None:
                errors.extend([] if error is None else [error])
                done.set()

            ticket = self.prepare_later(structured, client, report)
            try:
                done.wait()
            finally:
                self.cancel(ticket)
            if errors:
                raise errors[0]
        self._known.check(structured)

    def prepare_later(self, structured: StructuredOutput, client: str, on_done: Report) -> Ticket:
        """Queue a grammar of a client's; `on_done` hears on another thread when it is compiled, or why it is not.

        Raises:
            QueueFullError: too many of the client's wait. EngineDeadError: the service was closed.
        """
        ticket = Ticket(structured, client, on_done)
        self._queue.put(ticket)
        self.start()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Wait for a grammar no more: where nobody else does, it is not compiled. Idempotent."""
        self._queue.cancel(ticket)

    def hold(
        self, request_id: str, structured: StructuredOutput, is_open: Callable[[str], bool], client: str = ""
    ) -> bool:
        """Keep a compiled grammar for a request for as long as it is open, from the next call on; whether it is there.

        Raises:
            InvalidRequestError, RequestFailedError: it was refused.
        """
        return self._known.hold(request_id, structured, is_open, client)

    def open_row(self, structured: StructuredOutput, output: Sequence[int]) -> FollowedRow:
        """A row at the grammar's begin, or after some output. It is in error where its grammar was refused."""
        grammar, refused = self._known.follow(structured)
        row = FollowedRow(next(self._keys), grammar, list(output))
        if refused is not None:
            row.error, row.cause = refused.reason, refused.cause
        return row

    def close_row(self, row: FollowedRow) -> None:
        """End a row."""
        self._known.unfollow(row)

    def forget(self, structured: StructuredOutput) -> None:
        """Compile a grammar anew the next time: rows share what is learned of it, and this may be worn out."""
        self._known.forget(structured)

    def masks(self, rows: Sequence[tuple[FollowedRow, Sequence[int]]]) -> list[NDArray[np.uint32]]:
        """Allowed ids of rows, each with the drafts that follow it: uint32 [drafts + 1, words] each.

        Masks after a draft that is not allowed are empty, and nobody reads those after one that ends the output. A row
        that can't go on is put in `error` and its masks are empty.
        """
        return self._masks.compute(rows)

    def close(self) -> None:
        """End all processes; what waits is refused. Idempotent; nobody may be computing masks."""
        self._queue.close()
        with self._server_lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._thread is not None:
            self._thread.join()
        self._known.close()
        self._memory.close()

    def _compile_all(self) -> None:
        """The compiler's thread."""
        try:
            self._running_server()
        except ServerError as error:
            _LOG.warning("no structured output for now: %s", error)
        while (job := self._queue.take()) is not None:
            self._queue.finish(job, self._outcome(job))

    def _outcome(self, job: CompileJob) -> RealizarError | None:
        """Why a job's grammar is not compiled, or None."""
        try:
            self._run(job)
        except RealizarError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one grammar must not cost the others their compiler
            _LOG.exception("a grammar could not be compiled")
            return RequestFailedError(f"the grammar can't be compiled: {type(error).__name__}")
        return None

    def _run(self, job: CompileJob) -> None:
        """Compile a grammar, unless that was done; remember what came of it.

        Raises:
            InvalidRequestError, RequestFailedError: it is refused. QueueFullError: there is no room for its process.
        """
        if self._known.has(job.structured):
            return
        for surplus in self._known.take_surplus():
            surplus.close()
        count, size_bytes = self._known.usage()
        if count >= self._limits.processes:
            raise QueueFullError(f"open requests have {count} different grammars, as many as may", _RETRY_S)
        if size_bytes >= self._limits.total_bytes:
            raise QueueFullError("the grammars of open requests take all memory that grammars may have", _RETRY_S)
        clients = {ticket.client for ticket in tuple(job.tickets)}
        if clients and not any(map(self._known.has_share, clients)):
            raise QueueFullError("the grammars of this client's open requests take all of its share", _RETRY_S)
        try:
            worker = self._compile(job.structured, job)
        except (InvalidRequestError, RequestFailedError) as error:
            cause: ErrorCause = "request" if isinstance(error, InvalidRequestError) else "engine"
            self._known.refuse(job.structured, str(error), cause)
            raise
        except ServerError as error:
            if error.lasting:
                raise InvalidRequestError(f"structured output is not possible with this model: {error}") from error
            raise QueueFullError(f"structured output is not possible now: {error}", _RETRY_S) from error
        if worker is not None:
            self._known.add(job.structured, worker)

    def _compile(self, structured: StructuredOutput, job: CompileJob | None = None) -> GrammarWorker | None:
        """A process that has compiled a grammar; None if nobody waits for the job any more.

        A process that crashes is tried once more, in case it was ended from outside.

        Raises:
            InvalidRequestError: the grammar is refused, or its process dies of it. ServerError: there is no process.
            RequestFailedError: its process dies, and the machine may be at fault.
        """
        tries = 2
        cause: ErrorCause = "request"  # only where every death says so
        while True:
            worker = self._new_worker()
            if job is not None:
                job.stop = worker.kill
            try:
                if job is not None and not job.wanted:
                    worker.close()
                    return None
                worker.compile(structured, self._limits)
                return worker
            except WorkerDiedError as death:
                if job is not None and not job.wanted:
                    return None
                tries -= 1
                cause = "engine" if death.cause == "engine" else cause
                if death.out_of_time or not tries:
                    _LOG.warning("compiling a grammar %s; its request is refused", death)
                    error = refusal(structured, f"compiling it {death}")
                    raise (error if cause == "request" else RequestFailedError(str(error))) from death
            except BaseException:  # a refusal, or a fault of the program: nobody else would end the process
                worker.close()
                raise
            finally:
                if job is not None:
                    job.stop = None

    def _revive(self, grammar: FollowedGrammar) -> GrammarWorker:
        """A new process for a grammar that rows follow."""
        worker = self._compile(grammar.structured)
        if worker is None:
            raise ServerError("nobody waits for it")
        return worker

    def _condemn(self, grammar: FollowedGrammar, reason: str, cause: ErrorCause) -> None:
        """A row has ended its grammar's process by itself: nobody else shall follow it."""
        error = refusal(grammar.structured, reason)
        _LOG.warning("%s", error)
        self._known.refuse(grammar.structured, str(error), cause)

    def _new_worker(self) -> GrammarWorker:
        """A process for a grammar. A server that died is replaced once. Raises ServerError."""
        try:
            return GrammarWorker(self._running_server(), self._encode)
        except ServerError as error:
            if error.lasting or (self._server is not None and self._server.alive):
                raise
        return GrammarWorker(self._running_server(), self._encode)

    def _running_server(self) -> ServerHandle:
        """The fork server; started if there is none, or none that lives. Raises ServerError."""
        with self._server_lock:
            if self._closed:
                raise ServerError("the engine is being closed")
            if self._server is not None and not self._server.alive:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = ServerHandle(self._vocabulary, self._memory.descriptor, self._command)
            return self._server
