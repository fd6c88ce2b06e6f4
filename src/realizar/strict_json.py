"""Strict JSON for texts of unknown origin: no NaN, no duplicate keys, bounded before parsing. Standard library only."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn


class StrictJSONError(ValueError):
    """A text is not JSON, or is refused although Python would accept it.

    `position` is the index of the character at fault, or None if it is not known.
    """

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason)
        self.position = position


def is_too_large(data: bytes, max_containers: int, max_values: int) -> bool:
    """True if there are too many brackets or commas, which the cost of parsing depends on as much as on the size."""
    return data.count(b"[") + data.count(b"{") > max_containers or data.count(b",") > max_values


def parse_strictly(text: str) -> Any:
    """Raises StrictJSONError: not JSON, nested too deeply, a duplicate key, NaN, an infinity, or too long a number."""
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise StrictJSONError(error.msg, error.pos) from None
    except RecursionError:
        raise StrictJSONError("it is nested too deeply") from None
    except StrictJSONError:
        raise
    except ValueError:  # Python's bound on the digits of an integer
        raise StrictJSONError("a number has too many digits") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise StrictJSONError(f"duplicate key {key[:80]!a}")
    return values


def _refuse(name: str) -> NoReturn:
    raise StrictJSONError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise StrictJSONError(f"the number {digits[:40]} overflows")
    return value
