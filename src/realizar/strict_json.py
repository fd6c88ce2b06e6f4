"""JSON of unknown origin: bounded before it is parsed, no NaN, no duplicate keys. Standard library only."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


class StrictJSONError(ValueError):
    """Text that is not JSON, or that Python would take and we do not.

    Attributes:
        position: the character where it is wrong, or None where that is not known.
    """

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason)
        self.position = position


def is_too_large(data: bytes, max_containers: int, max_values: int) -> bool:
    """Whether brackets or commas are more than allowed: what parsing costs hangs on these, not on the size alone."""
    return data.count(b"[") + data.count(b"{") > max_containers or data.count(b",") > max_values


def parse_strictly(text: str) -> Any:
    """The value of a text.

    Raises:
        StrictJSONError: not JSON, nested too deeply, a duplicate key, NaN, an infinity, or a number that is too long.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise StrictJSONError(error.msg, error.pos) from None
    except RecursionError:
        raise StrictJSONError("nested too deeply") from None
    except StrictJSONError:
        raise
    except ValueError:  # Python's bound on the digits of an integer
        raise StrictJSONError("a number of too many digits") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise StrictJSONError(f"duplicate key {key[:80]!a}")
        seen.add(key)
    return values


def _refuse(name: str) -> NoReturn:
    raise StrictJSONError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise StrictJSONError(f"the number {digits[:40]} overflows")
    return value
