"""`Spread`: grammars whose rows are too many for one process get more of them."""

from __future__ import annotations

from collections.abc import Callable

from realizar.structured.workers.followed import FollowedGrammar


class Spread:
    """Adds processes, one at a time. The copies of one grammar in a process share its lexer, and wait for one another.

    Args:
        most: processes beyond one for a grammar, of all grammars together.
        add: begins to add a process to a grammar; `added` tells its end.
    """

    def __init__(self, most: int, add: Callable[[FollowedGrammar], None]) -> None:
        self._most, self._add = most, add
        self._spread: list[FollowedGrammar] = []
        self._is_adding = False

    def note_slow(self, grammar: FollowedGrammar) -> None:
        """A process says that its rows are too many."""
        if self._is_adding:
            return
        self._spread = [each for each in self._spread if each.more and each is not grammar]
        if sum(len(each.more) for each in (*self._spread, grammar)) < self._most:
            self._spread.append(grammar)
            self._is_adding = True
            self._add(grammar)

    def added(self) -> None:
        """The process was added, or could not be."""
        self._is_adding = False
