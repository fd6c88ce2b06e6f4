"""Tokens of reasoning are counted one by one, however many of them come at once."""

from __future__ import annotations

import itertools
import random

import pytest

from realizar.server.generation.token_kinds import TokenKinds
from realizar.tokenizer.marks import HARMONY_CHANNEL, HARMONY_END, HARMONY_MESSAGE, HARMONY_START, ReasoningMarks
from realizar.tokenizer.parsers.base import ContentDelta, ReasoningDelta
from realizar.tokenizer.parsers.harmony import HarmonyParser
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.parsers.parser import AnswerParser
from server.scripted_engine import ByteTokenizer

CUTTINGS = random.Random(3)
THINK = ReasoningMarks("<think>", "</think>")
ANALYSIS = f"{HARMONY_CHANNEL}analysis{HARMONY_MESSAGE}"
FINAL = f"{HARMONY_START}assistant{HARMONY_CHANNEL}final{HARMONY_MESSAGE}"


def parser_of(kind: str) -> OutputParser:
    if kind == "channels":
        return HarmonyParser({}, f"{HARMONY_START}assistant")
    return AnswerParser(THINK, None, reasoning_open=kind == "open")


@pytest.mark.parametrize(
    ("kind", "reasoning", "rest"),
    [
        ("open", "Hm, \u00e9\U0001f600.</think>", "\n\nYes\u00e9."),
        ("open", "Hm, that is cut", ""),
        ("closed", "<think>\nHm\u00e9.\n</think>", "\n\nYes."),
        ("closed", "", "<thin air, no reasoning"),
        ("closed", "", "Yes </think> no"),
        ("channels", f"{ANALYSIS}Hm\u00e9.{HARMONY_END}", f"{FINAL}Yes."),
        ("channels", "", f"{FINAL.removeprefix(f'{HARMONY_START}assistant')}Yes."),
    ],
)
def test_a_token_is_reasoning_or_it_is_not(kind: str, reasoning: str, rest: str) -> None:
    """Tokens are bytes here, so that characters come in parts, and later than their first tokens."""
    data = (reasoning + rest).encode()
    for _ in range(50):
        places = sorted(CUTTINGS.sample(range(1, len(data)), CUTTINGS.randrange(len(data))))
        count = TokenKinds(parser_of(kind), ByteTokenizer(None).answer_bytes)
        num_reasoning, given, parsed = 0, 0, []
        for start, end in itertools.pairwise((0, *places, len(data))):
            text = data[given:end].decode(errors="ignore")  # the rest of a character comes with its last token
            given += len(text.encode())
            more, found = count.feed(text, list(data[start:end]))
            parsed += more
            num_reasoning += found.count("reasoning")
        assert num_reasoning == len(reasoning.encode())
        kinds = {type(part) for part in parsed}
        assert (ReasoningDelta in kinds) == bool(reasoning)
        assert (ContentDelta in kinds) == bool(rest)
