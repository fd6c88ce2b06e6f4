r"""Rewriting of `\d`, `\w` and `\s` in regular expressions to sets of ASCII, as in Python's `re.ASCII`.

llguidance reads them as Unicode classes, with digits of all scripts. Standard library only.
"""

from __future__ import annotations

import re

# The last member is a range, so that a `-` after it is a literal.
_MEMBERS = {"d": "0-9", "w": "_0-9A-Za-z", "s": r"\t\n\x0b\x0c\r\x20-\x20"}
_NAMED = re.compile(r"\[:\^?[a-z]+:\]")
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_CASELESS = re.compile(r"\(\?[a-zA-Z]*i")

_NOTHING, _LITERAL, _RANGE = range(
    3
)  # the last item of a set: none that may begin a range, a literal that may, and a literal with -


def ascii_classes(pattern: str) -> str:
    r"""The same expression with `\d`, `\D`, `\w`, `\W`, `\s` and `\S` written as sets.

    Raises ValueError, in one line, for a verbose expression (`(?x)`), or a range that ends with one of these.
    """
    return _Rewriter(pattern).rewritten()


class _Rewriter:
    """Rewrites an expression in one pass, by the rules of Rust's regex-syntax."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._caseless = _CASELESS.search(pattern) is not None
        self._depth = 0
        self._before = _NOTHING

    def rewritten(self) -> str:
        written: list[str] = []
        at = 0
        while at < len(self._pattern):
            piece, length = self._next(at)
            written.append(piece)
            at += length
        return "".join(written)

    def _next(self, at: int) -> tuple[str, int]:
        character = self._pattern[at]
        if character == "\\":
            return self._escape(self._pattern[at : at + 2]), 2
        if character == "[":
            return self._open(at)
        if not self._depth and _VERBOSE.match(self._pattern, at):
            raise ValueError("the flag x, for comments in regular expressions, is not supported")
        if self._depth and character == "]":
            self._depth -= 1
            self._before = _NOTHING
        elif self._depth:
            self._take_literal(character)
        return character, 1

    def _escape(self, escape: str) -> str:
        members = _MEMBERS.get(escape[1:].lower())
        if members is None:
            self._take_literal("")
            return escape
        if self._before == _RANGE:
            raise ValueError(f"a range of characters ends with {escape}")
        self._before = _NOTHING
        if escape[1].isupper():
            return f"[^{members}]"
        if self._depth:
            return members
        # Case folding would add two letters beyond ASCII: the long s and the Kelvin sign.
        return f"(?-i:[{members}])" if self._caseless and escape == r"\w" else f"[{members}]"

    def _open(self, at: int) -> tuple[str, int]:
        named = _NAMED.match(self._pattern, at) if self._depth else None
        if named is not None:
            self._before = _NOTHING
            return named[0], len(named[0])
        if self._before == _RANGE:  # the range ends with this
            self._before = _NOTHING
            return "[", 1
        self._depth += 1
        length = set_start_length(self._pattern, at)
        self._before = _LITERAL if self._pattern[at + length - 1] in "-]" else _NOTHING
        return self._pattern[at : at + length], length

    def _take_literal(self, character: str) -> None:
        if self._before == _RANGE:
            self._before = _NOTHING
        elif character == "-" and self._before == _LITERAL:
            self._before = _RANGE
        else:
            self._before = _LITERAL


def set_start_length(pattern: str, at: int) -> int:
    """Length of a set's start: the bracket, the negation, and the literal `-`s or `]` that may follow."""
    end = at + 1
    end += pattern.startswith("^", end)
    first = end
    while pattern.startswith("-", end):
        end += 1
    if end == first and pattern.startswith("]", end):
        end += 1
    return end - at
