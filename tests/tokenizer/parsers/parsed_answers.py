"""Parsed answers put together again, for the tests of parsers and of tool calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta
from realizar.tokenizer.parsers.incremental import OutputParser


@dataclass
class Answer:
    """The parts of an answer that a client gets."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


def assemble(deltas: Iterable[ParsedDelta]) -> Answer:
    """Concatenates deltas as a client does, and checks that each call has one id, one name and its turn."""
    answer = Answer()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            answer.content += delta.text
        elif isinstance(delta, ReasoningDelta):
            assert delta.text
            answer.reasoning += delta.text
        elif delta.id is not None:
            assert delta.index == len(answer.names)
            assert delta.name
            answer.names.append(delta.name)
            answer.arguments.append(delta.arguments)
        else:
            assert delta.index == len(answer.names) - 1
            assert delta.name is None
            assert delta.arguments
            answer.arguments[-1] += delta.arguments
    return answer


def parse(parser: OutputParser, texts: Sequence[str]) -> Answer:
    """Feeds texts and finishes."""
    deltas = [delta for text in texts for delta in parser.feed(text)]
    answer = assemble([*deltas, *parser.finish()])
    assert parser.num_calls == len(answer.names)
    return answer


def cut(text: str, places: Iterable[int]) -> list[str]:
    """A text cut at some places."""
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def parse_however_cut(new_parser: Callable[[], OutputParser], text: str, places: Iterable[int] = ()) -> Answer:
    """Parses a text whole, cut at some places, and character by character: the answer has to be the same."""
    whole = parse(new_parser(), [text])
    assert parse(new_parser(), cut(text, places)) == whole
    assert parse(new_parser(), list(text)) == whole
    return whole
