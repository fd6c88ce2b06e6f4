r"""Rewriting of `\d`, `\w` and `\s` in regular expressions to sets of ASCII, as in Python's `re.ASCII`.

llguidance reads them as Unicode classes, with digits of all scripts. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# The last member is a range, so that a `-` after it is a literal.
_MEMBERS = {"d": "0-9", "w": "_0-9A-Za-z", "s": r"\t\n\x0b\x0c\r\x20-\x20"}
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_CASELESS = re.compile(r"\(\?[a-zA-Z]*i")

# The start of a set is its bracket, the negation, and the literal `-`s or `]` that may follow.
_PROPERTY = r"\\[pP](\{[^}]{0,100}\}|.)"
_OUTSIDE = rf"(?P<property>{_PROPERTY})|\\.?|(?P<set>\[\^?(-+|\])?)|."
_RANGE = rf"(?P<range>({_PROPERTY}|\\[^dDwWsS]|[^][\\-])-(?P<last>\\.|[^]\\-]))"
_WITHIN = rf"(?P<named>\[:\^?[a-z]+:\])|{_RANGE}|{_OUTSIDE}"
_PART, _PART_OF_SET = (re.compile(pattern, re.DOTALL) for pattern in (_OUTSIDE, _WITHIN))


def parts(pattern: str) -> Iterator[tuple[re.Match[str], int]]:
    """The parts of an expression, by the rules of Rust's regex-syntax, each with the number of sets that it is in.

    They are starts of sets (the group `set`), named sets (`named`), ranges up to their `last` character (`range`),
    Unicode properties (`property`), other escapes, and single characters.
    """
    at = depth = 0
    while found := (_PART_OF_SET if depth else _PART).match(pattern, at):
        yield found, depth
        at = found.end()
        depth += (found.lastgroup == "set") - (depth > 0 and found[0] == "]")


def ascii_classes(pattern: str) -> str:
    r"""The same expression with `\d`, `\D`, `\w`, `\W`, `\s` and `\S` written as sets.

    Raises ValueError, in one line, for a verbose expression (`(?x)`), or a range that ends with one of these.
    """
    caseless = _CASELESS.search(pattern) is not None
    written: list[str] = []
    for found, depth in parts(pattern):
        part = found[0]
        if not depth and _VERBOSE.match(pattern, found.start()):
            raise ValueError("the flag x, for comments in regular expressions, is not supported")
        if found.lastgroup == "range" and found["last"][1:].lower() in _MEMBERS:
            raise ValueError(f"a range of characters ends with {found['last']}")
        members = _MEMBERS.get(part[1:].lower()) if part.startswith("\\") else None
        if members is not None and part[1].isupper():
            part = f"[^{members}]"
        elif members is not None and depth:
            part = members
        elif members is not None:
            # Case folding would add two letters beyond ASCII: the long s and the Kelvin sign.
            part = f"(?-i:[{members}])" if caseless and part == r"\w" else f"[{members}]"
        written.append(part)
    return "".join(written)
