"""What of a long conversation the model still sees. Standard library and the nouns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from realizar.sampling_params import SamplingParams

_ROOM = 4
"""A fraction of the context that is free for an answer at least: a quarter."""
_KEPT = 2
"""A fraction of the context that the conversation takes at most once messages were left out: a half.

A conversation that lost only what it had to would lose a turn with each answer, and all that was computed for it.
"""

Message = dict[str, str]


class ContextWindow:
    """Leaves the oldest turns out of a conversation that outgrows the context, and says so.

    Args:
        context_length: tokens of prompt and answer.
        count: tokens of a prompt made of messages.
        notice: told what was left out.
    """

    def __init__(
        self, context_length: int, count: Callable[[list[Message]], int], notice: Callable[[str], None]
    ) -> None:
        self._context_length, self._count, self._notice = context_length, count, notice
        self._first = 0

    def clear(self) -> None:
        """The conversation starts over."""
        self._first = 0

    def shown(
        self, system: Sequence[Message], messages: Sequence[Message], params: SamplingParams
    ) -> tuple[list[Message], SamplingParams]:
        """The messages that the model is to see, the last among them, and sampling that ends within the context.

        Raises:
            RealizarError: the template refuses the messages.
        """
        room = min(params.max_tokens or self._context_length, self._context_length // _ROOM)
        shown = [*system, *messages[self._first :]]
        tokens = self._count(shown)
        if tokens + room > self._context_length:
            shown, tokens = self._shortened(system, messages, tokens)
        left = self._context_length - tokens
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
                if tokens <= self._context_length // _KEPT:
                    break
        if self._first > before:
            self._notice(
                f"(the conversation outgrew the context of {self._context_length} tokens: the model no longer sees its"
                f" first {self._first} messages; /clear starts over, /save keeps all)"
            )
        return [*system, *messages[self._first :]], tokens
