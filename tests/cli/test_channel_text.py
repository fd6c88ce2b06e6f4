"""Answers in channels on a terminal: thoughts between marks, and a conversation that remembers the content alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from realizar.cli.channel_text import ChannelText
from realizar.cli.commands.chat import ChatSession, ContextWindow
from realizar.engine.frontend.outputs import ChoiceDelta
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.parsers.choose import find_format

FORM = find_format("<|start|><|channel|><|message|>")
MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi there"


def delta(text: str) -> ChoiceDelta:
    """Its marks are tokens, but for one that follows a backslash."""
    marks = tuple(found.start() for found in re.finditer("|".join(map(re.escape, MARKS)), text))
    return ChoiceDelta("id", 0, text, (), marks=tuple(at for at in marks if text[at - 1 : at] != "\\"))


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_thoughts_and_content(size: int) -> None:
    channels = ChannelText(FORM, ())
    deltas = [ChoiceDelta("id", 0, ANSWER[at : at + size], ()) for at in range(0, len(ANSWER), size)]
    for _ in range(2):
        assert "".join(channels.texts(deltas)) == "<think>\nHm.\n</think>\n\nHi there"
        assert channels.content == "Hi there"
    assert "".join(channels.texts([delta("<|channel|>analysis<|message|>Hm")])) == "<think>\nHm"
    assert channels.content == ""


def test_a_mark_that_is_no_token_is_a_quotation() -> None:
    channels = ChannelText(FORM, MARKS)
    quoting = "<|channel|>analysis<|message|>It writes \\<|end|> then.<|end|><|start|>assistant"
    parts = [delta(quoting), delta("<|channel|>final<|message|>An end is \\<|end|>, a start \\<|start|>.")]
    shown = "".join(channels.texts(parts))
    assert shown == "<think>\nIt writes \\<|end|> then.\n</think>\n\nAn end is \\<|end|>, a start \\<|start|>."


def test_conversation_remembers_content() -> None:
    channels = ChannelText(FORM, ())

    def answer(_messages: list[Any], _params: SamplingParams) -> Iterator[str]:
        return channels.texts([delta(ANSWER)])

    window = ContextWindow(1 << 20, len, print)
    session = ChatSession(answer, SamplingParams(), window, remembered=lambda: channels.content)
    assert "Hm." in "".join(session.handle("Hello"))
    assert session.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"}]
