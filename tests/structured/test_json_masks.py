"""Masks that rows of a JSON schema share are those that each row would get by itself, and places are what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import Grammar
from realizar.structured.json_masks import JsonMasks
from realizar.structured.json_places import JsonPlaces, Place
from realizar.structured.json_steps import JsonState, JsonSteps, TokenUnits, json_steps
from realizar.structured.string_masks import StringMasks
from structured.grammar_followers import FACTORY
from structured.grammar_walks import BUDGET, TOKENS, allowed_ids


def closed(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **others}


NAME = {"type": "string", "maxLength": 12}
PERSON = closed({"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 999}}, required=["name", "age"])
SHARED: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "optional": closed({"a": NAME, "b": NAME, "cafe": {"type": "boolean"}, "üb": {"type": "null"}}, required=["b"]),
    "lengths": closed({"a": {"type": "string", "minLength": 3}, "b": {"type": "string"}}, required=["a", "b"]),
    "nested": closed({"one": PERSON, "two": closed({}), "three": closed({"x": PERSON})}, required=["one", "three"]),
    "list": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3},
    "lists": closed({"a": {"type": "array", "items": {"type": "array", "items": NAME, "maxItems": 2}}}),
    "enum": closed({"a": {"enum": ["ab", "abc", 1, None, "b c"]}, "b": {"const": "name"}}, required=["a", "b"]),
    "number": closed({"a": {"type": "number"}, "b": {"type": "integer"}}, required=["a", "b"]),
    "other values": closed(
        {
            "open": {"type": "object", "additionalProperties": NAME, "maxProperties": 2},
            "either": {"anyOf": [NAME, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
            "pattern": {"type": "string", "pattern": "^[abc]+$", "maxLength": 9},
            "tuple": {"type": "array", "prefixItems": [NAME, {"type": "null"}], "items": False},
            "last": NAME,
        },
        required=["open", "either", "pattern", "tuple", "last"],
    ),
    "text": NAME,
}


def compiled(schema: dict[str, Any]) -> tuple[Grammar, JsonMasks | None]:
    grammar = FACTORY.compile(StructuredOutput("json_schema", json.dumps(schema)))
    assert grammar.shared is None or isinstance(grammar.shared, JsonMasks)
    return grammar, grammar.shared


@pytest.mark.parametrize("name", SHARED)
def test_masks_are_those_of_rows_by_themselves(name: str) -> None:
    grammar, shared = compiled(SHARED[name])
    assert shared is not None
    alone = Grammar(grammar._matcher, grammar._end_ids)
    rng = np.random.default_rng(sorted(SHARED).index(name))
    num_shared = num_masks = 0
    for _ in range(40):
        row, own = grammar.start(), alone.start()
        for _ in range(BUDGET):
            num_shared += shared.find(row.state) is not None
            (mask,), (expected,) = FACTORY.masks([(row, ())]), FACTORY.masks([(own, ())])
            num_masks += 1
            assert np.array_equal(mask, expected)
            assert (row.error, row.ended) == (own.error, own.ended)
            if own.ended or own.error is not None:
                break
            token_id = int(rng.choice(allowed_ids(expected[0])))
            assert row.state is not None
            row.advance([token_id])
            own.advance([token_id])
    assert num_masks > 200
    assert num_shared > 0.2 * num_masks


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": NAME}, "required": ["a"]},
        {**PERSON, "minProperties": 1},
        {**PERSON, "required": ["name", "other"]},
        {"anyOf": [PERSON, NAME]},
        {"type": "array", "items": NAME, "contains": NAME},
        {"type": "string", "pattern": "a+"},
        {"type": "string", "enum": ["a", "b"]},
        {"$ref": "#/$defs/a", "$defs": {"a": PERSON}},
        {**PERSON, "type": ["object", "null"]},
    ],
    ids=str,
)
def test_other_schemas_have_no_places(schema: dict[str, Any]) -> None:
    assert json_steps(json.dumps(schema), TokenUnits(TOKENS)) is None


def steps_of(schema: dict[str, Any], tokens: Sequence[bytes] = TOKENS) -> JsonSteps:
    steps = json_steps(json.dumps(schema), TokenUnits(tokens))
    assert steps is not None
    return steps


def place(schema: dict[str, Any], text: str) -> Place | None:
    places = JsonPlaces(schema)
    return places.after(places.start, text.encode())


def test_values_before_do_not_count() -> None:
    first = place(PERSON, '{"name": "abc", "age')
    assert first is not None
    assert first == place(PERSON, '{"name": "日本", "age')
    assert first == place(PERSON, '{"name" :"a\\"b\\\\", "age')
    assert first != place(PERSON, '{"name": "abc", "ag')
    assert first != place(PERSON, '{"age')
    assert place(PERSON, '{"name": "a') == place(PERSON, '{"name": "b') != place(PERSON, '{"name": "ab')
    assert place(PERSON, '{"name": "é') == place(PERSON, '{"name": "😀')
    assert place(PERSON, '{"name": "a", "age": 1') != place(PERSON, '{"name": "a", "age": 2')
    assert place(PERSON, '{"name": "a", "age": 1}') == place(PERSON, '{"name": "a", "age": 23}')


def test_white_space_counts_up_to_the_next_token() -> None:
    assert place(PERSON, '{"name": ') != place(PERSON, '{"name":')
    assert place(PERSON, '{"name": "a", ') == place(PERSON, '{"name":"a", ') != place(PERSON, '{"name":"a",')
    assert place(PERSON, '{"name": "a" ') != place(PERSON, '{"name": "a"')
    assert place(PERSON, '{"name": "a", "age": 1 ') == place(PERSON, '{"name": "a", "age": 2 ')


def test_characters_count_as_far_as_the_schema_distinguishes_them() -> None:
    lengths = SHARED["lengths"]
    assert place(lengths, '{"a": "abc') == place(lengths, '{"a": "abcd') != place(lengths, '{"a": "ab')
    assert place(lengths, '{"a": "abc", "b": "') == place(lengths, '{"a": "abc", "b": "xyz')


def test_items_count() -> None:
    rows = SHARED["list"]
    one, two = '[{"name": "a", "age": 1}', '[{"name": "a", "age": 1},{"name": "b", "age": 7}'
    assert place(rows, one) != place(rows, two)
    assert place(rows, two) == place(rows, '[{"name": "abc", "age": 9}, {"name": "b", "age": 17}')


def test_halves_of_a_character_and_escapes() -> None:
    places = JsonPlaces(PERSON)
    whole = places.after(places.start, '{"name": "é'.encode())
    half = places.after(places.start, '{"name": "é'.encode()[:-1])
    assert half is not None
    assert half != whole
    assert places.after(half, "é".encode()[1:]) == whole
    for text in ('{"name": "a\\', '{"name": "a\\"', '{"name": "a\\n', '{"name": "a\\\\b'):
        escaped = place(PERSON, text)
        assert escaped is not None
        assert not escaped.is_known
    assert place(PERSON, '{"name": "a\\\\",') == place(PERSON, '{"name": "a",')


@pytest.mark.parametrize(
    "text",
    ['["', '{"name": 12', '{"name" "', '{"name": "a" "', '{"other": 1', "{,", '{"na\\u006de": "', '{"name": "a"}}'],
)
def test_a_text_that_is_not_the_schemas_has_no_place(text: str) -> None:
    assert place(PERSON, text) is None


def test_masks_used_longest_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.structured.state_masks._MOST_BYTES", 5 * 4)
    shared = JsonMasks(steps_of(PERSON))
    ids = [TOKENS.index(bytes((byte,)), 2) for byte in b'{"name": "aaaaaaaa']
    states: list[JsonState | None] = [shared.start]
    for token_id in ids:
        states.append(shared.after(states[-1], token_id))
    states = states[-8:]
    for number, state in enumerate(states):
        shared.keep(state, np.full(1, number, np.uint32))
        assert shared.find(states[0]) is not None or number > 5
    kept = [shared.find(state) is not None for state in states]
    assert kept == [True, False, False, False, True, True, True, True]


@pytest.mark.parametrize("text", ['{"name": "', '{"name": "abcd', '{"name": "aé'])
def test_masks_of_longer_strings_are_there_before_rows_come(text: str) -> None:
    """From where a row is up to the bound, and equal to the row's own."""
    grammar, shared = compiled(PERSON)
    assert shared is not None
    ids = [TOKENS.index(bytes((byte,)), 2) for byte in text.encode()]
    strings = StringMasks(FACTORY, shared)
    strings.note(grammar.start(ids[:9]))  # in no string
    assert not strings.compute_one()
    strings.note(grammar.start(ids))
    while strings.compute_one():
        pass
    letter = TOKENS.index(b"b", 2)
    for length in range(len(text) + 1, 11 + 12):
        row, own = grammar.start(ids), Grammar(grammar._matcher, grammar._end_ids).start(ids)
        for each in (row, own):
            each.advance([letter] * (length - len(text)))
        found = shared.find(row.state)
        assert found is not None
        assert np.array_equal(found, FACTORY.masks([(own, ())])[0][0])
    num_masks = len(shared._masks)
    strings.note(grammar.start(ids))
    assert not strings.compute_one()
    assert len(shared._masks) == num_masks


