"""Grammars over the vocabularies of real models: byte-level pairs, and SentencePiece with bytes to fall back on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.sampling_params import StructuredOutput
from realizar.structured import grammar as grammars
from realizar.structured.grammar import GrammarFactory
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens
from realizar.tokenizer.load import load_tokenizer, plain_encoder
from realizar.tokenizer.tokenizer import Tokenizer
from structured.grammar_walks import allowed_ids, masks_of, walk_beside

TEXTS = ["Grüße aus 日本 😀!", "caf\u00e9\n\ttab", "ﷺ and \U0001f9d1\u200d\U0001f680", "the answer is 42"]


@pytest.fixture(scope="module", params=["smollm2_path", "gemma3_path"])
def model(request: pytest.FixtureRequest) -> tuple[Tokenizer, GrammarFactory]:
    path: Path = request.getfixturevalue(request.param)
    tokenizer = load_tokenizer(open_checkpoint(path))
    tokens = GrammarTokens(
        tokenizer.vocabulary_bytes(),
        tokenizer.special_ids,
        tokenizer.eos_ids,
        tokenizer.vocab_size,
        EncodeSource(plain_encoder.__module__, plain_encoder.__name__, str(path)),
    )
    return tokenizer, GrammarFactory(tokens)


def test_any_cut_of_a_choice(model: tuple[Tokenizer, GrammarFactory]) -> None:
    """Random tokens, single bytes among them, spell one of the choices and then end."""
    tokenizer, factory = model
    grammar = factory.compile(StructuredOutput("choice", json.dumps(TEXTS)))
    found, with_bytes = set(), 0
    for seed in range(6):
        rng, matcher, ids = np.random.default_rng(seed), grammar.start(), []
        while not matcher.ended:
            allowed = allowed_ids(masks_of(factory, [(matcher, ())])[0][0])
            assert allowed.size
            ids.append(int(rng.choice(allowed)))
            matcher.advance(ids[-1:])
            assert matcher.error is None
        assert ids[-1] in tokenizer.eos_ids
        text = tokenizer.decode(ids)
        assert text in TEXTS
        found.add(text)
        with_bytes += ids[:-1] != tokenizer.encode(text, add_special=False)
    assert len(found) > 1
    assert with_bytes > 0


@pytest.mark.parametrize("text", TEXTS)
def test_forced_text_is_cut_as_the_tokenizer_does(model: tuple[Tokenizer, GrammarFactory], text: str) -> None:
    """If a grammar allows only one text, the tokenizer's own tokens are allowed at every step."""
    tokenizer, factory = model
    matcher = factory.compile(StructuredOutput("choice", json.dumps([text]))).start()
    expected = tokenizer.encode("x" + text, add_special=False)  # a text inside another: no space is put before it
    if tokenizer.decode(expected[1:]) != text:
        expected = [-1, *tokenizer.encode(text, add_special=False)]
    for token_id in expected[1:]:
        assert token_id in allowed_ids(masks_of(factory, [(matcher, ())])[0][0])
        matcher.advance([token_id])
    assert matcher.error is None
    assert set(allowed_ids(masks_of(factory, [(matcher, ())])[0][0])) == set(tokenizer.eos_ids)


def test_control_tokens_are_no_text(model: tuple[Tokenizer, GrammarFactory]) -> None:
    tokenizer, factory = model
    matcher = factory.compile(StructuredOutput("regex", "(.|\n)*")).start()
    allowed = set(allowed_ids(masks_of(factory, [(matcher, ())])[0][0]).tolist())
    assert allowed & tokenizer.special_ids == tokenizer.eos_ids
    assert len(allowed) > 0.95 * (tokenizer.vocab_size - len(tokenizer.special_ids)) - 300


def test_vocabulary_bytes(model: tuple[Tokenizer, GrammarFactory]) -> None:
    tokenizer, _ = model
    tokens = tokenizer.vocabulary_bytes()
    ids = tokenizer.encode("".join(TEXTS), add_special=False)
    assert b"".join(tokens[index] for index in ids).decode().lstrip() == "".join(TEXTS)
    assert tokenizer.special_ids >= tokenizer.eos_ids


def test_lengths_of_strings_change_no_mask(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are allowed by their length where a string may go on for so long: the same ones that a walk finds."""
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    words = tokenizer.vocabulary_bytes()
    tokens = GrammarTokens(words, tokenizer.special_ids, tokenizer.eos_ids, len(words))
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 33}}, "required": ["a"]}
    structured = StructuredOutput("json_schema", json.dumps({**schema, "additionalProperties": False}))
    factory = GrammarFactory(tokens)
    monkeypatch.setattr(grammars, "_SLICES", [])
    walking = GrammarFactory(tokens)
    grammar, plain = factory.compile(structured), walking.compile(structured)
    for seed in range(5):
        row, other, rng = grammar.start(), plain.start(), np.random.default_rng(seed)
        while not row.ended:
            mask = masks_of(factory, [(row, ())])[0][0]
            assert row.error is None
            assert np.array_equal(mask, masks_of(walking, [(other, ())])[0][0])
            chosen = int(rng.choice(allowed_ids(mask)))
            row.advance([chosen])
            other.advance([chosen])


def test_masks_within_strings(model: tuple[Tokenizer, GrammarFactory], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a string of bounded length all masks are made of the first one; they are what llguidance finds."""
    _, factory = model
    properties = {name: {"type": "string", "maxLength": most} for name, most in (("a", 40), ("b", 7))}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    structured = StructuredOutput("json_schema", json.dumps(schema))
    grammar = factory.compile(structured)
    monkeypatch.setattr(grammars, "free_strings", lambda _schema: {})
    twin, rng = factory.compile(structured), np.random.default_rng(1)
    counts = [count for _ in range(6) for count in walk_beside(factory, (grammar.start(), twin.start()), rng, 100)]
    assert sum(count > 1000 for count in counts) > 20
