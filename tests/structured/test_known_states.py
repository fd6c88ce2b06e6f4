"""Rows of an expression whose states are all known get the masks that they would get by themselves, unasked."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import Grammar, grammar_text
from realizar.structured.known_states import UNKNOWN, KnownStates
from realizar.structured.regex_masks import MOST_STATES
from realizar.structured.workers.service import GrammarService
from structured.grammar_followers import (
    BYTES,
    DIGITS,
    FACTORY,
    LETTERS,
    PATIENT,
    Follower,
    end_workers,
    make_service,
    served_masks,
    step,
)
from structured.grammar_walks import END, TOKENS, allowed_ids, masks_of
from waits import is_alive, wait_until

NO_DRAFTS = replace(PATIENT, drafts=0)
KNOWN = [
    r"([a-z]{1,12} )+\.",
    r"[a-f]{3,40}x",
    r"(ab|c){5,9}-[0-9]{3}",
    r"(a|ab)(c|bcd)*d?e+",
    r"\d{2,4}-\w+\s[^a-m]{1,7}!",
    r".{1,9}end",
    r"a{2}",
]


def explored(pattern: str) -> tuple[Grammar, KnownStates, Any, Any]:
    """An expression, all its states, the masks of them, and the states after each token."""
    grammar = FACTORY.compile(StructuredOutput("regex", pattern))
    masks = np.zeros((MOST_STATES, FACTORY.num_words), np.uint32)
    after = np.zeros((MOST_STATES, 32 * FACTORY.num_words), np.int16)
    states = KnownStates(grammar, FACTORY, masks, after)
    for _ in states.explore():
        assert states.find(grammar.start()) == UNKNOWN
    return grammar, states, masks, after


@pytest.mark.parametrize("pattern", KNOWN)
def test_masks_of_known_states_are_those_of_rows(pattern: str) -> None:
    """Also after the end, and where a character beyond ASCII makes the state unknown."""
    grammar, states, masks, after = explored(pattern)
    rng = np.random.default_rng(3)
    num_ends = num_unknown = 0
    for _ in range(30):
        matcher, state = grammar.start(), states.find(grammar.start())
        assert state != UNKNOWN
        for _ in range(100):
            (expected,) = masks_of(FACTORY, [(matcher, ())])[0]
            assert np.array_equal(masks[state], expected)
            allowed = allowed_ids(expected)
            assert (np.delete(after[state], allowed) == UNKNOWN).all()
            token_id = int(rng.choice(allowed))
            matcher.advance([] if matcher.ended else [token_id])
            state = int(after[state, token_id])
            num_ends += matcher.ended
            if state == UNKNOWN:
                assert any(byte >= 128 for byte in TOKENS[token_id])
                num_unknown += 1
                break
            if not matcher.ended:
                assert state == states.find(matcher)
    assert num_ends or num_unknown


@pytest.mark.parametrize("pattern", KNOWN)
def test_processes_of_a_grammar_number_its_states_alike(pattern: str) -> None:
    """Whatever their rows have followed before: they write the same, and nothing where it is written already."""
    _, _, masks, after = explored(pattern)
    grammar, rng = FACTORY.compile(StructuredOutput("regex", pattern)), np.random.default_rng(8)
    for _ in range(10):
        matcher = grammar.start()
        while matcher.error is None and not matcher.ended:
            matcher.advance([int(rng.choice(allowed_ids(masks_of(FACTORY, [(matcher, ())])[0][0])))])
    for each in (masks, after):
        each.flags.writeable = False
    states = KnownStates(grammar, FACTORY, masks, after)
    for _ in states.explore():
        pass
    assert states.find(grammar.start()) != UNKNOWN


@pytest.mark.parametrize("pattern", [r"[a-f]{3,400}x", r"(?i)abc"], ids=["too many", "not read"])
def test_no_state_is_known(pattern: str) -> None:
    grammar, states, _, _ = explored(pattern)
    assert states.find(grammar.start()) == UNKNOWN


def test_a_search_in_vain_leaves_rows_their_shared_masks() -> None:
    """It stops before it has used up what rows need to tell their states."""
    words = "|".join(f"(a|b){{{count}}}c" for count in range(1, 300))
    grammar, states, _, _ = explored(f"({words})")
    matcher = grammar.start()
    assert states.find(matcher) == UNKNOWN
    for byte in b"abba":
        matcher.advance([BYTES[bytes((byte,))]])
        assert matcher.state is not None


def known(service: GrammarService, *followers: Follower) -> bool:
    """True if all their next masks are those of states."""
    indices = service.rows.memory.mask_indices[[each.row.slot for each in followers]]
    return bool((indices >= service.rows.memory.num_slots).all())


def follow_until_known(service: GrammarService, structured: StructuredOutput) -> Follower:
    """A row in a known state, whose masks were right until then."""
    for seed in range(1000):
        follower = Follower(service, structured, seed)
        for _ in range(30):
            step(service, follower)
            if known(service, follower):
                return follower
            if follower.ended:
                break
        service.close_row(follower.row)
    raise AssertionError("no state is known after so many questions")


def test_rows_in_known_states_ask_nothing() -> None:
    service = make_service(NO_DRAFTS)
    first = follow_until_known(service, LETTERS)
    rows = [first, *(Follower(service, LETTERS, seed) for seed in range(3))]
    step(service, *rows)
    wait_until(lambda: (step(service, *rows), known(service, *rows))[1])
    asked = service.rows.memory.asked.copy()
    for _ in range(60):  # more tokens than a question may have, and on after the end
        step(service, *rows)
        for each in rows:
            if each.ended:
                each.choose_again(END)
    assert np.array_equal(service.rows.memory.asked, asked)
    service.close()


def test_a_row_begins_in_the_first_state_unasked() -> None:
    """Once the states of its grammar are known; its process follows it from where a state is not known any more."""
    structured = StructuredOutput("regex", r".{1,9}end")
    service = make_service(NO_DRAFTS)
    first = follow_until_known(service, structured)
    asked, index = service.rows.memory.asked.sum(), TOKENS.index("é".encode())
    row = Follower(service, structured, 5)
    assert known(service, row)
    for _ in range(2):
        assert np.array_equal(served_masks(service, [(row.row, ())])[0], row.expected())
        row.choose(BYTES[b"a"])
    assert row.row.worker is None
    assert service.rows.memory.asked.sum() == asked
    other = Follower(service, structured, 6)
    other.choose(BYTES[b"a"])
    other.choose(index)
    step(service, other)
    assert other.row.worker is not None
    assert service.rows.memory.asked.sum() > asked
    step(service, first)
    service.close()


def test_rows_in_known_states_go_on_when_their_worker_dies() -> None:
    """Their masks are known without it; then another one follows them, from where it is needed."""
    service = make_service(NO_DRAFTS)
    structured = StructuredOutput("regex", r".{1,9}end")
    first = follow_until_known(service, structured)
    row = Follower(service, structured, 3)  # which no worker follows
    assert known(service, first, row)
    pids = end_workers(service)
    wait_until(lambda: (service.rows.wait(0.01), not any(map(is_alive, pids)))[1])
    asked = service.rows.memory.asked.sum()
    step(service, row)
    assert service.rows.memory.asked.sum() == asked
    for each in (first, row):
        if not each.ended and TOKENS.index("é".encode()) in allowed_ids(each.expected()[0]):
            each.choose(TOKENS.index("é".encode()))
    for _ in range(60):
        step(service, first, row)
    service.close()


def test_a_character_beyond_ascii_is_asked_about() -> None:
    structured = StructuredOutput("regex", r".{1,9}end")
    service = make_service(NO_DRAFTS)
    row = follow_until_known(service, structured)
    index = TOKENS.index("é".encode())
    while not known(service, row) or index not in allowed_ids(row.expected()[0]):
        service.close_row(row.row)
        row = follow_until_known(service, structured)
    service.rows.ask(np.array([row.row.slot]), {})
    row.choose(index)
    assert not known(service, row)
    for _ in range(10):
        step(service, row)
    service.close()


def test_grammars_that_are_hardly_used_take_no_lines() -> None:
    """More than there are lines for, kept for later requests: one that answers much has its states known all the same.

    Two of the kept ones have rows that hardly go on.
    """
    service = make_service(NO_DRAFTS)
    for count in range(20):
        service.prepare(StructuredOutput("regex", f"[a-f]{{{count + 1},40}}x"))
    others = [Follower(service, StructuredOutput("regex", f"[a-f]{{{count},40}}x")) for count in (1, 2)]
    row = follow_until_known(service, LETTERS)
    for _ in range(3):
        step(service, row, *others)
    assert not known(service, *others)
    service.close()


def test_a_grammar_waits_for_lines_until_some_are_free() -> None:
    """As those of a grammar that is dropped are."""
    limits = replace(NO_DRAFTS, idle=0)
    service = make_service(limits)
    lines = service._pool._free_lines
    del lines[1:]
    first = follow_until_known(service, DIGITS)
    assert not lines
    for seed in range(20):  # 200 answers and more, twice
        row = Follower(service, LETTERS, seed)
        for _ in range(40):
            step(service, row)
            if row.ended:
                break
        assert not known(service, row)
        service.close_row(row.row)
    service.close_row(first.row)
    service.prepare(StructuredOutput("regex", "another"))  # drops idle ones, the letters too
    wait_until(lambda: (service.rows.wait(0.01), bool(lines))[1])
    follow_until_known(service, LETTERS)
    assert not lines
    service.close()


_PARTS = (
    "a",
    "b",
    "x",
    " ",
    "1",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\W",
    "[a-f]",
    "[^a-m]",
    "[^0-9]",
    "ab",
    "the ",
    "T1",
    r"\.",
)
_COUNTS = ("*", "+", "?", "{2}", "{1,3}", "{0,4}", "{2,}")


def random_expression(rng: random.Random, depth: int = 3) -> str:
    kind = rng.choice(("piece", "chain", "either", "repeat")) if depth else "piece"
    if kind == "piece":
        return rng.choice(_PARTS)
    parts = [random_expression(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind == "chain":
        return "".join(parts)
    return f"({'|'.join(parts)})" if kind == "either" else f"({parts[0]}){rng.choice(_COUNTS)}"


def test_known_states_of_random_expressions_have_the_masks_of_llguidance_alone() -> None:
    """The memory has held others' states before."""
    rng, num_known, num_tokens = random.Random(7), 0, 0
    used = np.random.default_rng(7)
    for _ in range(50):
        structured = StructuredOutput("regex", random_expression(rng))
        grammar = FACTORY.compile(structured)
        masks = used.integers(0, 1 << 32, (MOST_STATES, FACTORY.num_words), np.uint32)
        after = used.integers(-5, MOST_STATES, (MOST_STATES, 32 * FACTORY.num_words), np.int16)
        states = KnownStates(grammar, FACTORY, masks, after)
        for _ in states.explore():
            pass
        if (first := states.find(grammar.start())) == UNKNOWN:
            continue
        num_known += 1
        for _ in range(20):
            alone = LLMatcher(FACTORY._vocabulary.lltokenizer, grammar_text(structured), log_level=0)
            state = first
            for _ in range(30):
                assert np.array_equal(np.frombuffer(alone.compute_bitmask(), np.uint32), masks[state]), structured.value
                token_id = int(rng.choice(allowed_ids(masks[state])))
                state, num_tokens = int(after[state, token_id]), num_tokens + 1
                if token_id == END or state == UNKNOWN:
                    assert state == (MOST_STATES - 1 if token_id == END else UNKNOWN)
                    assert token_id == END or any(byte >= 128 for byte in TOKENS[token_id])
                    break
                assert alone.consume_token(token_id)
    assert num_known > 20
    assert num_tokens > 2000
