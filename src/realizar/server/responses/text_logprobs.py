"""`TextLogprobs`: log-probabilities of the tokens of an answer's text, assigned to its messages."""

from __future__ import annotations

from realizar.server.generation.answer import AnswerDelta
from realizar.server.generation.logprob_rows import LogprobRows, RowsOfKinds
from realizar.server.responses.output_items import Item


class TextLogprobs:
    """Assigns log-probabilities to messages.

    Args:
        rows: writes tokens as JSON.
    """

    def __init__(self, rows: LogprobRows) -> None:
        self._rows = RowsOfKinds(rows, ("content",))
        self._found: list[bytes] = []

    def take_in(self, delta: AnswerDelta) -> None:
        """Take in the tokens of a delta, before its parts."""
        self._found += self._rows.take_in(delta)

    def taken_for(self, item: Item) -> list[bytes]:
        """The tokens that were found, if the item is a message; they are its tokens then."""
        if item.kind != "message":
            return []
        taken, self._found = self._found, []
        item.logprobs += taken
        return taken
