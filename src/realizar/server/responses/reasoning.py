"""Reasoning as text that a client sends back unread, in the field `encrypted_content`.

It is not encrypted: it is the model's reasoning, in base64 behind a mark. Texts of other servers say nothing here.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "realizar:"


def sealed(text: str) -> str:
    """The field's value for a reasoning."""
    return _MARK + base64.b64encode(text.encode()).decode()


def revealed(value: str | None) -> str:
    """The reasoning of a value; empty without one, or if another server made it."""
    if value is None or not value.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
