"""Compilers of strangers' chat templates, which run in processes that can be ended: a request's, a pulled model's."""

from __future__ import annotations

import atexit
import functools
import json
import signal
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, Full, LifoQueue
from typing import Any

from realizar.errors import EngineUnavailableError
from realizar.ipc.frames import Channel, ChannelError, ChannelTimeoutError
from realizar.server.render_process import COMMAND, Ask, Made, as_bytes, as_text
from realizar.structured.workers.process_limits import start_process
from realizar.tokenizer.templates.chat_messages import TemplateBoundsError, TemplateFailedError
from realizar.tokenizer.templates.chat_template import Render

_REQUEST_CPU_S = 1.0  # of all renderings of a request, about ten of which find out what its template takes
_ANSWER_S = 30.0  # in case a process hangs, or the machine swaps
_MOST_IDLE = 3  # as many as there are threads that plan requests


class RequestCompiler:
    """Compiles the template of one request, whose renderings share an allowance of processor time."""

    def __init__(self) -> None:
        self._left_s = _REQUEST_CPU_S

    def __call__(self, source: str) -> tuple[Render, bool]:
        """See `compile_template`."""

        return functools.partial(self.render, source), self._made(source, None).names_tools

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """See `Render`; of a template's source."""
        return as_text(self._made(source, json.dumps(variables).encode()).text)

    def _made(self, source: str, variables: bytes | None) -> Made:
        if self._left_s <= 0:
            raise TemplateBoundsError("the chat template takes too long")
        ask = Ask(as_bytes(source), self._left_s, variables)
        try:
            made = _PROCESSES.ask(ask) or _PROCESSES.ask(ask)
        except TemplateBoundsError:
            self._left_s = 0.0
            raise
        if made is None:
            raise EngineUnavailableError("the processes for chat templates end before they are asked", 1.0)
        self._left_s -= made.used_s
        if made.error is not None:
            raise (TemplateBoundsError if made.exceeds_bounds else TemplateFailedError)(as_text(made.error))
        return made


def compile_apart(source: str) -> tuple[Render, bool]:
    """See `compile_template`. For the template of a model that clients chose: each rendering has its own allowance."""

    def render(variables: Mapping[str, Any]) -> str:
        return RequestCompiler().render(source, variables)

    return render, RequestCompiler()(source)[1]


class _Process:
    """A process that renders. Raises EngineUnavailableError: it can't be started."""

    def __init__(self) -> None:
        try:
            self._process, ours = start_process(COMMAND)
        except OSError as error:
            reason = f"no process can be started for the chat template: {error.strerror}"
            raise EngineUnavailableError(reason, 1.0) from error
        self._channel: Channel[Made] = Channel(ours, Made)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, ask: Ask) -> Made | None:
        """Ask and wait; None from a process that had ended before. TemplateBoundsError: it gives none, and is ended."""
        asked = False
        try:
            self._channel.send(ask, _ANSWER_S)
            asked = True
            return self._channel.receive(_ANSWER_S)
        except ChannelError as error:
            status = self.close()
            if not asked and not isinstance(error, ChannelTimeoutError):
                return None
            if isinstance(error, ChannelTimeoutError) or status == -signal.SIGPROF:
                raise TemplateBoundsError("the chat template takes too long") from None
            raise TemplateBoundsError("the chat template ended the process that rendered it") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> int:
        """End the process; returns its exit status."""
        self._channel.close()
        self._process.kill()
        return self._process.wait()


class _Processes:
    """Processes without work, for the next templates. Thread-safe."""

    def __init__(self) -> None:
        self._idle: LifoQueue[_Process] = LifoQueue(_MOST_IDLE)

    def ask(self, ask: Ask) -> Made | None:
        """Ask a process, which is started if none is idle; raises as `_Process.ask` does.

        Raises EngineUnavailableError where none can be started.
        """
        process = self._take()
        made = process.ask(ask)
        if made is not None:
            try:
                self._idle.put_nowait(process)
            except Full:
                process.close()
        return made

    def _take(self) -> _Process:
        try:
            while not (process := self._idle.get_nowait()).alive:
                process.close()
        except Empty:
            return _Process()
        return process

    def close(self) -> None:
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()


_PROCESSES = _Processes()
atexit.register(_PROCESSES.close)
