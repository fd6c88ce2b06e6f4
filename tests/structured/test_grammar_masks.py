"""Masks: exactly the tokens that keep the text within the language, with and without drafts."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.sampling_params import StructuredOutput
from realizar.structured import grammar as grammars
from realizar.structured.grammar import Grammar, GrammarFactory
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.json_schema import FreeString, free_strings
from realizar.structured.lark_schemas import free_strings_of_lark
from structured.grammar_walks import (
    CONTROL,
    END,
    TOKENS,
    allowed_ids,
    masks_of,
    next_ids,
    small_factory,
    walk,
    walk_beside,
)

FACTORY = small_factory()
LANGUAGES = {
    # Every string of a language, by another way than its expression.
    r"(ab|bc)*b?": {
        "".join(parts) + end
        for count in range(5)
        for parts in itertools.product(("ab", "bc"), repeat=count)
        for end in ("", "b")
    },
    r"a{2,5}(b|é|日本){1,2}": {
        "a" * n + "".join(p) for n in range(2, 6) for m in (1, 2) for p in itertools.product("bé", repeat=m)
    }
    | {
        "a" * n + x + y
        for n in range(2, 6)
        for x, y in [*itertools.product(("b", "é", "日本"), repeat=2), *((x, "") for x in ("b", "é", "日本"))]
    },
    "foo|foobar|ba[rz]": {"foo", "foobar", "bar", "baz"},
}  # fmt: skip


def compiled(kind: str, value: str) -> Grammar:
    return FACTORY.compile(StructuredOutput(kind, value))  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_are_what_the_language_allows(pattern: str) -> None:
    """Against the list of the language's strings, up to a length at which the list is whole."""
    language = {text.encode() for text in LANGUAGES[pattern]}
    starts = {text[:size] for text in language for size in range(len(text) + 1)}
    longest = 7
    grammar = compiled("regex", pattern)
    rng = np.random.default_rng(0)
    for _ in range(30):
        matcher, text = grammar.start(), b""
        while not matcher.ended:
            allowed = set(next_ids(FACTORY, matcher))
            fitting = {i for i, token in enumerate(TOKENS) if i > CONTROL and token and text + token in starts}
            if text in language:
                fitting.add(END)
            short = {i for i in allowed if len(text + TOKENS[i]) <= longest}
            assert allowed
            if len({TOKENS[i][:1] if i else b"" for i in fitting}) > 1:  # else a text is forced: it is cut one way
                assert short == {i for i in fitting if len(text + TOKENS[i]) <= longest}
            else:
                assert short <= fitting
            if len(text) > longest:
                break
            chosen = int(rng.choice(sorted(allowed)))
            matcher.advance([chosen])
            text += TOKENS[chosen] if chosen != END else b""


def test_control_tokens_and_padding_are_never_text() -> None:
    """The control token's name is a quotation mark, the end's a tag; ids beyond the vocabulary have no bytes."""
    for pattern in ("(.|\n)*", '"*', '(</s>|")*'):
        matcher = compiled("regex", pattern).start()
        for _ in range(3):
            allowed = next_ids(FACTORY, matcher)
            assert CONTROL not in allowed
            assert max(allowed) < len(TOKENS)
            assert END in allowed
            matcher.advance([TOKENS.index(b'"', CONTROL + 1)])
    (mask,) = masks_of(FACTORY, [(compiled("regex", "a").start(), ())])
    assert END not in allowed_ids(mask[0])


def test_only_the_end_follows_a_complete_grammar() -> None:
    matcher = compiled("choice", '["ab"]').start([TOKENS.index(b"ab")])
    assert next_ids(FACTORY, matcher) == [END]
    matcher.advance([END])
    assert matcher.ended
    assert next_ids(FACTORY, matcher) == [END]
    matcher.advance([TOKENS.index(b"ab")])  # sampled before the end was known
    assert next_ids(FACTORY, matcher) == [END]
    assert matcher.error is None


def test_a_model_of_fewer_logits_than_tokens() -> None:
    factory = small_factory(100)
    assert factory.num_words == 4
    matcher = factory.compile(StructuredOutput("regex", "[ -~]+")).start()
    assert max(next_ids(factory, matcher)) < 100


def test_several_ends() -> None:
    factory = GrammarFactory(GrammarTokens(TOKENS, (), (END, CONTROL), len(TOKENS)))
    matcher = factory.compile(StructuredOutput("choice", '["ab"]')).start([TOKENS.index(b"ab")])
    assert next_ids(factory, matcher) == [END, CONTROL]


