"""Numbers of a record whose fields declare their ranges, checked when it is made. Standard library only."""

from __future__ import annotations

import functools
import math
from dataclasses import field, fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from realizar.errors import InvalidRequestError


def number(default: float | None, low: float, high: float = math.inf, *, above: bool = False, **metadata: Any) -> Any:
    """A field of numbers from `low`, or from `above` it, to `high`; integers where its type says so."""
    return field(default=default, metadata={"range": (low, high, above), **metadata})


def check_ranges(record: Any) -> None:
    """Raise InvalidRequestError for the first number of a dataclass that is out of its range or of another kind."""
    for name, kind, is_optional, (low, high, above) in _ranges(record.__class__):
        value = getattr(record, name)
        if value is None and is_optional:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            meaning = "an integer" if kind is Integral else "a number"
            raise InvalidRequestError(f"{name} must be {meaning}, not {value!r}", name)
        if not low <= value <= high:  # nor is NaN
            wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise InvalidRequestError(f"{name} must be {wanted}, not {value}", name)
        if above and value <= low:
            raise InvalidRequestError(f"{name} must be above {low}, not {value}", name)


@functools.cache
def _ranges(record: Any) -> list[tuple[str, Any, bool, tuple[float, float, bool]]]:
    """Each number of a dataclass: name, kind, whether it may be None, and the range, which a base may have declared."""
    numbers = {
        each.name: each
        for kind in record.__mro__
        if is_dataclass(kind)
        for each in fields(kind)
        if "range" in each.metadata
    }
    return [
        (name, Integral if "int" in str(each.type) else Real, "None" in str(each.type), each.metadata["range"])
        for name, each in numbers.items()
    ]
