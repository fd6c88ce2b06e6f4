"""Compilers of strangers' chat templates, a request's and a pulled model's; and the process in which they render:
`python -m realizar.server.request_templates SOCKET`.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from realizar.errors import ChatTemplateError
from realizar.ipc.apart import Processes, WorkEndedError, answer_asks, processor_time
from realizar.tokenizer.templates.budget import seconds_for_size
from realizar.tokenizer.templates.chat_messages import TemplateBoundsError, TemplateFailedError
from realizar.tokenizer.templates.chat_template import Render, compile_template

_REQUEST_CPU_S = 1.0  # of all renderings of a request, about ten of which find out what its template takes
_MOST_CPU_S = 0.6  # of a rendering by itself; a budget has a half of it, and compiling a large template takes 0.2 s
_LEAST_CPU_S = 0.01  # the timer takes a time of 0 for none
_MEMORY_BYTES = 512 << 20


class _Ask(msgspec.Struct, frozen=True):
    """Compile a template, and render it if `variables` (JSON) are there. Texts are as `_as_bytes` makes them.

    `cpu_s`: processor seconds that are left to the request, beyond what the size of the variables adds.
    """

    source: bytes
    cpu_s: float
    variables: bytes | None = None


class _Made(msgspec.Struct, frozen=True):
    """The answer. `used_s` is to be subtracted from the request's `cpu_s`."""

    text: bytes
    names_tools: bool
    used_s: float
    error: bytes | None = None
    exceeds_bounds: bool = False


def _as_bytes(text: str) -> bytes:
    """UTF-8, in which lone surrogates pass."""
    return text.encode("utf-8", "surrogatepass")


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_PROCESSES = Processes(
    (sys.executable, "-m", "realizar.server.request_templates"), _Made, "chat templates",
    most_idle=3, answer_s=30.0,  # as many as there are threads that plan requests
)  # fmt: skip


class RequestCompiler:
    """Compiles the template of one request, whose renderings share an allowance of processor time."""

    def __init__(self) -> None:
        self._left_s = _REQUEST_CPU_S

    def __call__(self, source: str) -> tuple[Render, bool]:
        """See `compile_template`."""

        return functools.partial(self.render, source), self._made(source, None).names_tools

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """See `Render`; of a template's source."""
        return _as_text(self._made(source, json.dumps(variables).encode()).text)

    def _made(self, source: str, variables: bytes | None) -> _Made:
        if self._left_s <= 0:
            raise TemplateBoundsError("the chat template takes too long")
        try:
            made = _PROCESSES.ask(_Ask(_as_bytes(source), self._left_s, variables))
        except WorkEndedError as error:
            self._left_s = 0.0
            fault = "takes too long" if error.too_long else "ended the process that rendered it"
            raise TemplateBoundsError(f"the chat template {fault}") from None
        self._left_s -= made.used_s
        if made.error is not None:
            raise (TemplateBoundsError if made.exceeds_bounds else TemplateFailedError)(_as_text(made.error))
        return made


def compile_apart(source: str) -> tuple[Render, bool]:
    """See `compile_template`. For the template of a model that clients chose: each rendering has its own allowance."""

    def render(variables: Mapping[str, Any]) -> str:
        return RequestCompiler().render(source, variables)

    return render, RequestCompiler()(source)[1]


_compiled = functools.lru_cache(maxsize=16)(compile_template)


def _answer(ask: _Ask) -> _Made:
    variables = None if ask.variables is None else json.loads(ask.variables)
    extra_s = 0.0 if variables is None else seconds_for_size(variables)
    text, names_tools, error, exceeds_bounds = "", False, None, False
    with processor_time(max(min(ask.cpu_s, _MOST_CPU_S), _LEAST_CPU_S) + extra_s):
        started_s = time.process_time()
        try:
            render, names_tools = _compiled(_as_text(ask.source))
            text = "" if variables is None else render(variables)
        except ChatTemplateError as failure:
            error = _as_bytes(str(failure))
            exceeds_bounds = isinstance(failure, TemplateBoundsError)
    used_s = max(0.0, time.process_time() - started_s - extra_s)
    return _Made(_as_bytes(text), names_tools, used_s, error, exceeds_bounds)


if __name__ == "__main__":
    sys.exit(answer_asks(_Ask, _answer, _MEMORY_BYTES))