@pytest.mark.parametrize(
    "choices", [["red", "green"], ["a", "ab", "abc"], ['"', "\\", "\n\t", "{}"], ["é日本😀", "é"], ["the value"]]
)
def test_choices(choices: list[str]) -> None:
    """Walks end in a choice, and in every one of them."""
    grammar = compiled("choice", json.dumps(choices))
    found = {walk(FACTORY, grammar, np.random.default_rng(seed))[1].decode() for seed in range(80)}
    assert found == set(choices)


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{3,8} [0-9]{2}",
        r"([0-9]{1,3}\.){3}[0-9]{1,3}",
        "(foo|ba+r)*",
        "^abc?$",
        r"[^\n]{2,4}\n",
        "(?i)hello",
        ".{0,3}é",
    ],
)
def test_regular_expressions(pattern: str) -> None:
    grammar = compiled("regex", pattern)
    texts = {walk(FACTORY, grammar, np.random.default_rng(seed))[1].decode() for seed in range(20)}
    for text in texts:
        assert re.fullmatch(pattern.removeprefix("^").removesuffix("$"), text), text


def test_lark() -> None:
    """Sums, brackets balanced to any depth, and JSON inside."""
    grammar = compiled("lark", 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]{1,2}/ | "(" sum ")"')
    for seed in range(20):
        text = walk(FACTORY, grammar, np.random.default_rng(seed))[1].decode()
        assert re.fullmatch(r"[0-9+()]+", text)
        assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)  # noqa: S307 - digits, plus and brackets
    schema = '{"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}'
    grammar = compiled("lark", f'start: "<<" call ">>"\ncall: %json {schema}')
    text = walk(FACTORY, grammar, np.random.default_rng(0))[1].decode()
    assert isinstance(json.loads(text[2:-2])["a"], int)


def test_any_object() -> None:
    grammar = compiled("json_object", "")
    for seed in range(10):
        text = walk(FACTORY, grammar, np.random.default_rng(seed))[1]
        assert isinstance(json.loads(text, parse_float=lambda _text: 0.0), dict)


@pytest.mark.parametrize("value", [2**53, 2**53 + 2, -(2**60), 0, -7, 123456789012345680])
def test_large_integers_are_kept(value: int) -> None:
    matcher = compiled("json_schema", json.dumps({"const": value})).start()
    digits = [TOKENS.index(bytes((byte,))) for byte in json.dumps(value).encode()]
    matcher.advance(digits)
    assert next_ids(FACTORY, matcher) == [END]


def test_white_space_is_bounded() -> None:
    """A text can't go on in white space alone, which is how small models get lost."""
    matcher = compiled("json_object", "").start([TOKENS.index(b"{")])
    line_break, space = TOKENS.index(b"\n"), TOKENS.index(b" ")
    assert {line_break, space} <= set(next_ids(FACTORY, matcher))
    matcher.advance([line_break])
    for _ in range(32):
        assert space in next_ids(FACTORY, matcher)
        matcher.advance([space])
    assert all(TOKENS[index].strip(b" \t\n") for index in next_ids(FACTORY, matcher))


GRAMMARS = [
    compiled("json_schema", '{"type": "array", "items": {"enum": ["ab", "abc", 1, 10]}, "maxItems": 4}'),
    compiled("regex", "(foo|ba+r|日本)*"),
    compiled("lark", 'start: e\ne: "(" e ")" | "ab"'),
]


@settings(max_examples=60)
@given(number=st.integers(0, len(GRAMMARS) - 1), seed=st.integers(0, 1000), data=st.data())
def test_drafts_are_taken_back(number: int, seed: int, data: st.DataObject) -> None:
    """Masks after drafts are those of a row that took them in, and leave the row where it was."""
    grammar, rng = GRAMMARS[number], np.random.default_rng(seed)
    ids, _ = walk(FACTORY, grammar, rng)
    place = data.draw(st.integers(0, len(ids) - 1))
    drafts = ids[place : place + data.draw(st.integers(0, 5))]
    if data.draw(st.booleans()) and drafts:
        drafts[data.draw(st.integers(0, len(drafts) - 1))] = data.draw(st.integers(0, len(TOKENS) - 1))
    row = grammar.start(ids[:place])
    (mask,) = masks_of(FACTORY, [(row, drafts)])
    assert mask.shape == (len(drafts) + 1, FACTORY.num_words)
    other = grammar.start(ids[:place])
    for index in range(len(drafts) + 1):
        (expected,) = masks_of(FACTORY, [(other, ())])
        np.testing.assert_array_equal(mask[index], expected[0])
        if index < len(drafts):
            if drafts[index] == END:
                break
            if drafts[index] not in allowed_ids(expected[0]):
                assert not mask[index + 1 :].any()
                break
            other.advance([drafts[index]])
    assert row.error is None
    accepted = ids[place : place + 1]
    row.advance(accepted)
    np.testing.assert_array_equal(
        masks_of(FACTORY, [(row, ())])[0], masks_of(FACTORY, [(grammar.start(ids[: place + 1]), ())])[0]
    )


