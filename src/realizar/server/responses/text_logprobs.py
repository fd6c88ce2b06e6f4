"""`TextLogprobs`: log-probabilities of the tokens of an answer's text, without those of reasoning and calls."""

from __future__ import annotations

from realizar.server.generation.answer import AnswerDelta
from realizar.server.generation.logprob_rows import LogprobRows
from realizar.server.responses.output_items import Item


class TextLogprobs:
    """Assigns log-probabilities to messages.

    Tokens whose text is held back wait for the text that follows, and are dropped where a call follows.

    Args:
        rows: writes tokens as JSON.
    """

    def __init__(self, rows: LogprobRows) -> None:
        self._rows = rows
        self._waiting: list[bytes] = []

    def take_in(self, delta: AnswerDelta) -> None:
        """Take in the tokens of a delta, before its parts."""
        if delta.source.logprobs:
            self._waiting += self._rows.rows(delta.source.logprobs)
        del self._waiting[: delta.num_reasoning]

    def taken_for(self, item: Item) -> list[bytes]:
        """The tokens that wait, if the item is a message; they are its tokens then."""
        taken, self._waiting = self._waiting, []
        if item.kind != "message":
            return []
        item.logprobs += taken
        return taken
