"""Formats of JSON schemas that llguidance takes wider than their standards are, narrowed. Standard library only."""

from __future__ import annotations

from typing import Any

# RFC 3339 has second 60 only where a leap second was: none is written.
_SECONDS = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}

# RFC 5321: 64 characters before the @, labels of 63.
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = rf"^{_ATOM}{{1,31}}(\.{_ATOM}{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}$"


def narrow_format(schema: dict[str, Any]) -> None:
    """Add to a schema's `format`, or put in its place, the pattern that makes it strict."""
    name = schema.get("format")
    if name == "email":
        del schema["format"]
        _add_pattern(schema, _EMAIL)
    elif isinstance(name, str) and name in _SECONDS:
        _add_pattern(schema, _SECONDS[name])


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
    else:
        schema["pattern"] = pattern
