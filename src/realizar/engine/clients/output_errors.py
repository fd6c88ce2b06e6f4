"""`error_of` turns the record of a failed request into an error to raise."""

from __future__ import annotations

from realizar.errors import InvalidRequestError, RealizarError, RequestFailedError, StepMemoryError
from realizar.outputs import RowError


def error_of(error: RowError) -> RealizarError:
    """The error of a request that ended without its output."""
    if error.cause == "request":
        return InvalidRequestError(error.message, error.param)
    return StepMemoryError(error.message) if error.cause == "memory" else RequestFailedError(error.message)
