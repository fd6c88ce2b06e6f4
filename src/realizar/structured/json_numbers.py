"""Numbers in JSON schemas that llguidance 1.9 would change or crash on: checks, and bounds in a form that it keeps to.

llguidance converts a number to a double: 2^53 + 1 becomes 2^53, and near -2^63 it recurses endlessly.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any

from realizar.structured.schema_refusal import refuse_schema

_MOST = 2**63 - 1024  # beyond, doubles don't fit into 64 bits
_MOST_BOUND = 2**62  # near 2^63 no expression of a range is made
_MOST_EXACT = 2**53
_MOST_STATES = 100_000
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def check_constants(schema: dict[str, Any]) -> None:
    """Check the integers in a schema's `const` and `enum`. Subschemas are not checked.

    Raises:
        InvalidRequestError: a double can't hold an integer exactly.
    """
    waiting = [(keyword, schema[keyword]) for keyword in ("const", "enum") if keyword in schema]
    while waiting:
        keyword, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(keyword, each) for each in value.values()]
        elif isinstance(value, list):
            waiting += [(keyword, each) for each in value]
        elif isinstance(value, int) and not (-_MOST <= value <= _MOST and int(float(value)) == value):
            refuse_schema(f"{keyword} has the integer {str(value)[:40]}, which no double holds exactly within 64 bits")


def narrow_bounds(schema: dict[str, Any]) -> None:
    """Write a schema's bounds of numbers so that llguidance keeps to them. Subschemas are not looked at.

    Bounds of integers become inclusive. Those that all 64-bit integers, or all doubles, are within say nothing.

    Raises:
        InvalidRequestError: a bound can't be kept to.
    """
    for keyword in _BOUNDS:
        _number(schema, keyword)
    _check_step(schema)
    named = schema.get("type")
    types = set(named) if isinstance(named, list) and all(isinstance(each, str) for each in named) else {named}
    if "integer" in types and "number" not in types:
        _to_inclusive(schema)
    else:
        _off_whole_bounds(schema)
    if types & {"integer", "number", None}:
        _check_bounds(schema, exact_step="number" in types or "integer" in types)


def _to_inclusive(schema: dict[str, Any]) -> None:
    """Make the bounds of an integer inclusive ones, and drop those of all 64-bit integers."""
    minimum, above = _number(schema, "minimum"), _number(schema, "exclusiveMinimum")
    maximum, below = _number(schema, "maximum"), _number(schema, "exclusiveMaximum")
    lows = [math.ceil(bound) for bound in (minimum,) if bound is not None]
    lows += [math.floor(bound) + 1 for bound in (above,) if bound is not None]
    highs = [math.floor(bound) for bound in (maximum,) if bound is not None]
    highs += [math.ceil(bound) - 1 for bound in (below,) if bound is not None]
    for keyword in _BOUNDS:
        if _number(schema, keyword) is not None:
            del schema[keyword]
    if lows and max(lows) > -(2**63):
        schema["minimum"] = max(lows)
    if highs and min(highs) < 2**63 - 1:
        schema["maximum"] = min(highs)


def _off_whole_bounds(schema: dict[str, Any]) -> None:
    """Replace exclusive bounds that llguidance 1.9 reads as inclusive ones.

    llguidance does so if the bound is a whole number and the range is no wider than 1: it allows 0 above 0 and below
    0.5. The replacement excludes values within a millionth of the range from the bound.
    """
    low, high = _number(schema, "exclusiveMinimum"), _number(schema, "exclusiveMaximum")
    bottom = low if low is not None else _number(schema, "minimum")
    top = high if high is not None else _number(schema, "maximum")
    if bottom is None or top is None or not 0 < top - bottom <= 1:
        return
    margin = (top - bottom) * 1e-6
    if low is not None and low == int(low):
        del schema["exclusiveMinimum"]
        schema["minimum"] = _rounded(low + margin)
    if high is not None and high == int(high):
        del schema["exclusiveMaximum"]
        schema["maximum"] = _rounded(high - margin)


def _check_bounds(schema: dict[str, Any], *, exact_step: bool) -> None:
    """Refuse bounds that are changed or can't be compiled, and drop those that all doubles are within.

    Args:
        exact_step: False if the type is not said here: for an integer, one is added to an exclusive bound, as a double.
    """
    for keyword in _BOUNDS:
        bound = _number(schema, keyword)
        if bound is None:
            continue
        if abs(bound) == sys.float_info.max and (bound < 0) == keyword.lower().endswith("minimum"):
            del schema[keyword]
        elif abs(bound) > _MOST_BOUND or (isinstance(bound, int) and int(float(bound)) != bound):
            refuse_schema(f"{keyword} {str(bound)[:40]} can't be enforced: it is beyond 2^62, or no double holds it")
        elif keyword.startswith("exclusive") and not exact_step and abs(bound) >= _MOST_EXACT:
            refuse_schema(f"{keyword} {str(bound)[:40]} can't be enforced without a type: it is 2^53 or beyond")


def _check_step(schema: dict[str, Any]) -> None:
    """Refuse a `multipleOf` whose expression has more states than a row can go through: one for each remainder."""
    step = _number(schema, "multipleOf")
    states = 0 if step is None else abs(Fraction(str(step)).numerator)
    for factor in (2, 5):
        while states and states % factor == 0:
            states //= factor
    if states > _MOST_STATES:
        refuse_schema(f"multipleOf {str(step)[:40]} can't be enforced: it has too many digits")


def _rounded(value: float) -> float:
    return float(f"{value:.15g}")


def _number(schema: dict[str, Any], keyword: str) -> float | None:
    """A bound, or None. JSON's numbers have no limits, but the arithmetic here and in llguidance has."""
    value = schema.get(keyword)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -sys.float_info.max <= value <= sys.float_info.max:
        refuse_schema(f"{keyword} is beyond the range of a double")
    return value
