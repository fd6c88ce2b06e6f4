"""`ContextWindow` chooses the part of a long conversation that the model sees. Standard library and the nouns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from realizar.errors import RealizarError
from realizar.sampling_params import SamplingParams

_ROOM = 4
"""At least a quarter of the context is kept free for the answer."""
_KEPT = 2
"""Once messages are dropped, the conversation takes at most half of the context.

If it dropped only as much as it must, it would drop a turn with each answer, and lose the cached prefix each time.
"""

Message = dict[str, str]


class ContextWindow:
    """Drops the oldest turns of a conversation that outgrows the context, and reports it.

    Args:
        context_length: tokens of prompt and answer.
        count: counts the tokens of a prompt made of messages.
        notice: callback for the report.
    """

    def __init__(
        self, context_length: int, count: Callable[[list[Message]], int], notice: Callable[[str], None]
    ) -> None:
        self.context_length = context_length
        self._count, self._notice = count, notice
        self._first = 0

    def clear(self) -> None:
        """Start the conversation over."""
        self._first = 0

    def used(self, system: Sequence[Message], messages: Sequence[Message]) -> int | None:
        """Tokens of what the model would see now; None where the template refuses it."""
        if not messages:
            return 0
        try:
            return self._count([*system, *messages[self._first if self._first < len(messages) else 0 :]])
        except RealizarError:
            return None

    def shown(
        self, system: Sequence[Message], messages: Sequence[Message], params: SamplingParams
    ) -> tuple[list[Message], SamplingParams]:
        """The messages that the model sees, including the last one, and sampling that ends within the context.

        Raises:
            RealizarError: the template refuses the messages.
        """
        if self._first >= len(messages):  # messages that it had dropped were taken back
            self._first = 0
        room = min(params.max_tokens or self.context_length, self.context_length // _ROOM)
        shown = [*system, *messages[self._first :]]
        tokens = self._count(shown)
        if tokens + room > self.context_length:
            shown, tokens = self._shortened(system, messages, tokens)
        left = self.context_length - tokens
        if params.max_tokens is not None and 0 < left < params.max_tokens:
            params = replace(params, max_tokens=left, min_tokens=min(params.min_tokens, left))
        return shown, params

    def _shortened(
        self, system: Sequence[Message], messages: Sequence[Message], tokens: int
    ) -> tuple[list[Message], int]:
        before = self._first
        for first in range(before + 1, len(messages)):
            if messages[first]["role"] == "user":  # templates want a question first
                self._first = first
                tokens = self._count([*system, *messages[first:]])
                if tokens <= self.context_length // _KEPT:
                    break
        if self._first > before:
            self._notice(
                f"(the conversation outgrew the context of {self.context_length} tokens: the model no longer sees its"
                f" first {self._first} messages; /clear starts over, /save keeps all)"
            )
        return [*system, *messages[self._first :]], tokens
