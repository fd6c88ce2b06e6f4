"""`Worker`: the engine process's handle of a worker, and `WorkerLimits`."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from realizar.frames import ChannelError, ChannelTimeoutError
from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import Encode as Encoder
from realizar.structured.workers.messages import Encode, Encoded, FromWorker, Load
from realizar.structured.workers.server_handle import ServerHandle

_LOG = logging.getLogger(__name__)
_MOST_WORKERS = 8  # that grammars share
_END_S = 10.0  # for a process that was killed


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of the grammars' time, memory and number.

    Attributes:
        compile_cpu_s: processor seconds of a compilation. The heaviest grammars within the size bounds take half a
            second.
        compile_s: seconds of a compilation, in case its process hangs.
        heavy_s: processor seconds of a compilation beyond which a grammar has a worker of its own.
        stall_s: seconds in which a worker that grammars share must get on with something.
        step_s: seconds in which a worker with a single grammar must.
        memory_bytes: memory of one grammar and its rows; the heaviest takes about 50 MB.
        total_bytes: memory of all grammars, above which none is compiled.
        grammars: number of grammars, including those of waiting requests.
        workers: that grammars share; None is a half of the cores, and 8 at the most.
        idle: number of idle grammars that are kept for later requests.
        queued_per_client: grammars of one client that may wait to be compiled.
        slots: rows that may follow grammars, those that have ended while their masks were computed among them.
        drafts: of a row.
    """

    compile_cpu_s: int = 3
    compile_s: float = 60.0
    heavy_s: float = 0.05
    stall_s: float = 1.0
    step_s: float = 10.0
    memory_bytes: int = 256 << 20
    total_bytes: int = 2 << 30
    grammars: int = 256
    workers: int | None = None
    idle: int = 32
    queued_per_client: int = 128
    slots: int = 1024
    drafts: int = 16

    @property
    def most_workers(self) -> int:
        """`workers`, with a number for None."""
        return min(max((os.cpu_count() or 1) // 2, 1), _MOST_WORKERS) if self.workers is None else self.workers


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
    """One process, which one thread uses; only `kill` may be called by others.

    Attributes:
        place: its index in the columns of the workers in the shared memory.
        owner: the number of the only grammar that it may have; 0 for a worker that grammars share.
        grammars: numbers of those that it has been told to load. num_loading: those that it has not answered for.
        slots: of the rows that it follows, and of some that have ended.
        is_doomed: True once it was ended; rows go to another one when its channel says so.
        is_dismissed: True once nobody needs it.
        progress: of the shared memory, when it was looked at last. stalled_s: for so long it has got on with nothing,
            though there was something to do.

    Args:
        memory_bytes: memory that it may use.
        encode: converts text to ids without special tokens, with the model's tokenizer, or None.

    Raises:
        ServerError: the process can't be started.
    """

    def __init__(self, server: ServerHandle, place: int, memory_bytes: int, encode: Encoder | None) -> None:
        self._server, self._encode, self.place = server, encode, place
        self._child, self._channel = server.fork(place, memory_bytes)
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
        return self._child.pid

    def fileno(self) -> int:
        """The channel's descriptor, for waiting on several workers."""
        return self._channel.fileno()

    def post(self, record: Any) -> None:
        """Send it a message without waiting. That it is gone is found by what is read from it."""
        with suppress(ChannelError):
            self._channel.post(record)

    def flush(self) -> None:
        """Send what it had no room for."""
        with suppress(ChannelError):
            self._channel.flush()

    def take_answers(self) -> None:
        """Take in what the fork server has told of its workers; one that does not answer in time is ended."""
        self._server.take_answers()

    def receive_now(self) -> FromWorker | None:
        """What it has sent, or None; texts to encode are answered. Raises ChannelError if it has ended."""
        while isinstance(record := self._channel.receive_now(), Encode):
            self.stalled_s = 0.0
            self.post(Encoded(self._encoded(record.text)))
        return record

    def compile(self, number: int, structured: StructuredOutput, cpu_s: int, limit_s: float) -> FromWorker:
        """Have it compile a grammar, and wait for the answer. Raises WorkerDiedError."""
        end_s = time.monotonic() + limit_s
        try:
            self._channel.send(Load(number, structured.kind, structured.value, cpu_s), limit_s)
            while isinstance(record := self._channel.receive(max(end_s - time.monotonic(), 1e-3)), Encode):
                self._channel.send(Encoded(self._encoded(record.text)), limit_s)
            return record
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
        self._server.kill(self._child)

    def close(self) -> None:
        """End the process without waiting, and close the channel; idempotent."""
        self.kill()
        self._server.reap(self._child)
        self._channel.close()

    def death(self, cpu_s: int | None = None) -> WorkerDiedError | None:
        """How it has ended, once its channel has; None as long as that is not known.

        Args:
            cpu_s: seconds of processor time that it had.
        """
        server, child = self._server, self._child
        server.take_answers()
        server.reap(child)
        if not server.is_explained(child):
            return None
        status = child.status
        if self._limit_s is not None:
            return WorkerDiedError(f"took longer than {self._limit_s:g} s", out_of_time=True)
        if child.refusal is not None:
            return WorkerDiedError(f"found no process: {child.refusal}", out_of_time=False, is_own=False)
        if cpu_s is not None and status == -signal.SIGXCPU:
            return WorkerDiedError(f"took longer than {cpu_s} s", out_of_time=True, cause="request")
        if status is not None and status < 0:
            return WorkerDiedError(f"crashed ({_signal_name(-status)})", out_of_time=False, cause="request")
        cause: ErrorCause = "request" if status else "engine"
        return WorkerDiedError("ended its process", out_of_time=False, cause=cause, is_own=status is not None)

    def _awaited_death(self, cpu_s: int) -> WorkerDiedError:
        end_s = time.monotonic() + _END_S
        while (death := self.death(cpu_s)) is None:
            if time.monotonic() > end_s:
                return WorkerDiedError("ended its process", out_of_time=False)
            time.sleep(1e-4)
        return death

    def _encoded(self, text: str) -> tuple[int, ...] | None:
        if self._encode is None:
            return None
        try:
            ids = self._encode(text)
            return None if ids is None else tuple(ids)
        except BaseException:  # noqa: BLE001 - a panic of the tokenizers library is not an Exception
            _LOG.warning("the tokenizer failed on a text that a grammar asks for")
            return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