def test_a_schema_without_room_gets_no_masks_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, shared = compiled(PERSON)
    assert shared is not None
    monkeypatch.setattr("realizar.structured.state_masks._MOST_BYTES", 3 * 4 * FACTORY.num_words)
    strings = StringMasks(FACTORY, shared)
    strings.note(grammar.start([TOKENS.index(bytes((byte,)), 2) for byte in b'{"name": "']))
    while strings.compute_one():
        pass
    assert len(shared._masks) == 3


def test_masks_within_escaped_strings_are_not_shared() -> None:
    shared = JsonMasks(steps_of(PERSON))
    state: JsonState | None = shared.start
    for byte in b'{"name": "a\\n':
        state = shared.after(state, TOKENS.index(bytes((byte,)), 2))
    shared.keep(state, np.ones(1, np.uint32))
    assert shared.find(state) is None
    shared.keep(shared.after(state, TOKENS.index(b'"', 2)), np.ones(1, np.uint32))
    assert shared.find(shared.after(state, TOKENS.index(b'"', 2))) is not None


def test_too_many_places_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.structured.json_steps._MOST_PLACES", 3)
    shared = JsonMasks(steps_of(PERSON))
    state: JsonState | None = shared.start
    for byte in b'{"name':
        state = shared.after(state, TOKENS.index(bytes((byte,)), 2))
    assert state is None
    assert shared.after(shared.start, TOKENS.index(b"{", 2)) is not None


