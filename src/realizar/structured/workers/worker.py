"""`GrammarWorker`: the engine process's handle of a grammar's process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from realizar.errors import InvalidRequestError
from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import Encode as Encoder
from realizar.structured.workers.channel import ChannelError, ChannelTimeoutError
from realizar.structured.workers.messages import (
    Compile,
    Done,
    Encode,
    Encoded,
    Follow,
    FromWorker,
    Leave,
    Lines,
    Look,
    Refused,
    Slow,
    Stuck,
    Used,
    WantLines,
)
from realizar.structured.workers.server_handle import ServerHandle
from realizar.structured.workers.state_lines import NO_LINES, StateLines

_LOG = logging.getLogger(__name__)
_SEND_S = 0.5  # for a process that reads whenever it has computed a mask


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of the grammars' time, memory and number.

    Attributes:
        compile_cpu_s: processor seconds of a compilation. The heaviest grammars within the size bounds take half a
            second.
        compile_s: seconds of a compilation, in case its process hangs.
        step_s: seconds for a row's masks, in case a process hangs.
        memory_bytes: memory of one grammar and its rows; the heaviest takes about 50 MB.
        total_bytes: memory of all grammars, above which none is compiled.
        processes: number of grammars, including those of waiting requests.
        more_processes: processes beyond one for a grammar, of all grammars with many rows; None is a half of the cores.
        idle: number of idle grammars that are kept for later requests.
        queued_per_client: grammars of one client that may wait to be compiled.
        slow_s: seconds in which a process should answer for all its rows; `slow_answers` that are slower, and it gets
            help.
        slots: rows that may follow grammars, those that have ended while their masks were computed among them.
        drafts: of a row.
    """

    compile_cpu_s: int = 3
    compile_s: float = 60.0
    step_s: float = 10.0
    memory_bytes: int = 256 << 20
    total_bytes: int = 2 << 30
    processes: int = 256
    more_processes: int | None = None
    idle: int = 32
    queued_per_client: int = 128
    slow_s: float = 4e-4
    slow_answers: int = 16
    slots: int = 1024
    drafts: int = 16

    @property
    def most_more_processes(self) -> int:
        """`more_processes`, with a number for None."""
        return (os.cpu_count() or 1) // 2 if self.more_processes is None else self.more_processes


class WorkerDiedError(Exception):
    """A grammar's process has ended or was ended; the message continues "compiling it" or "following it".

    `out_of_time`: the process was ended because it took too long. `cause`: `request` if it crashed or used up its
    processor time, which the grammar may cause again; `engine` if it exceeded a time limit, as on a machine that swaps,
    or if its end is unexplained.
    """

    def __init__(self, reason: str, *, out_of_time: bool, cause: ErrorCause = "engine") -> None:
        super().__init__(reason)
        self.out_of_time, self.cause = out_of_time, cause


