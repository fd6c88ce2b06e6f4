"""`FollowedGrammar`, `FollowedRow`, `AskedMasks`: the engine process's records of a grammar, its rows and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.worker import GrammarWorker


@dataclass(eq=False, slots=True)
class FollowedGrammar:
    """A grammar that has been compiled once.

    Attributes:
        worker: its process; None after that has died, until a row needs one.
        more: further processes, where its rows are too many for one.
        holders: clients of the requests that use it or will use it, by request id.
        num_rows: number of rows that follow it.
        retired: True if no new row may follow it; it is dropped with its last row.
        waiting: masks that are asked for once a dead process is replaced; None while none is being replaced.
        num_slow: answers of its processes that took long, since the last process was added.
        is_growing: True while a process is being added.
    """

    structured: StructuredOutput
    worker: GrammarWorker | None = None
    holders: dict[str, str] = field(default_factory=dict)
    num_rows: int = 0
    retired: bool = False
    waiting: list[AskedMasks] | None = None
    more: list[GrammarWorker] = field(default_factory=list)
    num_slow: int = 0
    is_growing: bool = False

    @property
    def workers(self) -> list[GrammarWorker]:
        """Its processes that are alive."""
        return list(self.more) if self.worker is None else [self.worker, *self.more]

    def add_worker(self, worker: GrammarWorker) -> None:
        """Let rows follow the grammar in one more process."""
        if self.worker is None:
            self.worker = worker
        else:
            self.more = [*self.more, worker]

    @property
    def is_asked(self) -> bool:
        """True if a process has a question, of a row that may have ended since, or is being added or replaced."""
        return self.waiting is not None or self.is_growing or any(worker.is_asked for worker in self.workers)

    @property
    def idle(self) -> bool:
        """True if no request needs it."""
        return not self.holders and not self.num_rows


@dataclass(eq=False, slots=True)
class FollowedRow:
    """The state of one row in its grammar.

    Attributes:
        key: unique among all rows.
        output: all chosen ids.
        placed: the process that is to compute its masks.
        worker: the process with this row's matcher, which was sent the first `num_sent` ids of `output`.
        error: the reason why the row can't go on, or None.
        cause: cause of the error: `request` is the grammar, `engine` the machine or the program.
        ended: True if its output is complete.
    """

    key: int
    grammar: FollowedGrammar
    output: list[int]
    placed: GrammarWorker | None = None
    worker: GrammarWorker | None = None
    num_sent: int = 0
    error: str | None = None
    cause: ErrorCause = "request"
    ended: bool = False

    def place(self, worker: GrammarWorker | None) -> None:
        """Have its masks computed by a process from now on; None if it has ended."""
        if worker is not self.placed:
            if self.placed is not None:
                self.placed.num_rows -= 1
            if worker is not None:
                worker.num_rows += 1
            self.placed = worker

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append chosen ids, unless the output is complete."""
        if not self.ended:
            self.output.extend(token_ids)


@dataclass(eq=False, slots=True)
class AskedMasks:
    """The masks of a row's next choice and of its drafts.

    Attributes:
        place: number of the first of its `len(drafts) + 1` masks in the shared memory.
        done: True once they are there, or the row has an error.
        dropped: True if nobody waits for them any more; their places are free once they are done.
    """

    row: FollowedRow
    drafts: tuple[int, ...]
    place: int
    done: bool = False
    dropped: bool = False

    def fail(self, reason: str, cause: ErrorCause) -> None:
        """Note the row's error, from any thread; `done` follows on the engine's, which hands out the places."""
        self.row.error, self.row.cause = reason, cause
