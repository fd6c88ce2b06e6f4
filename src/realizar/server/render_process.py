"""A process that renders the chat templates of requests: `python -m realizar.server.render_process SOCKET`.

An operation of Python can't be interrupted, and a stranger's template may choose one that takes minutes. So the kernel
ends this process when a rendering has used up its time, whatever it is doing, and the one that asked starts another.
The process ends when the other end of its socket closes.
"""

from __future__ import annotations

import functools
import json
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from realizar.errors import ChatTemplateError
from realizar.ipc.frames import Channel, ChannelError
from realizar.structured.workers.process_limits import limit_process
from realizar.tokenizer.templates.budget import seconds_for_size
from realizar.tokenizer.templates.chat_messages import TemplateBoundsError
from realizar.tokenizer.templates.chat_template import Render, compile_template

COMMAND = (sys.executable, "-m", "realizar.server.render_process")
_MOST_CPU_S = 0.6  # of a rendering by itself; a budget has a half of it, and compiling a large template takes 0.2 s
_LEAST_CPU_S = 0.01  # the timer takes a time of 0 for none
_MEMORY_BYTES = 512 << 20


class Ask(msgspec.Struct, frozen=True):
    """Compile a template, and render it if `variables` (JSON) are there. Texts are as `as_bytes` makes them.

    `cpu_s`: processor seconds that are left to the request, beyond what the size of the variables adds.
    """

    source: bytes
    cpu_s: float
    variables: bytes | None = None


class Made(msgspec.Struct, frozen=True):
    """The answer. `used_s` is to be subtracted from the request's `cpu_s`."""

    text: bytes
    names_tools: bool
    used_s: float
    error: bytes | None = None
    exceeds_bounds: bool = False


def as_bytes(text: str) -> bytes:
    """UTF-8, in which lone surrogates pass."""
    return text.encode("utf-8", "surrogatepass")


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


class RenderProcess:
    def __init__(self, channel: Channel[Ask]) -> None:
        self._channel = channel
        self._compiled = functools.lru_cache(maxsize=16)(compile_template)

    def run(self) -> None:
        """Answer until the other end closes."""
        while True:
            self._channel.send(self._answer(self._channel.receive()))

    def _answer(self, ask: Ask) -> Made:
        variables = None if ask.variables is None else json.loads(ask.variables)
        extra_s = 0.0 if variables is None else seconds_for_size(variables)
        limit_s = max(min(ask.cpu_s, _MOST_CPU_S), _LEAST_CPU_S) + extra_s
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends the process
        started_s = time.process_time()
        text, names_tools, error, exceeds_bounds = b"", False, None, False
        try:
            text, names_tools = self._made(as_text(ask.source), variables)
        except ChatTemplateError as failure:
            error = as_bytes(str(failure))
            exceeds_bounds = isinstance(failure, TemplateBoundsError)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        used_s = max(0.0, time.process_time() - started_s - extra_s)
        return Made(text, names_tools, used_s, error, exceeds_bounds)

    def _made(self, source: str, variables: Mapping[str, Any] | None) -> tuple[bytes, bool]:
        made: tuple[Render, bool] = self._compiled(source)
        render, names_tools = made
        text = "" if variables is None else render(variables)
        return as_bytes(text), names_tools


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    channel: Channel[Ask] = Channel(socket.socket(fileno=int(sys.argv[1])), Ask)
    limit_process(_MEMORY_BYTES)
    try:
        RenderProcess(channel).run()
    except ChannelError:
        return 0  # nobody asks any more
    return 1


if __name__ == "__main__":
    sys.exit(main())
