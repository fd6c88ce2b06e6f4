"""A worker finds what is certain to come, and one that learns late of a row's end does the slot's next row no harm."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.ipc.frames import Channel
from realizar.sampling_params import StructuredKind, StructuredOutput
from realizar.structured.grammar import GrammarMatcher, only_id
from realizar.structured.workers import worker_process
from realizar.structured.workers.mask_memory import MOST_TOKENS, MaskMemory
from realizar.structured.workers.messages import Leave, ToWorker
from realizar.structured.workers.worker_process import WorkerProcess
from structured.grammar_followers import FACTORY
from structured.grammar_walks import END, masks_of, next_ids

_FORCED = "abracadabra name value name value"
_SLOT, _OLD, _NEW = 0, 7, 8


class _Process(WorkerProcess):
    """A worker as an object of this process, with steps that a test may put in any order."""

    def __init__(self, memory: MaskMemory, pattern: str, key: int, kind: StructuredKind = "regex") -> None:
        ours, self._theirs = socket.socketpair()
        channel: Channel[ToWorker] = Channel(ours, ToWorker)
        super().__init__(channel, FACTORY, memory, 0, 1 << 30)
        grammar = FACTORY.compile(StructuredOutput(kind, pattern))
        loaded = worker_process._Loaded(1, grammar)
        self._rows[_SLOT] = worker_process._Row(key, _SLOT, loaded, grammar.start())

    def answer(self) -> None:
        """Answer the question of its row."""
        assert self._answer_all() == 1

    def go_ahead(self) -> None:
        """Take in one more token that is certain."""
        assert self._go_ahead() == 1

    def leave(self, key: int) -> None:
        """Forget a row, as a message says."""
        self._leave(Leave(key, _SLOT))

    def close(self) -> None:
        """Close the sockets."""
        self._channel.close()
        self._theirs.close()


def _ask(memory: MaskMemory, key: int, tokens: Sequence[int] = ()) -> None:
    """What the engine writes to ask about a row."""
    memory.keys[_SLOT], memory.num_tokens[_SLOT] = key, len(tokens)
    memory.tokens[_SLOT, : len(tokens)] = tokens
    memory.asked[_SLOT] += 1


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MaskMemory]:
    monkeypatch.setattr(worker_process, "limit_process", lambda _bytes: None)
    made = MaskMemory(FACTORY.num_words, 1, 0)
    yield made
    made.close()


_GRAMMARS: tuple[tuple[StructuredKind, str], ...] = (
    ("json_schema", '{"type": "array", "items": {"enum": ["ab", "abc", 1, 10]}, "maxItems": 4}'),
    ("regex", "(foo|ba+r|日本)*"),
    ("lark", 'start: e\ne: "(" e ")" | "ab"'),
    ("regex", "(foobar|barfoo)日本"),
    ("choice", '["abracadabra name value name value name value name value name value name value name value"]'),
)


@settings(max_examples=60)
@given(st.sampled_from(_GRAMMARS), st.integers(0, 6), st.randoms(use_true_random=False))
def test_what_is_certain_is_what_the_masks_allow(
    grammar: tuple[StructuredKind, str], most_drafts: int, rng: random.Random
) -> None:
    """As far as it was looked for when the next tokens come: some of these, or all, or more."""
    own, tokens = FACTORY.compile(StructuredOutput(*grammar)).start(), list[int]()
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(worker_process, "limit_process", lambda _bytes: None)
        memory = stack.enter_context(closing(MaskMemory(FACTORY.num_words, 1, most_drafts)))
        process = stack.enter_context(closing(_Process(memory, grammar[1], _OLD, grammar[0])))
        while not own.ended:
            _ask(memory, _OLD, tokens)
            process.answer()
            np.testing.assert_array_equal(memory.masks[_SLOT], masks_of(FACTORY, [(own, ())])[0][0])
            goes_on = all(process._go_ahead() for _ in range(rng.choice((0, 1, 3, 99))))
            forced = [*iter_certain(own)][: most_drafts + 1 if most_drafts else MOST_TOKENS]
            if most_drafts and forced[-1:] == [END]:
                del forced[-1]
            found = [*itertools.takewhile(lambda token: token >= 0, map(memory.forced_token, [_SLOT] * 99, range(99)))]
            assert found == (forced[: len(found)] if goes_on else forced)
            tokens = []
            for _ in range(rng.randint(1, min(len(found) + 2, MOST_TOKENS))):
                if not own.ended:
                    tokens.append(rng.choice(next_ids(FACTORY, own)))
                    own.advance(tokens[-1:])


def iter_certain(row: GrammarMatcher) -> Iterator[int]:
    """The next tokens of a row, as long as a mask allows one alone."""
    row = row.copy()
    while not row.ended and len(only := next_ids(FACTORY, row)) == 1:
        yield only[0]
        row.advance(only)


def _known(memory: MaskMemory) -> list[int]:
    return [memory.forced_token(0, place) for place in range(4)]


def test_tokens_that_it_finds_are_not_those_of_the_later_row(memory: MaskMemory) -> None:
    old, new = _Process(memory, _FORCED, _OLD), _Process(memory, "[a-f]{3,40}x", _NEW)
    _ask(memory, _OLD)
    old.answer()
    old.go_ahead()
    found = _known(memory)
    assert found[0] == only_id(memory.masks[_SLOT])
    assert min(found[:2]) >= 0
    _ask(memory, _NEW)
    new.answer()
    assert _known(memory) == [-1] * 4
    old.go_ahead()
    assert _known(memory) == [-1] * 4
    old.close()
    new.close()


def test_the_tokens_of_the_later_row_are_still_its_own(memory: MaskMemory) -> None:
    """One that is written over costs a question."""
    old, new = _Process(memory, _FORCED, _OLD), _Process(memory, "value value value name name", _NEW)
    _ask(memory, _OLD)
    old.answer()
    old.go_ahead()
    _ask(memory, _NEW)
    new.answer()
    for _ in range(3):
        new.go_ahead()
    found = _known(memory)
    assert min(found) >= 0
    old.go_ahead()
    assert _known(memory) == [*found[:2], -1, found[3]]
    old.close()
    new.close()


class _ChangingKeys:
    """The column of keys; after it is read, the engine gives the slot to a row and asks about that."""

    def __init__(self, memory: MaskMemory) -> None:
        self._memory, self._keys = memory, memory.keys

    def __getitem__(self, slot: int) -> Any:
        key, self._memory.keys = int(self._keys[slot]), self._keys
        _ask(self._memory, _NEW)
        return key


def test_a_row_that_it_leaves_does_not_answer_for_the_later_row(memory: MaskMemory) -> None:
    old = _Process(memory, _FORCED, _OLD)
    _ask(memory, _OLD)
    old.answer()
    memory.keys = _ChangingKeys(memory)  # type: ignore[assignment]
    old.leave(_OLD)
    assert memory.asked[_SLOT] == memory.answered[_SLOT] + 1
    old.close()


def test_a_row_that_it_leaves_before_the_answer_is_answered(memory: MaskMemory) -> None:
    """As its slot is free only then."""
    old = _Process(memory, _FORCED, _OLD)
    _ask(memory, _OLD)
    old.leave(_OLD)
    assert memory.asked[_SLOT] == memory.answered[_SLOT]
    old.close()
