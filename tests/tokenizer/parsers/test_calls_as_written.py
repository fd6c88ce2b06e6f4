"""What was written is what is parsed, in every style, with the marks of all styles in the arguments.

Calls are written as the models' templates write them; then one closing tag after the other is left out. A text is
parsed whole and cut at random. Its arguments are those that were written, or they are no call and no whole JSON: what a
client can't see to be wrong is never wrong.

Values hold no text that reads as another argument of the same call, which no reader could tell from one.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from realizar.tokenizer.marks import HARMONY_MARKS, MARKS, REASONING_MARKS
from realizar.tokenizer.parsers.gemma import GEMMA, gemma_text
from realizar.tokenizer.parsers.harmony import HarmonyParser
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.pythonic import PYTHONIC
from realizar.tokenizer.parsers.styles import DEEPSEEK, DEEPSEEK_FENCED, GRANITE, HERMES, JSON, LLAMA, MISTRAL
from realizar.tokenizer.parsers.tagged_styles import GLM, GLM_DENSE, MINIMAX, QWEN3_CODER, SEED_OSS
from tokenizer.parsers.parsed_answers import assemble, cut, parse

Call = tuple[str, dict[str, Any]]
NAMES = ("get", "put")
PROPERTIES: dict[str, Any] = {
    "x": {"type": "string"},
    "n": {"type": "integer"},
    "a": {"type": "array"},
    "o": {"type": "object"},
    "b": {"type": "boolean"},
    "s": {"type": "string"},
}
TOOLS = {name: {"type": "object", "properties": PROPERTIES} for name in NAMES}
TAGS = (
    *("</parameter>", "</function>", "<function=", "<function=none>", "<parameter=", "<parameter=x>", "</invoke>"),
    *('<parameter name="', '<parameter name="x">', '<invoke name="', "<b>y</b>", "<arg_key>x</arg_key>"),
    *("'", '"', "')", "')]", "}", "]", '"}', "}}", "```", "<", "</", "<|", "{"),
)
MARKED = (*sorted(MARKS | HARMONY_MARKS), *TAGS)
SAID = ("", "", "", " I've sent 'it'.", "\nIt is 12, or [so].")
WORDS = ("a", "y", "12", "true", "é", " ", " ", "\n", "\n", "\n\n", ", ", "it is")


def _json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tagged(call: Call, head: str, value: str, end: str, text: Callable[[Any], str] = _text) -> str:
    name, given = call
    return head % name + "".join(value % (key, text(each)) for key, each in given.items()) + end


def _lfm2(call: Call) -> str:
    def text(value: Any) -> str:
        if isinstance(value, str):
            return f"'{value}'"
        return json.dumps(value) if isinstance(value, dict) else str(value)

    return f"{call[0]}({', '.join(f'{key}={text(each)}' for key, each in call[1].items())})"


def _joined(write: Callable[[Call], str], before: str = "", between: str = "", after: str = "") -> Any:
    return lambda calls: before + between.join(map(write, calls)) + after


FUNCTION = "\n<function=%s>\n"
WRITERS: dict[str, tuple[Any, Callable[[list[Call]], str]]] = {
    "hermes": (HERMES, _joined(lambda c: f"<tool_call>\n{_json(c)}\n</tool_call>", between="\n")),
    "granite": (GRANITE, _joined(_json, "<|tool_call|>[", ", ", "]")),
    "llama3": (LLAMA, _joined(lambda c: _json(c, "parameters"), between="; ")),
    "mistral list": (MISTRAL, _joined(_json, "[TOOL_CALLS][", ", ", "]")),
    "mistral": (MISTRAL, _joined(lambda c: f"[TOOL_CALLS]{c[0]}[ARGS]{json.dumps(c[1])}")),
    "deepseek": (
        DEEPSEEK,
        _joined(
            lambda c: f"<｜tool▁call▁begin｜>{c[0]}<｜tool▁sep｜>{json.dumps(c[1])}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek fenced": (
        DEEPSEEK_FENCED,
        _joined(
            lambda c: (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c[0]}\n```json\n{json.dumps(c[1])}\n```<｜tool▁call▁end｜>"
            ),
            "<｜tool▁calls▁begin｜>",
            "\n",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "json": (JSON, _joined(_json, "[", ", ", "]")),
    "gemma4": (GEMMA, _joined(lambda c: f"<|tool_call>call:{c[0]}{gemma_text(c[1])}<tool_call|>")),
    "lfm2": (PYTHONIC, _joined(_lfm2, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>")),
    "harmony": (
        None,
        _joined(
            lambda c: f"<|channel|>commentary to=functions.{c[0]} <|constrain|>json<|message|>{json.dumps(c[1])}",
            between="<|end|><|start|>assistant",
            after="<|end|>",
        ),
    ),
    "glm": (
        GLM,
        _joined(
            lambda c: _tagged(
                c, "<tool_call>%s\n", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n", "</tool_call>"
            ),
            between="\n",
        ),
    ),
    "glm dense": (
        GLM_DENSE,
        _joined(
            lambda c: _tagged(c, "<tool_call>%s", "<arg_key>%s</arg_key><arg_value>%s</arg_value>", "</tool_call>")
        ),
    ),
    "qwen3_coder": (
        QWEN3_CODER,
        _joined(
            lambda c: _tagged(
                c, f"<tool_call>{FUNCTION}", "<parameter=%s>\n%s\n</parameter>\n", "</function>\n</tool_call>"
            ),
            between="\n",
        ),
    ),
    "seed_oss": (
        SEED_OSS,
        _joined(
            lambda c: _tagged(
                c,
                f"<seed:tool_call>{FUNCTION}",
                "<parameter=%s>%s</parameter>\n",
                "</function>\n</seed:tool_call>",
                str,
            ),
            between="\n",
        ),
    ),
    "minimax": (
        MINIMAX,
        _joined(
            lambda c: _tagged(c, '<invoke name="%s">\n', '<parameter name="%s">%s</parameter>\n', "</invoke>\n"),
            "<minimax:tool_call>\n",
            after="</minimax:tool_call>",
        ),
    ),
}
TOKENS = MARKS | HARMONY_MARKS
ANY_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))
CLOSING = re.compile("</[a-z_:]+>|<｜tool▁calls?▁end｜>|<[|]tool_call_end[|]>|<tool_call[|]>|<[|]end[|]>")


def _parser(writer: str, tokens: frozenset[str] = frozenset()) -> OutputParser:
    style = WRITERS[writer][0]
    if style is None:
        return HarmonyParser(TOOLS, "<|start|>assistant", tokens=tokens)
    return AnswerParser(REASONING_MARKS[0], style, TOOLS, tokens=tokens)


def _string(rng: random.Random, most: int) -> str:
    return "".join(rng.choice(MARKED if rng.random() < 0.5 else WORDS) for _ in range(rng.randrange(most)))


def _value(rng: random.Random, kind: str) -> Any:
    if kind == "string":
        return _string(rng, 7)
    if kind == "integer":
        return rng.randrange(-5, 10**6)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [rng.choice([_string(rng, 4), 5, None, True]) for _ in range(rng.randrange(3))]
    return {key: _string(rng, 4) for key in ("k", "l")[: rng.randrange(3)]}


def _calls(rng: random.Random) -> list[Call]:
    """One or two calls. The argument `x`, whose tags stand in values too, comes first."""
    others = list(PROPERTIES)[1:]
    return [
        (
            rng.choice(NAMES),
            {key: _value(rng, PROPERTIES[key]["type"]) for key in ("x", *rng.sample(others, rng.randrange(6)))},
        )
        for _ in range(rng.randrange(1, 3))
    ]


def _masked(value: Any) -> Any:
    """A value of the same length without tags."""
    if isinstance(value, str):
        return re.sub(r"[<>\[\]]", "_", value)
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return {key: _masked(each) for key, each in value.items()} if isinstance(value, dict) else value


def _check(writer: str, seed: int) -> str:
    """Check one random case; returns what came of it."""
    rng = random.Random(f"{writer} {seed}")
    calls = _calls(rng)
    write = WRITERS[writer][1]
    text = write(calls)
    closing = [found.span() for found in CLOSING.finditer(write([(name, _masked(given)) for name, given in calls]))]
    dropped = bool(closing) and rng.random() < 0.6
    if dropped:
        start, end = rng.choice(closing)
        tag, before, behind = text[start:end], text[:start], text[end:]
        if before.rstrip().endswith(tag) or (tag in before and not behind.strip()):
            return "no reader could tell"  # the tag within a value from the one that is missing
        text = before + behind
    said = rng.choice(SAID) if writer != "harmony" else ""
    text += said
    answer = parse(_parser(writer), [text])
    assert parse(_parser(writer), cut(text, [rng.randrange(10**6) for _ in range(8)])) == answer, text
    whole = answer.names and all(map(_is_json, answer.arguments))
    if whole and len(answer.names) == len(calls):
        found = [(name, json.loads(given)) for name, given in zip(answer.names, answer.arguments, strict=True)]
        assert found == calls, (seed, text, found)
        assert answer.content == said.strip(), (seed, text, answer)
        return "the same"
    assert dropped, (seed, text, answer)
    for (name, given), found, arguments in zip(calls, answer.names, answer.arguments, strict=False):
        if _is_json(arguments):
            assert (found, json.loads(arguments)) == (name, given), (seed, text, answer)
    return "seen to be wrong"


def _mark_at(text: str, place: int) -> str:
    found = ANY_TOKEN.match(text, place)
    assert found is not None
    return found.group()


def _check_tokens(writer: str, seed: int) -> None:
    """Check one case where marks are tokens. The answer quotes its calls in ordinary tokens before it makes them."""
    rng = random.Random(f"{writer} {seed}")
    calls = _calls(rng)
    write = WRITERS[writer][1]
    text, masked = write(calls), write([(name, _masked(given)) for name, given in calls])
    before = "" if writer in ("llama3", "json", "harmony") else f"<think>I write {text}, or</think>? Like {text}!"
    places = [len(before) + found.start() for found in ANY_TOKEN.finditer(masked)]
    if before:
        places = [0, before.index(", or</think>") + 4, *places]

    def parts(ends: list[int]) -> Iterator[tuple[str, list[int]]]:
        for start, end in itertools.pairwise([0, *sorted(ends), len(before + text)]):
            yield (before + text)[start:end], [place - start for place in places if start <= place < end]

    for num_cuts in (0, 6, 200):
        cuts = [rng.randrange(len(before + text)) for _ in range(num_cuts)]
        ends = [end for end in cuts if not any(p < end < p + len(_mark_at(before + text, p)) for p in places)]
        stream = _parser(writer, TOKENS)
        deltas = [delta for part, marks in parts(ends) for delta in stream.feed(part, marks)]
        answer = assemble([*deltas, *stream.finish()])
        found = [(name, json.loads(given)) for name, given in zip(answer.names, answer.arguments, strict=True)]
        assert found == calls, (seed, text)
        if before:
            assert (answer.reasoning, answer.content) == (f"I write {text}, or", f"? Like {text}!"), (seed, text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("writer", WRITERS)
def test_what_was_written_is_what_is_parsed(writer: str) -> None:
    found = [_check(writer, seed) for seed in range(200)]
    assert found.count("the same") > 140


@pytest.mark.parametrize("writer", WRITERS)
def test_marks_that_are_tokens_count_as_tokens_alone(writer: str) -> None:
    for seed in range(25):
        _check_tokens(writer, seed)


@pytest.mark.full
@pytest.mark.parametrize("writer", WRITERS)
def test_what_was_written_is_what_is_parsed_at_length(writer: str) -> None:
    for seed in range(200, 20_000):
        _check(writer, seed)


@pytest.mark.full
@pytest.mark.parametrize("writer", WRITERS)
def test_marks_that_are_tokens_count_as_tokens_alone_at_length(writer: str) -> None:
    for seed in range(25, 20_000):
        _check_tokens(writer, seed)
