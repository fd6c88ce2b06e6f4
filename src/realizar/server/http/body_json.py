"""JSON of request bodies: as strict as that of files, without lone surrogates, and with a bounded cost of parsing."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from realizar.server.errors import ApiError, refused
from realizar.strict_json import StrictJSONError, is_too_large, parse_strictly

MAX_CONTAINERS = 1 << 16
MAX_VALUES = 1 << 20
MAX_KEYS = 100_000
"""Bounds on the brackets, commas and object keys of a body. Parsing holds the interpreter's lock and so delays all
other requests: a hundred thousand keys take about a tenth of a second.
"""
_BYTES_PER_VALUE = 48
_BYTES_PER_CONTAINER = 160
_BYTES_PER_KEY = 250  # and a list of pairs while it is parsed
_WIDEST_CHARACTER = 4  # bytes of each character of a text that holds one beyond the basic plane

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KEY_END = re.compile(rb'"\s*:')


def parse_json(body: bytes) -> Any:
    """Parse a body. It raises ApiError 400, whose message states the fault and its place."""
    if is_too_large(body, MAX_CONTAINERS, MAX_VALUES) or _has_too_many_keys(body):
        raise _bad("it has too many values")
    try:
        value = parse_strictly(str(body, "utf-8"))
        if _SURROGATE.search(body):
            msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise _bad(f"it is not UTF-8 at byte {error.start}") from None
    except StrictJSONError as error:
        place = "" if error.position is None else f" at character {error.position}"
        raise _bad(f"{error}{place}") from None
    except msgspec.DecodeError:
        raise _bad("it has a lone surrogate, which UTF-8 can't express") from None
    return value


def parsed_size(body: bytes) -> int:
    """An upper bound of the bytes that a body's parsed value takes."""
    text = len(body) * (1 if body.isascii() else _WIDEST_CHARACTER)
    values = _BYTES_PER_VALUE * min(body.count(b","), MAX_VALUES)
    values += _BYTES_PER_KEY * min(body.count(b":"), MAX_KEYS)
    return text + values + _BYTES_PER_CONTAINER * min(body.count(b"[") + body.count(b"{"), MAX_CONTAINERS)


def _has_too_many_keys(body: bytes) -> bool:
    if body.count(b":") <= MAX_KEYS:
        return False
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote that is left begins or ends a text
    return any(place >= MAX_KEYS for place, _ in enumerate(_KEY_END.finditer(bare)))


def _bad(reason: str) -> ApiError:
    return refused(f"We could not parse the JSON body of your request: {reason}.", code="invalid_json")
