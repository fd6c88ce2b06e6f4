"""`error_of` turns a failed output into an error to raise."""

from __future__ import annotations

from realizar.errors import InvalidRequestError, RealizarError, RequestFailedError, StepMemoryError
from realizar.outputs import TokenOutput


def error_of(output: TokenOutput) -> RealizarError | None:
    """The error of a request that ended without its output; None for other outputs."""
    error = output.error
    if error is None:
        return None
    if error.cause == "request":
        return InvalidRequestError(error.message, error.param)
    return StepMemoryError(error.message) if error.cause == "memory" else RequestFailedError(error.message)
