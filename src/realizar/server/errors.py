"""Errors as every dialect answers them: a status, a message, and the field at fault (`http/dialects.py` writes them).

The official client retries 408, 409, 429 and all 5xx by itself, so a client's mistake always gets another 4xx status.
Messages contain no paths, stack traces or memory addresses.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from realizar.errors import (
    CapacityError,
    ChatTemplateError,
    ContextLengthError,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    StepMemoryError,
    TokenizerError,
)

_LOG = logging.getLogger(__name__)
# Messages quote clients' texts, so each of these takes time in proportion to a message's length.
_ADDRESS = re.compile(r" ?(?:object )?at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?:/[\w.+-]++){2,}+")
_INTERNAL_FILE = re.compile(r".*\.(?:py|so|gguf|safetensors|json)\b")
_MAX_MESSAGE = 2_000
_VERBS = ("must ", "has ", "holds ", "is ", "needs ")
_DIED = (
    "the engine stopped while this request was open, and is started again; a request that stops it repeatedly"
    " is refused"
)


_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
PLAIN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
        }
    },
}
"""JSON schema of `plain_body`."""


class ApiError(Exception):
    """An error answer.

    Args:
        message: one line for the caller.
        param: path of the field at fault, such as `messages[0].content`.
        code: error code for programs.
        details: the error for programs, in dialects that have a place for it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        self.details = details

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def whole_message(self) -> str:
        """The message with the field at fault, for forms that have no other place for it."""
        return self.message if (self.param or "") in self.message else f"{self.param}: {self.message}"


def plain_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error in OpenAI's form, which is also that of connections without a request."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The 400 error of a request that is at fault."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    """The 400 error of a known field whose value is not supported. `reason` continues the sentence after the field."""
    return refused(f"{param} {reason}", param, "unsupported_parameter")


def later(status: int, message: str, code: str, retry_after_s: float) -> ApiError:
    """The error of a request that may be sent again after so many seconds."""
    return ApiError(status, message, code=code, headers={"retry-after": str(max(1, math.ceil(retry_after_s)))})


def closing(status: int, message: str, code: str) -> ApiError:
    """An error after which the connection is closed, as the rest of the request is not read."""
    return ApiError(status, message, code=code, headers={"connection": "close"})


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Translate the field that errors raised inside name: `names` maps the engine's fields to the request's."""
    try:
        yield
    except InvalidRequestError as error:
        known = error.param or ""
        if isinstance(error, ContextLengthError) and "prompt" in names:
            known = "prompt"  # also where prompt and output are too long together, as OpenAI's errors name it
        if known not in names:
            raise
        raise type(error)(_renamed(str(error), known, names), names[known]) from None
    except ApiError as error:
        if error.param is None or error.param not in names:
            raise
        message = _renamed(error.message, error.param, names)
        raise refused(message, names[error.param], error.code) from None


@contextmanager
def about(param: str) -> Iterator[None]:
    """Add the field to errors raised inside that name none."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param is not None:
            raise
        raise type(error)(str(error), param) from None


def _renamed(message: str, known: str, names: Mapping[str, str]) -> str:
    """A message about a field, with the name that the request's dialect gives the field.

    Other messages begin with a field's name too ("structured output is not possible"): a verb must follow it.
    """
    rest = message.removeprefix(f"{known} ")
    return f"{names[known]} {rest}" if rest != message and rest.startswith(_VERBS) else message


def to_api_error(error: BaseException) -> ApiError:
    """The client's view of an exception. An unexpected exception is logged whole and answered with a plain 500."""
    if isinstance(error, ApiError):
        return error
    message = cleaned(str(error))
    match error:
        case ContextLengthError():
            # LangChain looks for the code in the exception's text, which the client makes of the message alone.
            return refused(f"{message} (context_length_exceeded)", error.param, "context_length_exceeded")
        case InvalidRequestError():
            return refused(message, error.param)
        case ChatTemplateError():
            return refused(message, "messages", "chat_template_error")
        case StepMemoryError():
            return later(503, message, "out_of_memory", 1.0)
        case RequestFailedError():
            # The request would fail again: the header keeps the official clients from retrying it.
            return ApiError(500, message, code="request_failed", headers={"x-should-retry": "false"})
        case CapacityError():
            return refused(message, None, "request_too_large")
        case QueueFullError():
            return later(429, message, "rate_limit_exceeded", error.retry_after_s)
        case EngineUnavailableError():
            return later(503, message, "engine_unavailable", error.retry_after_s)
        case EngineDeadError():
            return later(503, _DIED, "engine_died", 5.0)
        case RecursionError():
            return refused("the request is nested too deeply", None, "invalid_json")
        case TokenizerError():
            return ApiError(500, "the tokenizer failed on the text of this request", code="internal_error")
    _LOG.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer; its log names the error", code="internal_error")


def cleaned(message: str) -> str:
    """A message as one line of valid UTF-8, without this machine's paths and memory addresses."""
    line = " ".join(message.split()).encode("utf-8", "replace").decode()
    line = _PATH.sub(_without_file, _ADDRESS.sub("", line))
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + "..."


def _without_file(path: re.Match[str]) -> str:
    file = _INTERNAL_FILE.match(path[0])
    return path[0] if file is None else f"a file{path[0][file.end() :]}"
