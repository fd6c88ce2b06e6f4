"""Numbers in the constants of JSON schemas: those that llguidance would change, or crash on, are refused.

It takes a `const` or `enum` number for a double: of 2^53 + 1 it makes 2^53, and near -2^63 it recurses without an end.
"""

from __future__ import annotations

from typing import Any

from realizar.structured.schema_refusal import refuse_schema

_MOST = 2**63 - 1024  # beyond, doubles don't fit into 64 bits


def check_constants(schema: dict[str, Any]) -> None:
    """Refuse a schema whose `const` or `enum` holds an integer that is not kept as it is; subschemas are not looked at.

    Raises:
        InvalidRequestError: it does.
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
