"""Rows at a place of their schema that others have been at ask nothing, and get the masks that they would get alone."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

from realizar.sampling_params import StructuredOutput
from realizar.structured.json_steps import JsonState, TokenUnits, json_steps
from realizar.structured.workers.kept_masks import NO_LINE, KeptMasks
from realizar.structured.workers.mask_memory import MOST_TOKENS
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import WorkerLimits
from structured.grammar_followers import Follower, make_service, step
from structured.grammar_walks import TOKENS, allowed_ids

FIELDS = {
    "name": {"type": "string", "maxLength": 9},
    "names": {"type": "string", "minLength": 2},
    "value": {"type": "integer", "minimum": 0, "maximum": 99},
    "kind": {"enum": ["name", "value", "names"]},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
PERSON = StructuredOutput("json_schema", json.dumps(SCHEMA))


def states(count: int) -> list[JsonState]:
    """So many places of the schema."""
    steps = json_steps(PERSON.value, TokenUnits(TOKENS))
    assert steps is not None
    found = [steps.start]
    for byte in b'{"name": "abcdefghi", "names": "'[: count - 1]:
        state = steps.after(found[-1], TOKENS.index(bytes((byte,)), 2))
        assert state is not None
        found.append(state)
    return found


def test_places_with_equal_masks_share_a_line() -> None:
    kept, (one, other, third) = KeptMasks(np.zeros((4, 2), np.uint32)), states(3)
    assert kept.find(one) == NO_LINE
    kept.keep(one, np.array([1, 2], np.uint32))
    kept.keep(other, np.array([1, 2], np.uint32))
    kept.keep(third, np.array([2, 1], np.uint32))
    assert kept.find(one) == kept.find(other) != kept.find(third)
    assert kept._lines[kept.find(one)].tolist() == [1, 2]
    assert kept._lines[kept.find(third)].tolist() == [2, 1]


def test_a_line_is_written_anew_when_nobody_reads_it() -> None:
    """The place that it had before is known no more; a line that is read stays, whatever else comes."""
    kept, (read, *others) = KeptMasks(np.zeros((3, 1), np.uint32)), states(12)
    kept.keep(read, np.array([77], np.uint32))
    line = kept.find(read)
    kept.enter(line)
    for number, state in enumerate(others):
        kept.keep(state, np.array([number], np.uint32))
        assert kept._lines[kept.find(state)].tolist() == [number]
        assert kept._lines[line].tolist() == [77]
    assert [kept.find(state) != NO_LINE for state in others] == [False] * 9 + [True] * 2
    kept.leave(line)
    for number, state in enumerate(others):
        kept.keep(state, np.array([number], np.uint32))
    assert kept.find(read) == NO_LINE


def test_without_a_free_line_nothing_is_kept() -> None:
    kept, (one, other) = KeptMasks(np.zeros((1, 1), np.uint32)), states(2)
    kept.keep(one, np.ones(1, np.uint32))
    kept.enter(kept.find(one))
    kept.keep(other, np.zeros(1, np.uint32))
    assert (kept.find(one), kept.find(other)) == (0, NO_LINE)


def test_equal_hashes_are_no_equal_masks() -> None:
    """Masks are compared; the line that had the hash goes on to be its place's."""
    kept, (one, other) = KeptMasks(np.zeros((4, 1), np.uint32)), states(2)
    kept.keep(one, np.ones(1, np.uint32))
    two = np.array([2], np.uint32)
    kept._by_content[hash(two.tobytes())] = kept.find(one)
    kept.keep(other, two)
    assert kept.find(one) != kept.find(other)
    assert kept._lines[kept.find(other)].tolist() == [2]


@pytest.mark.parametrize("seed", range(2))
def test_later_rows_ask_less_and_get_the_same_masks(seed: int) -> None:
    """`Follower.check` compares each; a process that is killed on the way takes nothing with it."""
    service = make_service(WorkerLimits(drafts=0))
    shares = []
    for begun in range(8):
        rows = [Follower(service, PERSON, 100 * seed + 4 * begun + number) for number in range(4)]
        before, num_tokens = int(service.rows.memory.asked.sum()), 0
        for number in range(60):
            left = [each for each in rows if not each.ended]
            num_tokens += len(left)
            step(service, *left)
            worker = rows[0].row.worker
            if begun == 3 and number == 20 and worker is not None:
                os.kill(worker.pid, signal.SIGKILL)
        shares.append((int(service.rows.memory.asked.sum()) - before) / num_tokens)
        for each in rows:
            service.close_row(each.row)
    assert max(shares[-2:]) < 0.7 * shares[0]
    service.close()


class Typist:
    """A row that writes a text, by the shortest tokens that it may choose."""

    def __init__(self, service: GrammarService, text: bytes) -> None:
        self._service, self._rest, self.follower = service, text, Follower(service, PERSON)

    def go_on(self) -> bool:
        """Compare the next mask, and choose; False once the text is written."""
        row, expected = self.follower, self.follower.expected()
        assert np.array_equal(self._service.masks([(row.row, ())])[0], expected)
        allowed = allowed_ids(expected[0]).tolist()
        fitting = [token_id for token_id in allowed if self._rest.startswith(TOKENS[token_id])]
        token_id = min(fitting, key=lambda each: len(TOKENS[each]))
        row.choose(token_id)
        self._rest = self._rest[len(TOKENS[token_id]) :]
        return bool(self._rest)


def test_a_row_that_asks_nothing_for_long_goes_on_where_it_must_ask() -> None:
    """Its process is told what it chose meanwhile, also if it stands still for a while."""
    service = make_service(WorkerLimits(drafts=0))
    text = b'{"name":"abc","names":"' + b"ab" * MOST_TOKENS + b'","value":7'
    for _ in range(2):  # the second row's masks are kept
        before = Typist(service, text)
        while before.go_on():
            pass
    asked = int(service.rows.memory.asked.sum())
    rows = [Typist(service, text) for _ in range(2)]
    number = 0
    while rows[0].go_on() and rows[1].go_on():
        number += 1
        worker = rows[1].follower.row.worker
        if number == 20:
            assert worker is not None
            os.kill(worker.pid, signal.SIGSTOP)
        if number == 20 + MOST_TOKENS + 8:
            assert worker is not None
            os.kill(worker.pid, signal.SIGCONT)
    assert number > 20 + MOST_TOKENS + 8
    assert int(service.rows.memory.asked.sum()) - asked < number
    both = [each.follower for each in rows]
    for _ in range(3):
        step(service, *both)
    service.close()


def test_a_row_from_its_history_is_asked_about() -> None:
    """Its place is not known; others of the schema are where theirs are."""
    service = make_service(WorkerLimits(drafts=0))
    rows = [Follower(service, PERSON, seed) for seed in range(3)]
    for _ in range(12):
        step(service, *rows)
    first = rows[0]
    history = list(first.row.output)
    service.close_row(first.row)
    first.row = service.open_row(PERSON, history)
    for _ in range(12):
        step(service, *[each for each in rows if not each.ended])
    service.close()