@settings(max_examples=30)
@given(seeds=st.lists(st.integers(0, 100), min_size=2, max_size=6))
def test_rows_together_are_as_alone(seeds: list[int]) -> None:
    """Rows of one grammar share what is learned of it, and nothing else."""
    walks = [walk(FACTORY, GRAMMARS[seed % len(GRAMMARS)], np.random.default_rng(seed))[0] for seed in seeds]
    rows = [GRAMMARS[seed % len(GRAMMARS)].start() for seed in seeds]
    for step in range(max(map(len, walks))):
        together = masks_of(FACTORY, [(row, ()) for row in rows])
        for row, ids, seed, mask in zip(rows, walks, seeds, together, strict=True):
            alone = masks_of(FACTORY, [(GRAMMARS[seed % len(GRAMMARS)].start(ids[:step]), ())])[0]
            np.testing.assert_array_equal(mask, alone)
            row.advance(ids[step : step + 1])


# Masks within strings of schemas, which are made of the string's first one.

TEXT, SHORT, ANY = ({"type": "string", "maxLength": 20}, {"type": "string", "maxLength": 3}, {"type": "string"})


def closed(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names[: len(names) // 2 + 1],
        "additionalProperties": False,
        **others,
    }


PLAIN = closed({"name": TEXT, "n": {"type": "integer"}, "any": ANY, "one": {"enum": ["a", "name", ":"]}, "key": SHORT})
NESTED = closed(
    {
        "name": SHORT,
        "items": {"type": "array", "items": closed({"name": SHORT, "key": {**TEXT, "title": "a key"}})},
        "texts": {"type": "array", "items": TEXT},
        "inner": closed({"value": ANY, "last": {"type": "string", "maxLength": 1}}),
    }
)
DEFINED = closed(
    {"a": {"$ref": "#/$defs/A"}, "b": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}},
    **{
        "$defs": {
            "A": closed(
                {
                    "name": TEXT,
                    "few": {"type": "string", "pattern": "^a[b-z]{2,5}$"},
                    "least": {"type": "string", "minLength": 2, "maxLength": 4},
                }
            )
        }
    },
)


