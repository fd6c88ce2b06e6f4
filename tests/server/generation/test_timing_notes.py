"""What a finished request adds to its line in the log."""

from __future__ import annotations

from realizar.outputs import RequestOutput, SnapshotUse, Timings
from realizar.server.api import timing_notes

OUTPUT = RequestOutput("a", None, (1,), (), Timings(1.0, 1.5, 2.0, 3.0))


def test_snapshots_of_states_are_named_where_any_were_used() -> None:
    assert timing_notes(OUTPUT) == {"queue_s": 0.5, "first_token_s": 1.0}
    used = SnapshotUse(restored=1, fetched=1, taken=3)
    output = RequestOutput("a", None, (1,), (), OUTPUT.timings, snapshots=used)
    assert timing_notes(output) == {
        "queue_s": 0.5, "first_token_s": 1.0, "snapshots_restored": 1, "snapshots_fetched": 1, "snapshots_taken": 3
    }  # fmt: skip
    assert timing_notes(None) == {}
