"""Errors as records, which processes send each other."""

from __future__ import annotations

import msgspec

from realizar import errors


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error of `realizar.errors`, identified by the name of its class."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


def record_error(error: BaseException) -> ErrorRecord:
    """An error as a record. An error of another kind becomes a RealizarError with one line."""
    if isinstance(error, errors.RealizarError):
        name, text = type(error).__name__, str(error)
        return ErrorRecord(name, text, getattr(error, "param", None), getattr(error, "retry_after_s", None))
    text = " ".join(str(error).split())
    return ErrorRecord("RealizarError", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def restore_error(record: ErrorRecord) -> errors.RealizarError:
    """The error of a record, of its own class if that can be made from the record's fields."""
    kind = _KINDS.get(record.kind, errors.RealizarError)
    if issubclass(kind, errors.InvalidRequestError):
        return kind(record.message, record.param)
    if issubclass(kind, errors.QueueFullError | errors.EngineUnavailableError):
        return kind(record.message, record.retry_after_s or 1.0)
    return kind(record.message)


_KINDS: dict[str, type[errors.RealizarError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.RealizarError) and kind is not errors.CheckpointError
}
