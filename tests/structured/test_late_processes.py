"""A worker that learns late that a row has ended, whose slot is another row's by then, does that row no harm."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from realizar.frames import Channel
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import only_id
from realizar.structured.workers import worker_process
from realizar.structured.workers.mask_memory import MaskMemory
from realizar.structured.workers.messages import Leave, ToWorker
from realizar.structured.workers.worker_process import WorkerProcess
from structured.grammar_followers import FACTORY

_FORCED = "abracadabra name value name value"
_SLOT, _OLD, _NEW = 0, 7, 8


class _Process(WorkerProcess):
    """A worker as an object of this process, with steps that a test may put in any order."""

    def __init__(self, memory: MaskMemory, pattern: str, key: int) -> None:
        ours, self._theirs = socket.socketpair()
        channel: Channel[ToWorker] = Channel(ours, ToWorker)
        super().__init__(channel, FACTORY, memory, 0, 1 << 30)
        grammar = FACTORY.compile(StructuredOutput("regex", pattern))
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