def test_places_in_long_values_hold_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.structured.json_steps._MOST_SEEN_BYTES", 1000)
    steps = steps_of({**PERSON, "properties": {"name": {"type": "string", "pattern": "^a*$"}, "age": {}}})
    state: JsonState | None = steps.start
    held = num_places = 0
    for byte in b'{"name":"' + 100 * b"a":
        state = steps.after(state, TOKENS.index(bytes((byte,)), 2))
        if state is None:
            break
        held, num_places = held + len(state.place.seen), num_places + 1
    assert state is None
    assert 900 < held <= 1000
    assert 30 < num_places < 100


SHORT_TOKENS = [
    *(bytes((byte,)) for byte in range(256)),
    b"  ",
    b"    ",
    b"\n  ",
    b'",\n   "',
    b'": ',
    b"abc",
    b"",
    b"  , ",
]
SHORT_TOKENS += [
    "日本".encode(),
    "é😀".encode(),
    "é".encode() + b"\xf0",
    b"\x9f\x98\x80b",
    b'a\\"',
    b'": "',
    b"12",
    b'"}',
]


@pytest.mark.parametrize("name", SHARED)
def test_steps_lead_where_texts_do(name: str) -> None:
    """Token by token, as the schema's places are found for the whole text."""
    rng = np.random.default_rng(7)
    places, steps = JsonPlaces(SHARED[name]), steps_of(SHARED[name], SHORT_TOKENS)
    number = {part: index for index, part in enumerate(SHORT_TOKENS)}
    num_followed = 0
    values = [(value, indent) for value in VALUES[name] for indent in (None, 4)]
    for text in (json.dumps(value, ensure_ascii=False, indent=indent) for value, indent in values):
        for _ in range(20):
            state: JsonState | None = steps.start
            done, rest = b"", text.encode()
            while rest and state is not None:
                fitting = [each for each in number if each and rest.startswith(each)]
                part = fitting[int(rng.integers(len(fitting)))]
                state, done, rest = steps.after(state, number[part]), done + part, rest[len(part) :]
                assert (None if state is None else state.place) == places.after(places.start, done), done
                num_followed += state is not None
    assert num_followed > 200
    assert steps.after(steps.start, number[b""]) is None
    assert steps.after(steps.start, len(SHORT_TOKENS)) is None


VALUES: dict[str, list[Any]] = {
    "person": [{"name": 'aé😀b "c" d', "age": 120}, {"name": "abc\\日本語", "age": 7}],
    "optional": [{"a": "x", "b": "日本 y", "cafe": True, "üb": None}, {"b": ""}],
    "lengths": [{"a": "abcdefg é", "b": "abc abc  abc    abc"}],
    "nested": [{"one": {"name": "abc", "age": 1}, "two": {}, "three": {"x": {"name": "é", "age": 999}}}],
    "list": [[{"name": "abc", "age": 1}, {"name": "日本", "age": 99}]],
    "lists": [{"a": [["a", "abcé"], [], ["日本    x"]]}],
    "enum": [{"a": "b c", "b": "name"}, {"a": None, "b": "name"}],
    "number": [{"a": -1.5e12, "b": 123}, {"a": 0, "b": -7}],
    "other values": [
        {"open": {"x": "abc", "é": "d"}, "either": [1, 12], "pattern": "abc", "tuple": ["日本"], "last": "é  "}
    ],
    "text": ["abc é日本"],
}
