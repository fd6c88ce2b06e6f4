"""Answers in channels on a terminal: thoughts between marks, and a conversation that remembers the content alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from realizar.cli.channel_text import ChannelText
from realizar.cli.chat_session import ChatSession
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.parsers.choose import find_format

FORM = find_format("<|start|><|channel|><|message|>")
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi there"


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_thoughts_and_content(size: int) -> None:
    channels = ChannelText(FORM)
    deltas = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    for _ in range(2):
        assert "".join(channels.texts(deltas)) == "<think>\nHm.\n</think>\n\nHi there"
        assert channels.content == "Hi there"
    assert "".join(channels.texts(["<|channel|>analysis<|message|>Hm"])) == "<think>\nHm"
    assert channels.content == ""


def test_conversation_remembers_content() -> None:
    channels = ChannelText(FORM)

    def answer(_messages: list[Any], _params: SamplingParams) -> Iterator[str]:
        return channels.texts([ANSWER])

    session = ChatSession(answer, SamplingParams(), remembered=lambda: channels.content)
    assert "Hm." in "".join(session.handle("Hello"))
    assert session.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"}]
