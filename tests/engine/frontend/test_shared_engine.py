"""A step's deltas are taken apart by their owners: nothing is lost, nothing is doubled, nobody sees another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from realizar.engine.frontend.open_table import OpenTable
from realizar.logprob_columns import LogprobColumns
from realizar.outputs import RowError, SnapshotUse, TokenLogprobs
from realizar.step_deltas import StepDeltas
from step_inputs import DeltaWriter, TokenOutput

_ENTRY = st.builds(TokenLogprobs, st.just(3), st.just(-1.0), st.just(1), st.sampled_from([(), ((3, -1.0),)]))
_ROW = st.fixed_dictionaries(
    {
        "request_id": st.sampled_from("abcdef"),
        "choice": st.integers(0, 1),
        "token_ids": st.lists(st.integers(0, 99), max_size=3).map(tuple),
        "prompt_logprobs": st.lists(_ENTRY, max_size=2).map(LogprobColumns.of),
        "finish_reason": st.sampled_from([None, None, "stop"]),
        "snapshots": st.builds(SnapshotUse, taken=st.integers(0, 2), restored=st.integers(0, 2)),
        "error": st.sampled_from([None, None, None, RowError("broken")]),
    }
)
OWNERS = {"a": 1, "b": 1, "c": 2, "d": 2, "e": 3}  # nobody owns f


def table_of(owners: dict[str, int]) -> OpenTable[int]:
    table: OpenTable[int] = OpenTable()
    table.update(owners)
    return table


def output(fields: dict[str, Any]) -> TokenOutput:
    entries = [TokenLogprobs(token_id, -0.5, 1, ((token_id, -0.5),)) for token_id in fields["token_ids"]]
    return TokenOutput(scheduled_s=0.0, produced_s=1.0, logprobs=LogprobColumns.of(entries), **fields)


def facts(deltas: StepDeltas) -> list[tuple[int, object]]:
    """Everything in a step's deltas, with the number that it names."""
    found: list[tuple[int, object]] = list(zip(deltas.number_list(), deltas.token_list(), strict=True))
    for columns in (deltas.logprobs, deltas.prompt_logprobs):
        found += [pair for part in columns for pair in zip(part.number_list(), part.entries, strict=True)]
    for listed in (deltas.starts, deltas.snapshots, deltas.ends, deltas.failures):
        found += [(part.number, part) for part in listed]
    return found


@given(steps=st.lists(st.lists(_ROW, max_size=6, unique_by=lambda row: (row["request_id"], row["choice"])), max_size=4))
def test_each_owner_gets_its_own(steps: Sequence[list[dict[str, Any]]]) -> None:
    columns, table = DeltaWriter(), table_of(OWNERS)
    owner_of: dict[int, int | None] = {}
    for rows in steps:
        deltas = columns.deltas(map(output, rows))
        owner_of.update({start.number: OWNERS.get(start.request_id) for start in deltas.starts})
        shares = table.split(deltas, int)
        assert len({owner for owner, _ in shares}) == len(shares)
        whole = facts(deltas)
        for owner, share in shares:
            assert share.produced_s == deltas.produced_s
            assert facts(share) == [fact for fact in whole if owner_of[fact[0]] == owner]
        owners = {owner for owner, _ in shares}
        assert owners == {owner_of[number] for number, _ in whole} - {None}
    for name in "abcdef":
        assert table.forget(name) == OWNERS.get(name)
    assert (len(table), len(table._starts)) == (0, 0)


def test_a_forgotten_request_gets_nothing_and_another_engine_gives_numbers_anew() -> None:
    table = table_of({"a": 1, "b": 2})
    row = {"choice": 0, "token_ids": (1,), "prompt_logprobs": (), "finish_reason": None, "error": None}
    columns = DeltaWriter()
    both = [output({"request_id": name, **row}) for name in "ab"]
    assert [owner for owner, _ in table.split(columns.deltas(both), int)] == [1, 2]
    table.forget("a")
    table.forget("a")
    assert [owner for owner, _ in table.split(columns.deltas(both), int)] == [2]
    table.forget_numbers()
    assert table.split(columns.deltas(both), int) == []
    assert [(owner, share.number_list()) for owner, share in table.split(DeltaWriter().deltas(both[1:]), int)] == [
        (2, [0])
    ]
