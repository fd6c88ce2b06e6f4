"""`GrammarWorker`: a grammar's process as the engine's process sees it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from realizar.errors import InvalidRequestError
from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.channel import ChannelError, ChannelTimeoutError
from realizar.structured.workers.messages import (
    Compile,
    Done,
    Encode,
    Encoded,
    FromWorker,
    Refused,
    Step,
    Stepped,
)
from realizar.structured.workers.server_handle import ServerHandle

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What grammars may take.

    Attributes:
        compile_cpu_s: processor time of compiling one. The heaviest that the bounds on size allow take half a second.
        compile_s: time of compiling one, should its process hang.
        step_s: time of one step's masks, should its process hang.
        memory_bytes: of one grammar and the rows that follow it; the heaviest takes some 50 MB.
        total_bytes: of all grammars, above which none is compiled.
        processes: of grammars, with those of requests that wait.
        idle: of these, how many are kept for requests to come.
        queued_per_client: grammars of one client that may wait to be compiled.
    """

    compile_cpu_s: int = 3
    compile_s: float = 60.0
    step_s: float = 10.0
    memory_bytes: int = 256 << 20
    total_bytes: int = 2 << 30
    processes: int = 256
    idle: int = 32
    queued_per_client: int = 128


class WorkerDiedError(Exception):
    """A grammar's process has ended or been ended; the message continues "compiling it" or "following it".

    `out_of_time`: it was ended because it took too long. `cause`: `request` where it crashed or used up its processor
    time, which the grammar may do again; `engine` where a clock ran out, as it does on a machine that swaps, or nobody
    knows how it ended.
    """

    def __init__(self, reason: str, *, out_of_time: bool, cause: ErrorCause = "engine") -> None:
        super().__init__(reason)
        self.out_of_time, self.cause = out_of_time, cause


class GrammarWorker:
    """One process. Only `kill` may be called while another thread uses it.

    Attributes:
        memory_bytes: what it had taken when it answered last.

    Args:
        encode: the model's tokenizer: text to ids, without special ones; None where it is not known.

    Raises:
        ServerError: it can't be started.
    """

    def __init__(self, server: ServerHandle, encode: Callable[[str], Sequence[int]] | None) -> None:
        self._server, self._encode = server, encode
        self.pid, self._channel = server.fork()
        self.memory_bytes = 0
        self._lock = threading.Lock()
        self._reaped = False

    def compile(self, structured: StructuredOutput, limits: WorkerLimits) -> None:
        """Compile the process's grammar; once.

        Raises:
            InvalidRequestError: it is malformed, not supported or impossible.
            WorkerDiedError: the process crashed, or took too much time.
        """
        try:
            self._channel.send(Compile(structured.kind, structured.value, limits.compile_cpu_s), limits.compile_s)
            answer = self._answer(limits.compile_s)
            if not isinstance(answer, Done | Refused):
                raise ChannelError("it answered out of turn")
        except ChannelError as error:
            raise self._death(error, limits.compile_s, limits.compile_cpu_s) from error
        if isinstance(answer, Refused):
            self.close()
            raise InvalidRequestError(answer.reason, "structured")
        self.memory_bytes = answer.memory_bytes

    def fileno(self) -> int:
        """Can be read when the process has said something; to wait for several at once."""
        return self._channel.fileno()

    def send_step(self, step: Step, timeout_s: float) -> None:
        """Have a step's masks computed; `receive_step` waits for them. Raises WorkerDiedError."""
        try:
            self._channel.send(step, timeout_s)
        except ChannelError as error:
            raise self._death(error, timeout_s) from error

    def receive_step(self, timeout_s: float) -> Stepped:
        """What came of the step that was sent. Raises WorkerDiedError."""
        try:
            answer = self._answer(timeout_s)
            if isinstance(answer, Stepped):
                self.memory_bytes = answer.memory_bytes
                return answer
            raise ChannelError("it answered out of turn")
        except ChannelError as error:
            raise self._death(error, timeout_s) from error

    def kill(self) -> int | None:
        """End the process, from any thread; idempotent. Its exit status, where this call finds it."""
        with self._lock:
            if self._reaped:
                return None
            self._reaped = True
            if self._server.alive:  # nobody else has its pid before the server has reaped it
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            return self._server.reap(self.pid)

    def close(self) -> None:
        """End the process, which nobody uses any more; idempotent."""
        self.kill()
        self._channel.close()

    def _answer(self, timeout_s: float) -> FromWorker:
        """The next answer; the tokenizer's questions before it are answered."""
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
            return tuple(self._encode(text))
        except BaseException:  # noqa: BLE001 - a panic of the tokenizer's library is no Exception
            _LOG.warning("the tokenizer failed on a text that a grammar asks for")
            return None

    def _death(self, error: ChannelError, timeout_s: float, cpu_s: int | None = None) -> WorkerDiedError:
        """End the process, and say how it ended."""
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
