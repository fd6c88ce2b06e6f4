"""`RegexMasks`: masks of one regular expression by state, so that each is computed once. numpy only."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# `ExpressionTable`: what may still follow in a regular expression, as a number that is the same for the same state.
#
# llguidance walks the vocabulary for each mask and does not say in which state a row is. Two rows of one expression
# have the same masks if the same may follow in both, and that is found here: the derivative of an expression by a
# character is the expression of what may follow it. Equal numbers mean equal languages; different ones may mean equal
# ones too.

NOTHING, EMPTY = 0, 1
"""The expressions that match no text, and the empty text alone."""

BEYOND_ASCII = 1 << 128
"""Member of a set of characters: all those beyond ASCII."""

ALL = (BEYOND_ASCII << 1) - 1
MOST_STATES = 64
"""Of an expression whose states are all known (`KnownStates`), the one after the end among them."""

_MOST = 20_000  # expressions of a table
_MOST_PARTS = 2_000_000  # of all chains and alternatives that are put together, which takes half a second


class _Expression(NamedTuple):
    """An expression by its kind: `characters` with their bits as members; `chain` and `either`, in ascending order, of
    parts; `repeat` of one part with the least and most counts, of which -1 is no limit.
    """

    kind: str
    members: int = 0
    parts: tuple[int, ...] = ()
    least: int = 0
    most: int = 0


class StatesLostError(Exception):
    """There are too many states, or a character beyond ASCII makes the state unknown."""


class ExpressionTable:
    """Numbers expressions, each different one once. Expressions are named by their numbers."""

    def __init__(self) -> None:
        self._expressions = [_Expression("nothing"), _Expression("empty")]
        self._numbers = {self._expressions[NOTHING]: NOTHING, self._expressions[EMPTY]: EMPTY}
        self._nullable = [False, True]
        self._derived: dict[tuple[int, int], int] = {}
        self._num_parts = 0

    @property
    def is_scarce(self) -> bool:
        """True if less than a quarter is left of what may be found out, which rows need for the texts that they get."""
        most_numbers = max(len(self._expressions), len(self._derived))
        return most_numbers > _MOST * 3 // 4 or self._num_parts > _MOST_PARTS * 3 // 4

    def characters(self, members: int) -> int:
        return self._number(_Expression("characters", members), nullable=False)

    def chain(self, parts: Iterable[int]) -> int:
        """Expressions after one another."""
        flat: list[int] = []
        for part in parts:
            if part == NOTHING:
                return NOTHING
            expression = self._expressions[part]
            flat += expression.parts if expression.kind == "chain" else () if part == EMPTY else (part,)
        self._count(len(flat))
        if len(flat) < 2:
            return flat[0] if flat else EMPTY
        return self._number(
            _Expression("chain", parts=tuple(flat)), nullable=all(self._nullable[part] for part in flat)
        )

    def either(self, parts: Iterable[int]) -> int:
        """One of some expressions."""
        flat: set[int] = set()
        for part in parts:
            expression = self._expressions[part]
            flat.update(expression.parts if expression.kind == "either" else (part,))
        flat.discard(NOTHING)
        self._count(len(flat))
        if len(flat) < 2:
            return flat.pop() if flat else NOTHING
        made = _Expression("either", parts=tuple(sorted(flat)))
        return self._number(made, nullable=any(self._nullable[part] for part in flat))

    def repeat(self, part: int, least: int, most: int) -> int:
        """An expression `least` to `most` times after itself; -1 is no limit."""
        if most == 0 or part == EMPTY:
            return EMPTY
        if part == NOTHING:
            return NOTHING if least else EMPTY
        if (least, most) == (1, 1):
            return part
        made = _Expression("repeat", parts=(part,), least=least, most=most)
        return self._number(made, nullable=not least or self._nullable[part])

    def after(self, expression: int, text: Sequence[int]) -> int:
        """The state after a text, which is given as bytes.

        Raises StatesLostError where it can't be told, RecursionError where the expression is nested too deep.
        """
        for byte in text:
            expression = self._derivative(expression, byte)
        return expression

    def _count(self, num_parts: int) -> None:
        """Bound the time and memory of long expressions, whose states are each as long as what is left of them."""
        self._num_parts += num_parts
        if self._num_parts > _MOST_PARTS:
            raise StatesLostError

    def _number(self, expression: _Expression, *, nullable: bool) -> int:
        found = self._numbers.get(expression)
        if found is None:
            if len(self._expressions) >= _MOST:
                raise StatesLostError
            found = self._numbers[expression] = len(self._expressions)
            self._expressions.append(expression)
            self._nullable.append(nullable)
        return found

    def _derivative(self, number: int, byte: int) -> int:
        if byte >= 128:
            raise StatesLostError
        found = self._derived.get((number, byte))
        if found is None:
            if len(self._derived) >= _MOST:
                raise StatesLostError
            found = self._derived[number, byte] = self._derive(self._expressions[number], byte)
        return found

    def _derive(self, given: _Expression, byte: int) -> int:
        if given.kind == "characters":
            return EMPTY if given.members >> byte & 1 else NOTHING
        if given.kind == "either":
            return self.either([self._derivative(part, byte) for part in given.parts])
        if given.kind == "repeat":
            (part,) = given.parts
            rest = self.repeat(part, max(given.least - 1, 0), given.most - 1 if given.most > 0 else given.most)
            return self.chain([self._derivative(part, byte), rest])
        found = []
        for place, part in enumerate(given.parts):  # of a chain; the others have none
            found.append(self.chain([self._derivative(part, byte), *given.parts[place + 1 :]]))
            if not self._nullable[part]:
                break
        return self.either(found)


_MOST_BYTES = 32 << 20  # of masks; those used longest ago are dropped first


class RegexMasks:
    """Masks by state, for all rows of the expression: rows in equal states have the same."""

    def __init__(self, table: ExpressionTable, start: int, token_bytes: Sequence[bytes]) -> None:
        self.table, self.start, self._token_bytes = table, start, token_bytes
        self._masks: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()

    def find(self, state: int | None) -> NDArray[np.uint32] | None:
        """The mask of a state, uint32 [words]; None if it has not been computed yet."""
        if state is None or state not in self._masks:
            return None
        self._masks.move_to_end(state)
        return self._masks[state]

    def keep(self, state: int | None, mask: NDArray[np.uint32]) -> None:
        if state is not None:
            self._masks[state] = mask.copy()
            if len(self._masks) * mask.nbytes > _MOST_BYTES:
                self._masks.popitem(last=False)

    def after(self, state: int | None, token_id: int) -> int | None:
        """The state after one more token, which the expression allows; None if it is not known."""
        if state is None:
            return None
        try:
            return self.table.after(state, self._token_bytes[token_id])
        except (StatesLostError, RecursionError):
            return None


def regex_masks(pattern: str, token_bytes: Sequence[bytes]) -> RegexMasks | None:
    """Masks of an expression; None where it has something that is not followed here."""
    table = ExpressionTable()
    try:
        return RegexMasks(table, parse(pattern, table), token_bytes)
    except (UnreadableError, StatesLostError, RecursionError):
        return None


# `parse`: the plain part of regular expressions, as expressions of `ExpressionTable`.
#
# Sets, `.`, groups, alternatives and counts are read; `\d`, `\w` and `\s` are sets of ASCII, as `ascii_classes` makes
# them. What else Rust's expressions have (flags, anchors, lazy counts, nested sets, characters beyond ASCII) is not.

_COUNT = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
_SIGNS = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_NAMED = {"d": "0123456789", "s": "\t\n\x0b\x0c\r ", "w": "_"}


class UnreadableError(Exception):
    """The expression has something that is not read here."""


def parse(pattern: str, table: ExpressionTable) -> int:
    """The expression's number in the table; UnreadableError where it has something that is not read here."""
    parser = _Parser(pattern, table)
    found = parser.alternatives()
    if parser.at != len(pattern):
        raise UnreadableError
    return found


class _Parser:
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
        found, sign = _COUNT.match(self._pattern, self.at), self._pattern[self.at : self.at + 1]
        if found is not None:
            self.at = found.end()
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else -1
        elif sign in _SIGNS:
            self.at += 1
            least, most = _SIGNS[sign]
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
