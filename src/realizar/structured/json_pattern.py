r"""Rewriting of regular expressions in JSON schemas for llguidance. Standard library only.

llguidance 1.9 reads a set that contains all control characters as if it contained every JSON escape: `[^"]` then allows
`\"`. Such sets usually are negated sets, so negated sets are changed to exclude U+0001, which no text needs. Other ways
to write such a set are refused.
"""

from __future__ import annotations

import re
from typing import NoReturn

from realizar.structured.ascii_classes import ascii_classes, set_start_length
from realizar.structured.schema_refusal import refuse_schema

_LEFT_OUT = r"\x01"
_CONTROL_RANGE = re.compile(
    r"(\\x[01]|\\x\{0*1?[0-9a-fA-F]\}|\\[uU]\{?0*[01][0-9a-fA-F]\b|\\[0-7atnvfrc]|[\x00-\x1f]).{0,2}-"
)
_PROPERTY = re.compile(r"\\([pP])(\{[^}]{0,100}\}|.)", re.DOTALL)
_SET_OPERATIONS = ("&&", "--", "~~")
_LOOK_AROUNDS = ("(?=", "(?!", "(?<=", "(?<!")


def safe_pattern(pattern: str) -> str:
    r"""Rewrite an expression: negated sets exclude U+0001, and `\d`, `\w` and `\s` become sets of ASCII.

    Raises:
        InvalidRequestError: the expression has a set that can't be made safe.
    """
    try:
        pattern = ascii_classes(pattern)
    except ValueError as error:
        refuse_schema(f"pattern {pattern[:100]!r}: {error}")
    written: list[str] = []
    depth = at = 0
    while at < len(pattern):
        found = _PROPERTY.match(pattern, at)
        if found is not None:
            piece = _property(pattern, found)
            length = len(found[0])
        elif pattern[at] == "\\":
            piece, length = pattern[at : at + 2], 2
        elif pattern[at] == "[":
            depth += 1
            piece, length = _set_start(pattern, at)
        else:
            if depth and pattern.startswith(_SET_OPERATIONS, at):
                _refuse(pattern, f"set operation {pattern[at : at + 2]}")
            if not depth and pattern.startswith(_LOOK_AROUNDS, at):
                _refuse(pattern, "look-around")
            depth -= depth > 0 and pattern[at] == "]"
            piece, length = pattern[at], 1
        if depth and _CONTROL_RANGE.match(pattern, at):
            _refuse(pattern, "range of control characters")
        written.append(piece)
        at += length
    return "".join(written)


def _property(pattern: str, found: re.Match[str]) -> str:
    if "^" in found[2] or "!" in found[2]:
        _refuse(pattern, f"negation in {found[0]}")
    return found[0] if found[1] == "p" else f"[{found[0]}--{_LEFT_OUT}]"


def _set_start(pattern: str, at: int) -> tuple[str, int]:
    """The start of a set, with U+0001 if it is negated, and its length in the pattern."""
    if pattern.startswith("[:", at):
        _refuse(pattern, "named set [:")
    length = set_start_length(pattern, at)
    start = pattern[at : at + length]
    if start.endswith("]") and pattern.startswith("-", at + length):
        _refuse(pattern, "range from ]")
    return start + (_LEFT_OUT if start.startswith("[^") else ""), length


def _refuse(pattern: str, what: str) -> NoReturn:
    refuse_schema(f"pattern {pattern[:100]!r} has a {what}, which is not supported")
