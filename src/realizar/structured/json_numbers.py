"""A check of numbers in the constants of JSON schemas, which llguidance could change or crash on.

llguidance converts a `const` or `enum` number to a double: 2^53 + 1 becomes 2^53, and near -2^63 it recurses endlessly.
"""

from __future__ import annotations

from typing import Any

from realizar.structured.schema_refusal import refuse_schema

_MOST = 2**63 - 1024  # beyond, doubles don't fit into 64 bits


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
