"""`KnownStates`: every state of a small regular expression, with its mask and where each token leads. numpy only.

Where all states of an expression are known, a row needs no matcher: its next mask follows from its state and the token
that was sampled, for all rows by one look into a table.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from realizar.structured.grammar import Grammar, GrammarFactory, GrammarMatcher
from realizar.structured.regex_masks import MOST_STATES, NOTHING, ExpressionTable, StatesLostError

UNKNOWN = -1
"""In place of a state: it can't be told, or the token is not allowed."""

_AFTER_END = MOST_STATES - 1


class KnownStates:
    """The states of one grammar, once `explore` has come to its end.

    Args:
        masks: uint32 [MOST_STATES, words], written: the mask of each state. Other processes of the same grammar write
            the same, as its states have the same numbers in all of them.
        after: int16 [MOST_STATES, ids], written: the state after each token, or UNKNOWN.
    """

    def __init__(
        self, grammar: Grammar, factory: GrammarFactory, masks: NDArray[np.uint32], after: NDArray[np.int16]
    ) -> None:
        self._grammar, self._factory, self._masks, self._after = grammar, factory, masks, after
        self._numbers: dict[int, int] = {}  # states by the numbers of their expressions

    def find(self, matcher: GrammarMatcher) -> int:
        """The state of a row, or UNKNOWN."""
        if not self._numbers or matcher.error is not None:
            return UNKNOWN
        if matcher.ended:
            return _AFTER_END
        return UNKNOWN if matcher.state is None else self._numbers.get(matcher.state, UNKNOWN)

    def explore(self) -> Iterator[None]:
        """Find all states; between the parts of the work it yields. If they are too many, none are known."""
        shared = self._grammar.shared
        if shared is None:
            return
        numbers, lines = [shared.start], list[NDArray[np.int16]]()
        while len(lines) < len(numbers) < MOST_STATES:
            try:
                lines.append(_after_bytes(shared.table, numbers, len(lines)))
            except (StatesLostError, RecursionError):
                return
            yield
        if len(numbers) >= MOST_STATES:
            return
        unknown = len(numbers)
        steps = np.stack([*lines, np.full(256, UNKNOWN, np.int16)])
        steps[steps == UNKNOWN] = unknown
        usable = np.zeros(MOST_STATES + 1, np.bool_)  # the last one is that of UNKNOWN
        usable[_AFTER_END] = True
        masks = np.zeros((unknown, self._masks.shape[1]), np.uint32)
        after = np.full((unknown, self._after.shape[1]), UNKNOWN, np.int16)
        yield from self._follow_tokens(steps, usable, masks, after)
        for state in usable[:unknown].nonzero()[0].tolist():
            after[state, ~usable[after[state]]] = UNKNOWN
            self._write(state, masks[state], after[state])
        end = np.full(self._after.shape[1], UNKNOWN, np.int16)
        end[list(self._factory.end_ids)] = _AFTER_END
        self._write(_AFTER_END, self._factory.end_mask, end)
        self._numbers = {number: state for state, number in enumerate(numbers) if usable[state]}

    def _write(self, state: int, mask: NDArray[np.uint32], after: NDArray[np.int16]) -> None:
        """Write what is known of a state, unless another process of the grammar has: rows of that one may be in it."""
        for written, found in ((self._masks[state], mask), (self._after[state], after)):
            if not np.array_equal(written, found):
                written[:] = found

    def _follow_tokens(
        self, steps: NDArray[np.int16], usable: NDArray[np.bool_], masks: NDArray[np.uint32],
        afters: NDArray[np.int16],
    ) -> Iterator[None]:  # fmt: skip
        """Find the masks and the states after tokens of each state that some output leads to, and that goes on."""
        factory, unknown = self._factory, len(steps) - 1
        ends = list(factory.end_ids)
        outputs: dict[int, tuple[int, ...]] = {0: ()}
        reached = [0]
        for state in reached:  # which grows
            matcher = self._grammar.start(outputs[state])
            factory.fill(matcher, (), masks[state : state + 1])
            if matcher.error is not None:
                continue
            usable[state] = True
            after = np.full(self._after.shape[1], unknown, np.int16)
            yield from factory.token_columns.follow(steps, state, after)
            allowed = np.unpackbits(masks[state].view(np.uint8), bitorder="little").astype(np.bool_)
            after[~allowed | (after == unknown)] = UNKNOWN
            after[ends] = np.where(allowed[ends], _AFTER_END, UNKNOWN)
            afters[state] = after
            found, first_ids = np.unique(after, return_index=True)
            for following, token_id in zip(found.tolist(), first_ids.tolist(), strict=True):
                if following not in (UNKNOWN, _AFTER_END) and following not in outputs:
                    outputs[following] = (*outputs[state], token_id)
                    reached.append(following)
            yield


def _after_bytes(table: ExpressionTable, numbers: list[int], state: int) -> NDArray[np.int16]:
    """The states after each byte, int16 [256]; new ones are appended to `numbers`. Raises StatesLostError."""
    after = np.full(256, UNKNOWN, np.int16)
    for byte in range(128):
        if table.is_scarce:
            raise StatesLostError
        number = table.after(numbers[state], (byte,))
        if number != NOTHING:
            if number not in numbers:
                numbers.append(number)
            after[byte] = numbers.index(number)
    return after