@pytest.mark.parametrize("schema", [PLAIN, NESTED, DEFINED], ids=["plain", "nested", "defined"])
def test_masks_are_those_of_llguidance(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same grammar of which no string is known to be free."""
    grammar = compiled("json_schema", json.dumps(schema))
    with monkeypatch.context() as patched:
        patched.setattr(grammars, "free_strings", lambda _schema: {})
        twin = compiled("json_schema", json.dumps(schema))
    rng = np.random.default_rng(3)
    counts = [count for _ in range(12) for count in walk_beside(FACTORY, (grammar.start(), twin.start()), rng, 80)]
    assert sum(count > 100 for count in counts) > 100


CALL = r"""start: "{\"name\": \"f\", \"arguments\": " (one | two) "}\n" ("," one)*
// a comment with "name" and /.*/
one: %json """ + json.dumps({**closed({"key": SHORT, "name": TEXT, "n": {"type": "integer"}}), "x-guidance": {}})
CALL += "\ntwo: %json " + json.dumps({**closed({"key": SHORT, "value": ANY}), "x-guidance": {"key_separator": ": "}})


def test_masks_of_schemas_in_lark_are_those_of_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiled("lark", CALL)
    with monkeypatch.context() as patched:
        patched.setattr(grammars, "free_strings_of_lark", lambda _text: {})
        twin = compiled("lark", CALL)
    rng = np.random.default_rng(4)
    counts = [count for _ in range(12) for count in walk_beside(FACTORY, (grammar.start(), twin.start()), rng, 120)]
    assert sum(count > 100 for count in counts) > 100


def test_free_strings_of_lark() -> None:
    """Of all schemas together, but for names that the grammar itself spells."""
    assert free_strings_of_lark(CALL) == {
        b"key": FreeString(3, is_one=False),
        b"value": FreeString(None, is_one=False),
    }
    only = f"start: <[7]> one\none: %json {json.dumps(closed({'name': TEXT}))}"
    assert free_strings_of_lark(only) == {b"name": FreeString(20, is_one=False)}


@pytest.mark.parametrize(
    "rule",
    [
        "/.*/",
        "%json {}",
        '%json {"const":"name"}',
        '%json {"type":"string"}',
        '"name"i',
        "%ignore /x/",
        '"a".."c"',
        '"{\\"name"',
        r'"\\\\"',
        "x[lazy]: one",
        f"%json {json.dumps({**closed({}), 'x-guidance': {'key_separator': ' is '}})}",
        f"%json {json.dumps({**closed({}), 'x-guidance': {'whitespace_pattern': '.*'}})}",
        f"%json {json.dumps({**closed({}), 'x-guidance': {'coerce_one_of': True}})}",
    ],
)
def test_no_string_of_lark_is_free_beside_other_text(rule: str) -> None:
    assert free_strings_of_lark(f"start: one\none: %json {json.dumps(closed({'name': TEXT}))}\ntwo: {rule}") == {}


def test_a_string_is_looked_at_once() -> None:
    """And then by no row of the same grammar, where the same may follow it whatever was before."""
    grammar, letter = compiled("json_schema", json.dumps(PLAIN)), TOKENS.index(b"ab", 258)
    begin = [TOKENS.index(bytes((byte,)), 2) for byte in b'{"name":"']
    for number in range(2):
        matcher = grammar.start(begin)
        matcher._matcher = asked = Mock(wraps=matcher._matcher)
        for _ in range(4):
            assert letter in next_ids(FACTORY, matcher)
            matcher.advance([letter])
        assert asked.unsafe_compute_mask_ptr.call_count == (0 if number else 1)


def test_a_copy_goes_on_by_itself() -> None:
    letter, quote = TOKENS.index(b"a", 2), TOKENS.index(b'"', 2)
    matcher = compiled("json_schema", json.dumps(NESTED)).start(
        [TOKENS.index(bytes((byte,)), 2) for byte in b'{"name":"']
    )
    copied = matcher.copy()
    for _ in range(3):
        assert letter in next_ids(FACTORY, matcher)
        matcher.advance([letter])
    assert letter not in next_ids(FACTORY, matcher)
    assert {letter, quote} <= set(next_ids(FACTORY, copied))


def test_names_of_free_strings() -> None:
    assert free_strings(PLAIN) == {
        b"name": FreeString(20, is_one=True),
        b"any": FreeString(None, is_one=True),
        b"key": FreeString(3, is_one=True),
    }
    assert free_strings(NESTED) == {
        b"name": FreeString(3, is_one=False),
        b"key": FreeString(20, is_one=False),
        b"value": FreeString(None, is_one=True),
        b"last": FreeString(1, is_one=True),
    }
    assert free_strings(DEFINED) == {b"name": FreeString(20, is_one=False)}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"name": TEXT}},
        {**closed({}), "additionalProperties": TEXT},
        {**closed({}), "patternProperties": {"^n": SHORT}},
        {"type": ["object", "null"]},
        {"type": "array"},
        {"const": {"name": "x"}},
        {"enum": [["x"]]},
        {"allOf": [TEXT, SHORT]},
        {"$ref": "#/properties/name/default"},
        {"$ref": "#"},
        True,
    ],
    ids=str,
)
def test_none_is_free_beside_names_that_are_not_listed(value: Any) -> None:
    assert free_strings(closed({"name": TEXT})) == {b"name": FreeString(20, is_one=True)}
    assert free_strings(closed({"name": TEXT, "value": value})) == {}


@pytest.mark.parametrize("other", [SHORT, {"type": "integer"}, {**TEXT, "pattern": "a"}, {"enum": ["a"]}], ids=str)
def test_a_name_of_unlike_values_is_not_free(other: dict[str, Any]) -> None:
    assert free_strings(closed({"name": TEXT, "inner": closed({"name": other})})) == {}
