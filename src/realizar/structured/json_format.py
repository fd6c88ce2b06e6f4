"""Narrowing of formats and bounds in JSON schemas that llguidance reads too widely. Standard library only."""

from __future__ import annotations

import sys
from typing import Any

from realizar.structured.schema_refusal import refuse_schema

# RFC 3339 allows second 60 only for leap seconds, so it is not written.
_SECONDS = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}

# RFC 5321: 64 characters before the @, labels of 63.
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = rf"^{_ATOM}{{1,31}}(\.{_ATOM}{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}$"


def narrow_format(schema: dict[str, Any]) -> None:
    """Add a strict pattern to a schema's `format`, or replace the format by one."""
    name = schema.get("format")
    if name == "email":
        del schema["format"]
        _add_pattern(schema, _EMAIL)
    elif isinstance(name, str) and name in _SECONDS:
        _add_pattern(schema, _SECONDS[name])


def narrow_bounds(schema: dict[str, Any]) -> None:
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


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" in schema:
        others = schema.get("allOf", [])
        if not isinstance(others, list):
            refuse_schema("allOf must be a list")
        schema["allOf"] = [*others, {"pattern": pattern}]
    else:
        schema["pattern"] = pattern
