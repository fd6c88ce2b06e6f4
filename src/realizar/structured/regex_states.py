"""`ExpressionTable`: what may still follow in a regular expression, as a number that is the same for the same state.

llguidance walks the vocabulary for each mask and does not say in which state a row is. Two rows of one expression have
the same masks if the same may follow in both, and that is found here: the derivative of an expression by a character is
the expression of what may follow it. Equal numbers mean equal languages; different ones may mean equal ones too.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
        """One character of a set."""
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

        Raises:
            StatesLostError: it can't be told. RecursionError: the expression is nested too deep.
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
