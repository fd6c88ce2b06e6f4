"""Work on what strangers send, in processes that may die: `Processes` asks them, and `answer_asks` runs in each.

An operation of Python or of a library in C can't be interrupted, and a stranger's text or file may choose one that
takes minutes, or break it. So the kernel ends such a process when the time for its work is up, whatever it is doing,
and others' work gets another one.
"""

from __future__ import annotations

import atexit
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, Full, LifoQueue
from typing import Any, Generic, TypeVar

from realizar.errors import EngineUnavailableError
from realizar.ipc.frames import Channel, ChannelError, ChannelTimeoutError
from realizar.ipc.process_limits import limit_process, start_process

_Made = TypeVar("_Made")


class WorkEndedError(Exception):
    """The process has ended, or was, without an answer; `too_long` says that its time was up."""

    def __init__(self, *, too_long: bool) -> None:
        super().__init__()
        self.too_long = too_long


class Processes(Generic[_Made]):
    """Processes for one kind of work, started when they are wanted; a few wait for the next work. Thread-safe.

    Args:
        command: what starts one; the descriptor of its socket is appended.
        made_type: the type of an answer, a record.
        purpose: what they are for, in errors.
        most_idle: how many wait, at most.
        answer_s: seconds within which one has to answer, in case it hangs, or the machine swaps.
    """

    def __init__(
        self, command: Sequence[str], made_type: type[_Made], purpose: str, *, most_idle: int, answer_s: float
    ) -> None:
        self._command, self._made_type, self._purpose, self._answer_s = command, made_type, purpose, answer_s
        self._idle: LifoQueue[_Process[_Made]] = LifoQueue(most_idle)
        atexit.register(self.close)

    def ask(self, record: Any) -> _Made:
        """Ask a process, and wait for its answer. Raises WorkEndedError, and EngineUnavailableError without a process.

        One that had ended before it was asked costs nothing: another is asked.
        """
        for _ in range(2):
            process = self._take()
            made = process.ask(record, self._answer_s)
            if made is not None:
                try:
                    self._idle.put_nowait(process)
                except Full:
                    process.close()
                return made
        raise EngineUnavailableError(f"the processes for {self._purpose} end before they are asked", 1.0)

    def _take(self) -> _Process[_Made]:
        try:
            while not (process := self._idle.get_nowait()).alive:
                process.close()
        except Empty:
            try:
                return _Process(self._command, self._made_type)
            except OSError as error:
                reason = f"no process can be started for {self._purpose}: {error.strerror}"
                raise EngineUnavailableError(reason, 1.0) from error
        return process

    def close(self) -> None:
        """End those that wait."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()


class _Process(Generic[_Made]):
    """Raises OSError where it can't be started."""

    def __init__(self, command: Sequence[str], made_type: type[_Made]) -> None:
        self._process, ours = start_process(command)
        self._channel: Channel[_Made] = Channel(ours, made_type)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, record: Any, answer_s: float) -> _Made | None:
        """Ask and wait; None from a process that had ended before. WorkEndedError: it gives none, and is ended."""
        asked = False
        try:
            self._channel.send(record, answer_s)
            asked = True
            return self._channel.receive(answer_s)
        except ChannelError as error:
            status, timed_out = self.close(), isinstance(error, ChannelTimeoutError)
            if not asked and not timed_out:
                return None
            raise WorkEndedError(too_long=timed_out or status == -signal.SIGPROF) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> int:
        """End the process; returns its exit status."""
        self._channel.close()
        self._process.kill()
        return self._process.wait()


def answer_asks(ask_type: Any, answer: Callable[[Any], Any], memory_bytes: int) -> int:
    """Answer records of a type until the other end closes, within so much more memory; returns the exit status.

    The program's last argument is the descriptor of its socket.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    channel: Channel[Any] = Channel(socket.socket(fileno=int(sys.argv[-1])), ask_type)
    limit_process(memory_bytes)
    try:
        while True:
            channel.send(answer(channel.receive()))
    except ChannelError:
        return 0  # nobody asks any more


@contextmanager
def processor_time(limit_s: float) -> Iterator[None]:
    """Have the kernel end this process if the block takes more seconds of processor time, which are not 0."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
