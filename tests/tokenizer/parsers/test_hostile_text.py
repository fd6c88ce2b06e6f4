"""Hostile text takes time and memory linear in its length: counted in Python's calls and kept characters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from realizar.tokenizer.marks import REASONING_MARKS
from realizar.tokenizer.parsers import cursor as cursors
from realizar.tokenizer.parsers import parser as answer_parsers
from realizar.tokenizer.parsers.gemma import GEMMA
from realizar.tokenizer.parsers.harmony import HarmonyParser
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.styles import DEEPSEEK, GRANITE, HERMES, JSON, LLAMA, MISTRAL
from realizar.tokenizer.parsers.tagged_styles import GLM, MINIMAX, QWEN3_CODER, SEED_OSS
from tokenizer.parsers.parsed_answers import Answer, assemble

STYLES = {
    style.name: style
    for style in (HERMES, GRANITE, LLAMA, MISTRAL, DEEPSEEK, JSON, GLM, QWEN3_CODER, SEED_OSS, MINIMAX, GEMMA)
}
TOOLS = {"f": {"properties": {"s": {"type": "string"}}}}
# Texts that are read again as content, up to a bound.
AGAIN = ("nested calls", "unknown keys in lines", "brackets in lines")
# A text is a beginning and a part that repeats.
TEXTS = {
    "less-than signs": ("", "<"),
    "line breaks": ("", "\n"),
    "brackets": ("", "["),
    "brackets in lines": ("", "[\n"),
    "unknown keys in lines": ("", '{"type":\n'),
    "nested calls": ("", '<tool_call>{"x": '),
    "arguments before the name": ('<tool_call>{"arguments": {"a": "', "x"),
    "a nested argument": ('<tool_call>{"name": "f", "arguments": ', '{"a":'),
    "a long argument": ('<tool_call>{"name": "f", "arguments": {"a": "', "x"),
    "many arguments": ('{"name": "f", "parameters": {"a": [', "1,"),
    "a broken argument": ('[TOOL_CALLS]f[ARGS]{"a": oops', "[TOOL_CALL"),
    "a long string": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_valu"),
    "many parameters": ("<function=f>", "<parameter=s>\n\n</parameter>"),
    "a long parameter": ('<minimax:tool_call><invoke name="f"><parameter name="s">', "</paramete\n"),
    "open parameters": ("<tool_call><function=f>", "<parameter=s"),
    "nested lists": ("<|tool_call>call:f{a:", "["),
    "bare words": ("<|tool_call>call:f{a:", "<tool_cal"),
    "quotes": ("<|tool_call>call:f{a:[", '<|"|><|"|>,'),
    "channels": ("", "<|channel|>"),
    "starts": ("", "<|start|>"),
    "messages": ("", "<|start|>assistant<|channel|>final<|message|>"),
    "a long header": ("<|channel|>", "a"),
    "a call in a channel": ('<|channel|>commentary to=f<|message|>{"a":"', "<|end"),
    "reasoning that does not end": ("<think>", "\n</think"),
    "calls' marks in reasoning": ("<think>", "<tool_call>a "),
    "tags in a value": ("<tool_call><function=f><parameter=s>", "</parameter>\n</function>\n</tool_call> a"),
    "quotes in a text": ('<|tool_call>call:f{s:<|"|>', '<|"|>}<tool_call|> a'),
}


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the bounds a sixteenth of their size, so that short texts reach them; returns that of undecided text."""
    monkeypatch.setattr(cursors, "MAX_UNDECIDED", cursors.MAX_UNDECIDED // 16)
    monkeypatch.setattr(answer_parsers, "_MAX_REREAD", answer_parsers._MAX_REREAD // 16)
    return cursors.MAX_UNDECIDED


def parsers() -> Iterator[tuple[str, OutputParser]]:
    for name, style in STYLES.items():
        yield name, AnswerParser(REASONING_MARKS[0], style, TOOLS)
    yield "harmony", HarmonyParser(TOOLS)


def _pieces(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def _num_calls(parser: OutputParser, text: str) -> int:
    """The number of Python's calls while a text is parsed piece by piece."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        for piece in _pieces(text, 16):
            parser.feed(piece)
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", sorted(set(TEXTS) - set(AGAIN)))
def test_work_is_linear(kind: str) -> None:
    start, part = TEXTS[kind]
    short, long = (start + part * (size // len(part)) for size in (1_000, 8_000))
    for (name, first), (_, second) in zip(parsers(), parsers(), strict=True):
        less, more = _num_calls(first, short), _num_calls(second, long)
        assert more <= 10 * less + 1000, (name, less, more)


@pytest.mark.parametrize("kind", TEXTS)
def test_kept_text_is_bounded(kind: str, small_bounds: int) -> None:
    """What is kept is copied with each piece, so the work is linear only if it is bounded."""
    start, part = TEXTS[kind]
    size = 60_000
    text = start + part * (size // len(part))
    for name, parser in parsers():
        kept = 0
        for piece in _pieces(text, 512):
            parser.feed(piece)
            kept = max(kept, len(parser._cursor.text))
        parser.finish()
        assert kept <= max(small_bounds, 2 * 8192) + 2 * 512 + 64, name


@pytest.mark.parametrize("kind", AGAIN)
@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_what_is_read_again_is_bounded(kind: str, size: int) -> None:
    """The text becomes content, whole and at one place, however it is cut."""
    start, part = TEXTS[kind]
    text = start + part * (40_000 // len(part)) + '\n<tool_call>{"name": "f"}</tool_call>'
    for name, parser in parsers():
        pieces = _pieces(text, size) if size > 1 else iter([*_pieces(text[:2000], 1), text[2000:]])
        answer = assemble([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])
        before = text[: text.rindex("<tool_call>")].rstrip()
        expected = Answer(before, "", ["f"], ["{}"]) if answer.names else Answer(text)
        assert answer == expected, name
