"""`StateMoves`: the copies of states that a step makes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Copies between the states of rows, snapshots, and snapshots in the host's memory, of a model with states.

    All but the last are made before anything else of the step, in this order.

    Attributes:
        stored: pairs (snapshot, host snapshot): the snapshot is copied to the host's memory. Another one may be written
            over it in the same step.
        fetched: pairs (row, host snapshot): the row's state becomes the host snapshot's.
        restored: pairs (row, snapshot): the row's state becomes the snapshot's.
        kept: pairs (row, snapshot): the state of a row that was fetched is copied to the snapshot.
        taken: pairs (row, snapshot): after the row's tokens in the step, none of which is uncertain, its state is
            copied to the snapshot.
    """

    restored: tuple[tuple[int, int], ...] = ()
    taken: tuple[tuple[int, int], ...] = ()
    stored: tuple[tuple[int, int], ...] = ()
    fetched: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def begun(self) -> list[int]:
        """The rows whose state is another one's before the step."""
        return [row for row, _ in (*self.restored, *self.fetched)]


NO_MOVES = StateMoves()
