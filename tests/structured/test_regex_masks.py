"""Masks that rows of a regular expression share are those that each row would get by itself."""

from __future__ import annotations

import re

import numpy as np
import pytest

from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import GrammarMatcher
from realizar.structured.regex_masks import regex_masks
from structured.grammar_followers import FACTORY
from structured.grammar_walks import TOKENS, allowed_ids, masks_of

READ = [
    r"([a-z]{1,12} )+\.",
    r"[a-f]{3,40}x",
    r"(ab|c){5,9}-[0-9]{3}",
    r"(a|ab)(c|bcd)*d?e+",
    r"((a|b){0,3}c?){2,5}z",
    r"(a*b*){1,4}(c|)d",
    r"\d{2,4}-\w+\s[^a-m]{1,7}!",
    r".{1,30}end",
    r"x[^y]*y(\.|\\|\[)[+*?]{2}",
    r"(?:name|value)(: [a-z]+)?(,|;)",
    r"",
    r"(|a){3}b",
    r"[\n\t -/]{2,}q",
]
NOT_READ = [
    r"(?i)abc",
    r"^a$",
    r"a+?",
    r"[[:alpha:]]+",
    r"[a&&b]",
    r"\bword",
    r"é+",
    r"a{2}{3}",
    r"\p{L}",
    r"[^-a]",
    r"a**",
]


def walk(shared: GrammarMatcher, own: GrammarMatcher, rng: np.random.Generator, steps: int) -> int:
    """Follow both with random tokens; the number of masks compared."""
    for step in range(steps):
        (mask,), (expected,) = masks_of(FACTORY, [(shared, ())]), masks_of(FACTORY, [(own, ())])
        assert np.array_equal(mask, expected)
        assert (shared.error, shared.ended) == (own.error, own.ended)
        if own.ended or own.error is not None:
            return step + 1
        token_id = int(rng.choice(allowed_ids(expected[0])))
        shared.advance([token_id])
        own.advance([token_id])
    return steps


@pytest.mark.parametrize("pattern", READ)
def test_shared_masks_are_the_rows_own(pattern: str) -> None:
    assert regex_masks(pattern, TOKENS) is not None
    if not pattern:
        return
    grammar, rng = FACTORY.compile(StructuredOutput("regex", pattern)), np.random.default_rng(len(pattern))
    assert grammar.shared is not None
    for _ in range(12):
        own = grammar.start()
        own._shared = None
        walk(grammar.start(), own, rng, 30)


@pytest.mark.parametrize("pattern", READ)
def test_states_accept_what_the_expression_does(pattern: str) -> None:
    """Beginnings of random texts, by Python's own expressions: a state is nothing where no text can follow."""
    shared = regex_masks(pattern, [bytes((byte,)) for byte in range(128)])
    assert shared is not None
    rng, table = np.random.default_rng(7), shared.table
    letters = b"abcdefxyz -.:,;0123!nmeq\\+"
    for _ in range(300):
        text = bytes(rng.choice(list(letters), int(rng.integers(0, 9))).tolist())
        state: int | None = shared.start
        for byte in text:
            state = shared.after(state, byte)
        assert state is not None
        matches = re.fullmatch(pattern, text.decode(), re.ASCII) is not None
        assert table._nullable[state] == matches


@pytest.mark.parametrize("pattern", NOT_READ)
def test_what_is_not_read_is_not_shared(pattern: str) -> None:
    assert regex_masks(pattern, TOKENS) is None


def test_rows_share_few_masks() -> None:
    """Thirteen counts of letters, before and after the first space: so many masks serve all rows."""
    grammar, rng = FACTORY.compile(StructuredOutput("regex", READ[0])), np.random.default_rng(1)
    compared = 0
    for _ in range(10):
        own = grammar.start()
        own._shared = None
        compared += walk(grammar.start(), own, rng, 40)
    assert grammar.shared is not None
    assert len(grammar.shared._masks) <= 27 < compared


def test_a_character_beyond_ascii_ends_sharing_for_its_row() -> None:
    shared = regex_masks(r".{1,30}end", [b"a", "é".encode()])
    assert shared is not None
    state = shared.after(shared.start, 0)
    assert state is not None
    assert shared.after(state, 1) is None
    assert shared.after(None, 0) is None
    assert shared.find(None) is None


def test_too_many_states_are_not_followed() -> None:
    shared = regex_masks(r"(a|aa|aaa){1,900}(ab?){1,900}(a|b){1,900}x", [b"a", b"b"])
    assert shared is not None
    state: int | None = shared.start
    for step in range(400):
        state = shared.after(state, step % 2)
        if state is None:
            break
    assert len(shared.table._expressions) <= 20_000


@pytest.mark.parametrize("pattern", ["ab" * 10_000, "(a?b?)" * 700], ids=["literal", "optional"])
def test_long_expressions_take_bounded_memory(pattern: str) -> None:
    """Each state of such an expression is as long as what is left of it."""
    shared = regex_masks(pattern, [b"a", b"b"])
    assert shared is not None
    state: int | None = shared.start
    for step in range(300):
        state = shared.after(state, step % 2)
    assert state is None
    assert sum(len(each.parts) for each in shared.table._expressions) <= 2_000_000


def test_deep_expressions_are_not_followed() -> None:
    shared = regex_masks("(" * 200 + "a" + "|bc)*d" * 200, [b"a"])
    assert shared is None or shared.after(shared.start, 0) is None
