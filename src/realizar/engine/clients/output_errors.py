"""What a request's output says went wrong, as an error to raise."""

from __future__ import annotations

from realizar.errors import InvalidRequestError, RealizarError, RequestFailedError, StepMemoryError
from realizar.outputs import TokenOutput


def error_of(output: TokenOutput) -> RealizarError | None:
    """Why a request ended without its output; None for one that goes on or ended well."""
    error = output.error
    if error is None:
        return None
    if error.cause == "request":
        return InvalidRequestError(error.message, error.param)
    return StepMemoryError(error.message) if error.cause == "memory" else RequestFailedError(error.message)
