"""`LogprobColumns` are the sequence of their entries, however they are cut and joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.engine.delta_shares import named_numbers, share_of
from realizar.engine.frontend.growing_choice import GrowingLogprobs
from realizar.logprob_columns import LogprobColumns, StepEntry
from realizar.outputs import TokenLogprobs
from realizar.step_deltas import StepDeltas, StepLogprobs
from step_inputs import DeltaWriter, TokenOutput

_ID = st.integers(0, 2**31 - 1)
_VALUE = st.floats(allow_nan=False)
_ENTRY = st.builds(TokenLogprobs, _ID, _VALUE, _ID, st.lists(st.tuples(_ID, _VALUE), max_size=4).map(tuple))
_ENTRIES = st.lists(_ENTRY, max_size=6)


@given(entries=_ENTRIES, start=st.integers(-7, 7), stop=st.integers(-7, 7), step=st.sampled_from([1, 1, 2, -1, None]))
def test_columns_are_the_sequence_of_their_entries(
    entries: list[TokenLogprobs], start: int, stop: int, step: int | None
) -> None:
    columns = LogprobColumns.of(entries)
    assert (list(columns), len(columns), bool(columns)) == (entries, len(entries), bool(entries))
    assert [columns[place] for place in range(-len(entries), len(entries))] == entries + entries
    assert list(columns[start:stop:step]) == entries[start:stop:step]
    assert columns == entries
    assert tuple(entries) == columns
    assert columns.fits(len(entries))
    assert LogprobColumns.of(columns) is columns
    with pytest.raises(IndexError):
        columns[len(entries)]


def test_columns_differ_where_an_entry_does() -> None:
    one = TokenLogprobs(1, -1.0, 1, ((1, -1.0),))
    columns = LogprobColumns.of([one])
    for other in ([], [one, one], [one._replace(rank=2)], [one._replace(top=())], [one._replace(top=((2, -1.0),))]):
        assert columns != LogprobColumns.of(other)
        assert columns != other
    assert columns != "text"


@given(parts=st.lists(_ENTRIES, max_size=4))
def test_joined_and_growing_columns_have_all_entries_in_order(parts: list[list[TokenLogprobs]]) -> None:
    whole = [entry for part in parts for entry in part]
    columns = [LogprobColumns.of(part) for part in parts]
    assert list(LogprobColumns.joined(columns)) == whole
    growing = GrowingLogprobs()
    for part in columns:
        for place in range(len(part)):
            growing.take(part, place)
    assert len(growing) == len(whole)
    for start in range(len(whole) + 1):
        assert list(growing.between(start, len(whole) + 1)) == whole[start:]


def test_columns_that_do_not_fit_are_refused() -> None:
    columns = LogprobColumns.of([TokenLogprobs(1, -1.0, 1, ((1, -1.0),))])
    assert StepLogprobs(bytes(8), columns).number_list() == [0]
    for numbers, width in ((bytes(16), 2), (bytes(7), 2), (b"", 2), (bytes(8), 1), (bytes(8), 0)):
        with pytest.raises(ValueError, match="do not fit"):
            StepLogprobs(numbers, LogprobColumns(width, columns.ids, columns.values, columns.ranks))
    record: Any = msgspec.to_builtins(StepLogprobs(bytes(8), columns))
    record["entries"]["width"] = 1
    with pytest.raises(msgspec.ValidationError, match="do not fit"):
        msgspec.convert(record, StepLogprobs)


@given(rows=st.lists(st.tuples(_ENTRIES, _ENTRIES), min_size=1, max_size=5))
def test_a_step_keeps_the_log_probabilities_of_each_choice(
    rows: Sequence[tuple[list[TokenLogprobs], list[TokenLogprobs]]],
) -> None:
    """Through columns, apart and together, whatever their choices list and whatever holds them."""
    outputs = [
        TokenOutput(str(at), 0, (), 0.0, 0.0, logprobs=LogprobColumns.of(own) if at % 2 else own, prompt_logprobs=of)
        for at, (own, of) in enumerate(rows)
    ]
    deltas = DeltaWriter().deltas(outputs)
    together = msgspec.msgpack.decode(msgspec.msgpack.encode(deltas), type=StepDeltas)
    assert together == deltas
    alone = {number: share_of(together, {number}) for number in named_numbers(together)}
    for number, (own, of) in enumerate(rows):
        for found in (together, alone[number]):
            assert _of_choice(found.logprobs, number) == own
            assert _of_choice(found.prompt_logprobs, number) == of
        assert all(set(part.number_list()) == {number} for part in alone[number].logprobs)


@given(
    steps=st.lists(st.lists(_ENTRY, min_size=1, max_size=4).map(LogprobColumns.of), min_size=1, max_size=3),
    data=st.data(),
)
def test_entries_of_a_backends_step_are_those_of_their_choices(
    steps: list[LogprobColumns], data: st.DataObject
) -> None:
    """Whichever of a step's rows go on, in whatever order, and beside entries of another kind."""
    places = [StepEntry(columns, place) for columns in steps for place in range(len(columns))]
    picked = data.draw(st.lists(st.sampled_from(places), max_size=6))
    rows: list[Sequence[TokenLogprobs]] = [entry[:] if at % 5 == 4 else entry for at, entry in enumerate(picked)]
    assert [entry.logprob for entry in picked] == [entry[0].logprob for entry in picked]
    outputs = [TokenOutput(str(at), 0, (), 0.0, 0.0, logprobs=row) for at, row in enumerate(rows)]
    deltas = DeltaWriter().deltas(outputs)
    for number, row in enumerate(rows):
        assert _of_choice(deltas.logprobs, number) == list(row)


def test_a_whole_step_is_not_copied() -> None:
    step = LogprobColumns.of([TokenLogprobs(at, -1.0 * at, 1, ()) for at in range(3)])
    assert step.picked(range(3)) is step
    assert list(step.picked([2, 0])) == [step[2], step[0]]
    assert list(step.picked([0, 1])) == [step[0], step[1]]
    assert list(step.picked([0, 0, 1, 2])) == [step[0], step[0], step[1], step[2]]


@given(parts=st.lists(_ENTRIES.filter(bool), max_size=4), taken=st.lists(st.integers(0, 3), max_size=20))
def test_a_consumer_gets_every_entry_once(parts: list[list[TokenLogprobs]], taken: list[int]) -> None:
    """However late it comes; one that keeps up gets those of the step's columns."""
    whole = [entry for part in parts for entry in part]
    waiting = iter((columns, place) for columns in map(LogprobColumns.of, parts) for place in range(len(columns)))
    growing, num_given, num_come = GrowingLogprobs(keeps=False), 0, 0
    for count in (*taken, *[1] * len(whole)):
        for _ in range(count):
            if (next_one := next(waiting, None)) is not None:
                growing.take(*next_one)
                num_come += 1
        given = growing.give(num_given, num_come)
        assert list(given) == whole[num_given:num_come]
        if num_come == num_given + 1:
            assert isinstance(given, StepEntry)
        num_given = num_come
        assert len(growing) == 0


def _of_choice(listed: Sequence[StepLogprobs], number: int) -> list[TokenLogprobs]:
    pairs = [pair for part in listed for pair in zip(part.number_list(), part.entries, strict=True)]
    return [entry for each, entry in pairs if each == number]
