"""`StateMoves`: the copies of states that a step makes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Copies between the states of rows and snapshots, for a model whose layers have states.

    Attributes:
        restored: pairs (row, snapshot): before anything else of the step, the row's state becomes the snapshot's.
        taken: pairs (row, snapshot): after the row's tokens in the step, none of which is uncertain, its state is
            copied to the snapshot.
    """

    restored: tuple[tuple[int, int], ...] = ()
    taken: tuple[tuple[int, int], ...] = ()


NO_MOVES = StateMoves()
