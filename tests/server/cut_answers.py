"""Texts that a model may write, with reasoning and calls, cut into deltas at any places."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator


def answers_with(calls: str) -> tuple[str, ...]:
    """Answers after a prompt that opens reasoning: whole, broken off and malformed. Args: calls: of two tools."""
    return (
        f"Hm.</think>Let me see.\n{calls} Then? {calls}",
        f"</think>{calls}",
        "thoughts alone",
        "</think>",
        "",
        "</think>\u00e9\U0001f600 <tool_cal no </think> more",
        '</think><tool_call>\n{"name": "a", "argum',
        "</think><tool_call>{bad}</tool_call> rest",
        '</think><tool_call>{"arguments": {"x": "\u00e9", "y": 1234567890123456789012345}, "name": "a"}</tool_call>',
    )


def cut(text: str, size: int) -> list[str]:
    """A text in deltas of so many characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def cuttings(text: str, rng: random.Random) -> Iterator[list[str]]:
    """Four cuttings of a text, each at up to nine places."""
    for _ in range(4):
        places = sorted(rng.sample(range(len(text) + 1), min(len(text), 9)))
        yield [text[start:end] for start, end in itertools.pairwise((0, *places, len(text)))]
