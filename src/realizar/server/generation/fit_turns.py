"""`without_oldest` drops the oldest turns of a conversation that outgrows the context, for requests that ask for it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_STEP = 4
"""Turns are dropped by so many: with one for each answer no prefix of the prompt would be found in the cache again."""
_SYSTEM = ("system", "developer")

Messages = Sequence[Mapping[str, Any]]


def without_oldest(messages: Messages, fits: Callable[[list[Mapping[str, Any]]], bool]) -> list[Mapping[str, Any]]:
    """The messages that fit: those of the system at the beginning, and the last turns.

    A turn begins with a message of the user's, behind the outputs of all calls before it: calls stay with theirs.

    Args:
        fits: True if a prompt of these messages fits. It is called a few times, as the logarithm of their number.

    Returns:
        All messages if they fit; the last turn alone if nothing does.
    """
    num_system = next((place for place, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
    starts = [num_system, *_turns(messages, num_system + 1)]

    def shown(first: int) -> list[Mapping[str, Any]]:
        return [*messages[:num_system], *messages[starts[first] :]]

    if fits(shown(0)):
        return list(messages)
    dropped = bisect.bisect_left(range(1, len(starts)), True, key=lambda first: fits(shown(first))) + 1
    return shown(min(-(-dropped // _STEP) * _STEP, len(starts) - 1))


def _turns(messages: Messages, first: int) -> list[int]:
    """Places of the user's messages from `first` on that lie between no call and its output."""
    outputs = {each.get("tool_call_id"): place for place, each in enumerate(messages) if each["role"] == "tool"}
    turns, last_output = list[int](), -1
    for place, each in enumerate(messages):
        if place >= first and each["role"] == "user" and place > last_output:
            turns.append(place)
        for call in each.get("tool_calls", ()):
            last_output = max(last_output, outputs.get(call["id"], -1))
    return turns