class GrammarWorker:
    """One process. Only `kill` may be called while another thread uses it.

    Attributes:
        memory_bytes: memory that it has used.
        num_rows: rows that are placed there.
        is_followed: True while it has a row, which may have ended since and be asked about.

    Args:
        encode: converts text to ids without special tokens, with the model's tokenizer, or None.
        lines: of the shared memory, of which the process gets some for its known states once it wants them.

    Raises:
        ServerError: the process can't be started.
    """

    def __init__(self, server: ServerHandle, encode: Encoder | None, lines: StateLines) -> None:
        self._server, self._encode = server, encode
        self.pid, self._channel = server.fork()
        self.memory_bytes = self.num_rows = 0
        self.is_followed = False
        self._lock = threading.Lock()
        self._reaped = False
        self._lines = lines
        self._first_line = NO_LINES
        self._structured: StructuredOutput | None = None  # what it compiles

    def compile(self, structured: StructuredOutput, limits: WorkerLimits) -> None:
        """Compile the process's grammar. This is called once.

        Raises:
            InvalidRequestError: the grammar is malformed, not supported or impossible.
            WorkerDiedError: the process crashed, or took too much time.
        """
        self._structured = structured
        try:
            command = Compile(
                structured.kind, structured.value, limits.compile_cpu_s, limits.slow_s, limits.slow_answers
            )
            self._channel.send(command, limits.compile_s)
            answer = self._answer(limits.compile_s)
            if not isinstance(answer, Done | Refused):
                raise ChannelError("it sent an unexpected answer")
        except ChannelError as error:
            raise self._death(error, limits.compile_s, limits.compile_cpu_s) from error
        if isinstance(answer, Refused):
            self.close()
            raise InvalidRequestError(answer.reason, "structured")
        self.memory_bytes = answer.memory_bytes

    def fileno(self) -> int:
        """The channel's descriptor, for waiting on several processes."""
        return self._channel.fileno()

    def follow(self, key: int, slot: int, token_ids: Sequence[int]) -> None:
        """Have it follow a row; see `Follow`. Raises WorkerDiedError."""
        self._send(Follow(key, slot, tuple(token_ids)))

    def look(self) -> None:
        """Have it look for questions, where no bell rings. Raises WorkerDiedError."""
        self._send(Look())

    def leave(self, key: int) -> None:
        """Have it forget a row. A process that has died is found by what it is asked next."""
        with suppress(ChannelError):
            self._channel.send(Leave(key), _SEND_S)

    def take_news(self) -> list[Stuck | Slow]:
        """What it has sent by now; texts to encode are answered.

        Raises:
            WorkerDiedError: it has ended, and all that it sent was taken before.
        """
        news: list[Stuck | Slow] = []
        try:
            while (record := self._channel.receive_now()) is not None:
                if isinstance(record, Encode):
                    self._channel.send(Encoded(self._encoded(record.text)), _SEND_S)
                elif isinstance(record, Used):
                    self.memory_bytes = record.memory_bytes
                elif isinstance(record, WantLines):
                    self._give_lines()
                elif isinstance(record, Stuck | Slow):
                    news.append(record)
                else:
                    raise ChannelError("it sent an unexpected message")
        except ChannelError as error:
            if not news:
                raise self._death(error, _SEND_S) from error
        return news

    def late(self, limit_s: float) -> WorkerDiedError:
        """End the process, which has not answered in time; returns the error that says so."""
        return self._death(ChannelTimeoutError("it does not answer"), limit_s)

    def kill(self) -> int | None:
        """End the process, from any thread; idempotent. Returns its exit status, if this call gets it."""
        with self._lock:
            if self._reaped:
                return None
            self._reaped = True
            if self._server.alive:  # the pid is not reused before the server has reaped the process
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            status = self._server.reap(self.pid)
            if self._first_line != NO_LINES:
                self._lines.give_back(self._structured)
            return status

    def close(self) -> None:
        """End the process and close the channel; idempotent."""
        self.kill()
        self._channel.close()

    def _send(self, record: Follow | Look) -> None:
        try:
            self._channel.send(record, _SEND_S)
        except ChannelError as error:
            raise self._death(error, _SEND_S) from error

    def _give_lines(self) -> None:
        """Give it lines for its known states, if some are free."""
        with self._lock:
            if self._first_line == NO_LINES and not self._reaped:
                self._first_line = self._lines.take(self._structured)
        if self._first_line != NO_LINES:
            self._channel.send(Lines(self._first_line), _SEND_S)

    def _answer(self, timeout_s: float) -> FromWorker:
        """Wait for the next answer, and encode texts for the process meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            record = self._channel.receive(max(deadline_s - time.monotonic(), 1e-3))
            if not isinstance(record, Encode):
                return record
            self._channel.send(Encoded(self._encoded(record.text)), timeout_s)

    def _encoded(self, text: str) -> tuple[int, ...] | None:
        if self._encode is None:
            return None
        try:
            ids = self._encode(text)
            return None if ids is None else tuple(ids)
        except BaseException:  # noqa: BLE001 - a panic of the tokenizers library is not an Exception
            _LOG.warning("the tokenizer failed on a text that a grammar asks for")
            return None

    def _death(self, error: ChannelError, timeout_s: float, cpu_s: int | None = None) -> WorkerDiedError:
        """End the process; returns the error that describes its end."""
        status = self.kill()
        self._channel.close()
        if isinstance(error, ChannelTimeoutError):
            return WorkerDiedError(f"took longer than {timeout_s:g} s", out_of_time=True)
        if cpu_s is not None and status == -signal.SIGXCPU:
            return WorkerDiedError(f"took longer than {cpu_s} s", out_of_time=True, cause="request")
        if status is not None and status < 0:
            return WorkerDiedError(f"crashed ({_signal_name(-status)})", out_of_time=False, cause="request")
        return WorkerDiedError("ended its process", out_of_time=False, cause="request" if status else "engine")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
