r"""`parse`: the plain part of regular expressions, as expressions of `ExpressionTable`.

Sets, `.`, groups, alternatives and counts are read; `\d`, `\w` and `\s` are sets of ASCII, as `ascii_classes` makes
them. Whatever else Rust's expressions have (flags, anchors, lazy counts, nested sets, characters beyond ASCII) is not.
"""

from __future__ import annotations

import re

from realizar.structured.regex_states import ALL, ExpressionTable

_COUNT = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_NAMED = {"d": "0123456789", "s": "\t\n\x0b\x0c\r ", "w": "_"}


class UnreadableError(Exception):
    """The expression has something that is not read here."""


def parse(pattern: str, table: ExpressionTable) -> int:
    """The expression's number in the table.

    Raises:
        UnreadableError: it has something that is not read here.
    """
    parser = _Parser(pattern, table)
    found = parser.alternatives()
    if parser.at != len(pattern):
        raise UnreadableError
    return found


class _Parser:
    """Reads one expression from left to right."""

    def __init__(self, pattern: str, table: ExpressionTable) -> None:
        if not pattern.isascii():
            raise UnreadableError
        self._pattern, self._table = pattern, table
        self.at = 0

    def alternatives(self) -> int:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return self._table.either(found)

    def _sequence(self) -> int:
        parts = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            parts.append(self._counted(self._atom()))
        return self._table.chain(parts)

    def _counted(self, atom: int) -> int:
        least, most = 1, 1
        found = _COUNT.match(self._pattern, self.at)
        if found is not None:
            self.at = found.end()
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else -1
        elif self._take("*"):
            least, most = 0, -1
        elif self._take("+"):
            least, most = 1, -1
        elif self._take("?"):
            least, most = 0, 1
        else:
            return atom
        if self._pattern[self.at : self.at + 1] in ("?", "*", "+", "{") or 0 <= most < least:
            raise UnreadableError
        return self._table.repeat(atom, least, most)

    def _atom(self) -> int:
        character = self._next()
        if character == "(":
            if self._take("?") and not self._take(":"):
                raise UnreadableError
            found = self.alternatives()
            if not self._take(")"):
                raise UnreadableError
            return found
        if character == "[":
            return self._table.characters(self._set())
        if character == ".":
            return self._table.characters(ALL & ~(1 << ord("\n")))
        if character == "\\":
            return self._table.characters(self._escape())
        if character in "*+?{}[]^$":
            raise UnreadableError
        return self._table.characters(1 << ord(character))

    def _set(self) -> int:
        """The rest of a set, after its bracket."""
        negated = self._take("^")
        members = 0
        while not self._take("]"):
            member = self._member()
            if self._take("-"):
                last = self._member()
                if member.bit_count() != 1 or last.bit_count() != 1 or last < member:
                    raise UnreadableError
                member = (last << 1) - member
            members |= member
        if not members:
            raise UnreadableError
        return ALL & ~members if negated else members

    def _member(self) -> int:
        character = self._next()
        if character == "\\":
            return self._escape()
        if character in "[]^-&~":  # nested sets, operators, and what needs care where it stands
            raise UnreadableError
        return 1 << ord(character)

    def _escape(self) -> int:
        character = self._next()
        if character in _NAMED:
            more = [chr(code) for code in range(128) if chr(code).isalnum()] if character == "w" else []
            return sum(1 << ord(member) for member in (*_NAMED[character], *more))
        if character in _ESCAPES:
            return 1 << ord(_ESCAPES[character])
        if character.isalnum() or character in "<>":
            raise UnreadableError
        return 1 << ord(character)

    def _next(self) -> str:
        if self.at == len(self._pattern):
            raise UnreadableError
        self.at += 1
        return self._pattern[self.at - 1]

    def _take(self, character: str) -> bool:
        found = self._pattern.startswith(character, self.at)
        self.at += found
        return found
