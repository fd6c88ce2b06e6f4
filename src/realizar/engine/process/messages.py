"""What goes between the engine and who asks it: commands one way, events the other. msgspec and the nouns.

The same records serve an engine on a thread, where they are handed over as they are, and one in a process of its own,
where `engine.transport` writes them as msgpack.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from realizar import errors
from realizar.backends.base import Capacity
from realizar.backends.select import Device
from realizar.config import EngineConfig
from realizar.engine.core.metrics import EngineStats
from realizar.outputs import TokenOutput
from realizar.request import Request


class EngineInfo(msgspec.Struct, frozen=True):
    """What is known of an engine once its model is loaded.

    Attributes:
        architecture: of the model. vocab_size, hidden_size: its dimensions.
        context_length: tokens of a request, prompt and output, as configured or as the model has it.
        max_request_tokens: the same, or what the KV cache holds if that is less.
        max_running: choices in one step.
        capacity: of the backend.
        pid: of the engine's process.
        device: where the model runs. device_label: for people, with the name of a GPU.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    max_request_tokens: int
    max_running: int
    capacity: Capacity
    pid: int
    device: Device = "cpu"
    device_label: str = "cpu"


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first command, to an engine in a process of its own: the path of a model, and how to run it.

    `fit_context`: where the model's own context does not fit into memory, take half of it, or half of that.
    `fit_running`: take as many rows as suit the device, whatever the configuration says.
    `log_level`: of this program's log there, a name of `logging`'s in capitals.
    """

    model: str
    config: EngineConfig
    fit_context: bool = False
    fit_running: bool = False
    log_level: str = "WARNING"


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Queue a request; the answer is `Accepted` or `Refused`."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or one choice of it; no answer."""

    request_id: str
    choice: int | None = None


class AskStats(msgspec.Struct, frozen=True, tag="ask_stats"):
    """The answer is `StatsAnswer` with the same ticket."""

    ticket: int


class AskAudit(msgspec.Struct, frozen=True, tag="ask_audit"):
    """The answer is `AuditAnswer` with the same ticket."""

    ticket: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The answer is `Pong` with the same ticket, at once: also in the middle of a step."""

    ticket: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine; open requests get no more outputs."""


Command: TypeAlias = Load | Add | Abort | AskStats | AskAudit | Ping | Shutdown


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """What is being done before the engine is ready, and the share done, 0 to 1."""

    what: str
    share: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; commands are obeyed from now on."""

    info: EngineInfo


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """A request is queued."""

    request_id: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step gave."""

    outputs: tuple[TokenOutput, ...]


class StatsAnswer(msgspec.Struct, frozen=True, tag="stats"):
    ticket: int
    stats: EngineStats


class AuditAnswer(msgspec.Struct, frozen=True, tag="audit"):
    """`fault` is what the audit found wrong, or None."""

    ticket: int
    fault: str | None


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """`step_s`: how long the step that is running has been, 0 between steps."""

    ticket: int
    step_s: float


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error of `realizar.errors` by the name of its class."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request is not queued."""

    request_id: str
    error: ErrorRecord


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last event of an engine that could not load, or stopped."""

    error: ErrorRecord


Event: TypeAlias = Loading | Ready | Accepted | Refused | Outputs | StatsAnswer | AuditAnswer | Pong | Failed


def record_error(error: BaseException) -> ErrorRecord:
    """An error as a record; one that is no RealizarError becomes one line of that base."""
    if isinstance(error, errors.RealizarError):
        name, text = type(error).__name__, str(error)
        return ErrorRecord(name, text, getattr(error, "param", None), getattr(error, "retry_after_s", None))
    text = " ".join(str(error).split())
    return ErrorRecord("RealizarError", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def restore_error(record: ErrorRecord) -> errors.RealizarError:
    """The error of a record, of its own class where a message and the record's fields make one."""
    if record.kind in _OF_REQUESTS:
        return _OF_REQUESTS[record.kind](record.message, record.param)
    if record.kind in _PASSING:
        return _PASSING[record.kind](record.message, record.retry_after_s or 1.0)
    return _PLAIN.get(record.kind, errors.RealizarError)(record.message)


_OF_REQUESTS = {kind.__name__: kind for kind in (errors.InvalidRequestError, errors.ContextLengthError)}
_PASSING = {kind.__name__: kind for kind in (errors.QueueFullError, errors.EngineUnavailableError)}
_PLAIN: dict[str, type[errors.RealizarError]] = {
    kind.__name__: kind
    for kind in (
        errors.UnsupportedModelError,
        errors.TokenizerError,
        errors.HubError,
        errors.CapacityError,
        errors.EngineDeadError,
        errors.StepError,
        errors.RequestFailedError,
    )
}
