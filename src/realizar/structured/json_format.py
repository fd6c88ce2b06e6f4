"""Narrowing of formats in JSON schemas that llguidance reads too widely. Standard library only."""

from __future__ import annotations

from typing import Any

from realizar.structured.schema_refusal import refuse_schema

# RFC 3339 allows second 60 only for leap seconds, so it is not written.
_SECONDS = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}

_KNOWN = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

# RFC 5321: 64 characters before the @, labels of 63.
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = rf"^{_ATOM}{{1,31}}(\.{_ATOM}{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}$"


def narrow_format(schema: dict[str, Any]) -> None:
    """Add a strict pattern to a schema's `format`, or replace the format by one. An unknown format says nothing."""
    name = schema.get("format")
    if isinstance(name, str) and name not in _KNOWN:
        del schema["format"]
    elif name == "email":
        del schema["format"]
        _add_pattern(schema, _EMAIL)
    elif isinstance(name, str) and name in _SECONDS:
        _add_pattern(schema, _SECONDS[name])


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" in schema:
        others = schema.get("allOf", [])
        if not isinstance(others, list):
            refuse_schema("allOf must be a list")
        schema["allOf"] = [*others, {"pattern": pattern}]
    else:
        schema["pattern"] = pattern
