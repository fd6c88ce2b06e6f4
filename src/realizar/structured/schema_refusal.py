"""The error of a JSON schema that is refused."""

from __future__ import annotations

from typing import NoReturn

from realizar.errors import InvalidRequestError


def refuse_schema(reason: str) -> NoReturn:
    """Raise InvalidRequestError for a schema; `reason` is one line."""
    raise InvalidRequestError(f"the JSON schema can't be honoured: {reason}", "structured")
