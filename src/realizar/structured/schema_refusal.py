"""The error of a refused JSON schema."""

from __future__ import annotations

from typing import NoReturn

from realizar.errors import InvalidRequestError

REFUSED = "the JSON schema can't be honoured: "


def refuse_schema(reason: str) -> NoReturn:
    """Raise the InvalidRequestError of a refused schema; `reason` is one line."""
    raise InvalidRequestError(f"{REFUSED}{reason}", "structured")
