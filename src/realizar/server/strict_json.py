"""JSON from strangers: bounded before it is parsed, no NaN, no duplicate keys, no lone surrogates."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import msgspec

from realizar.server.errors import ApiError, refused

MAX_CONTAINERS = 200_000
MAX_VALUES = 2 << 20
"""Brackets, and commas, that a body may hold: what parsing costs hangs on these and not on its size alone."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _RefusedError(ValueError):
    """JSON that Python would take and we do not."""


def parse_json(body: bytes) -> Any:
    """The value of a body.

    Raises:
        ApiError: 400; the message says what is wrong and where.
    """
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS or body.count(b",") > MAX_VALUES:
        raise _bad("too many values")
    try:
        value = json.loads(
            str(body, "utf-8"),
            object_pairs_hook=_distinct,
            parse_constant=_refuse_constant,
            parse_float=_parse_finite,
        )
        if _SURROGATE.search(body):
            msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise _bad(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _bad(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _bad("nested too deeply") from None
    except msgspec.DecodeError:
        raise _bad("a lone surrogate, which UTF-8 can't express") from None
    except _RefusedError as error:
        raise _bad(str(error)) from None
    except ValueError:  # Python's bound on the digits of an integer
        raise _bad("a number of too many digits") from None
    return value


def _bad(reason: str) -> ApiError:
    return refused(f"We could not parse the JSON body of your request: {reason}.", code="invalid_json")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RefusedError(f"duplicate key {key[:80]!a}")
        seen.add(key)
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is not a JSON number")


def _parse_finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {digits[:40]} overflows")
    return value
