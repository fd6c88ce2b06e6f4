"""JSON from strangers: as strict as that of files, and without lone surrogates."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from realizar.server.errors import ApiError, refused
from realizar.strict_json import StrictJSONError, is_too_large, parse_strictly

MAX_CONTAINERS = 200_000
MAX_VALUES = 2 << 20
"""Brackets, and commas, that a body may hold."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """The value of a body.

    Raises:
        ApiError: 400; the message says what is wrong and where.
    """
    if is_too_large(body, MAX_CONTAINERS, MAX_VALUES):
        raise _bad("too many values")
    try:
        value = parse_strictly(str(body, "utf-8"))
        if _SURROGATE.search(body):
            msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise _bad(f"not UTF-8 at byte {error.start}") from None
    except StrictJSONError as error:
        place = "" if error.position is None else f" at character {error.position}"
        raise _bad(f"{error}{place}") from None
    except msgspec.DecodeError:
        raise _bad("a lone surrogate, which UTF-8 can't express") from None
    return value


def _bad(reason: str) -> ApiError:
    return refused(f"We could not parse the JSON body of your request: {reason}.", code="invalid_json")
