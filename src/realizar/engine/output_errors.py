"""What a request's output says went wrong, as an error to raise."""

from __future__ import annotations

from realizar.errors import InvalidRequestError, RealizarError, StepMemoryError
from realizar.outputs import TokenOutput


def error_of(output: TokenOutput) -> RealizarError | None:
    """Why a request ended without its output; None for one that goes on or ended well."""
    if output.error is None:
        return None
    if output.out_of_memory:
        return StepMemoryError(output.error)
    return InvalidRequestError(output.error, "structured")
