"""`FollowedGrammar` and `FollowedRow`: a grammar and a row of it, as the engine's process knows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.worker import GrammarWorker


@dataclass(eq=False, slots=True)
class FollowedGrammar:
    """A grammar that has been compiled once.

    Attributes:
        worker: its process; None where that has died, until a row needs it.
        holders: clients of the requests that have it or will have it, by their ids.
        num_rows: rows that follow it.
        closed: keys of rows that ended since the last step.
        retired: nobody may begin to follow it; it goes with its last row.
    """

    structured: StructuredOutput
    worker: GrammarWorker | None = None
    holders: dict[str, str] = field(default_factory=dict)
    num_rows: int = 0
    closed: deque[int] = field(default_factory=deque)
    retired: bool = False

    @property
    def idle(self) -> bool:
        """Whether no request needs it."""
        return not self.holders and not self.num_rows


@dataclass(eq=False, slots=True)
class FollowedRow:
    """Where one row is in its grammar.

    Attributes:
        key: never another row's.
        output: all that was chosen.
        worker: the process that has a matcher of this row; the first `num_sent` of `output` are taken in there.
        error: why the row can't go on, or None.
        cause: of the error: `request`: the grammar; `engine`: the machine or the program.
        ended: whether its output is complete.
    """

    key: int
    grammar: FollowedGrammar
    output: list[int]
    worker: GrammarWorker | None = None
    num_sent: int = 0
    error: str | None = None
    cause: ErrorCause = "request"
    ended: bool = False

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in what was chosen; nothing follows the end."""
        if not self.ended:
            self.output.extend(token_ids)
