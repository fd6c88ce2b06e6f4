"""`FollowedGrammar`, `FollowedRow`: the engine process's records of a grammar and its rows."""

from __future__ import annotations

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
        waiting: rows that are asked about once a dead process is replaced; None while none is being replaced.
        is_growing: True while a process is being added.
    """

    structured: StructuredOutput
    worker: GrammarWorker | None = None
    holders: dict[str, str] = field(default_factory=dict)
    num_rows: int = 0
    retired: bool = False
    waiting: list[FollowedRow] | None = None
    more: list[GrammarWorker] = field(default_factory=list)
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
    def is_busy(self) -> bool:
        """True if a process has a row, which may have ended since, or is being added or replaced."""
        return self.waiting is not None or self.is_growing or any(worker.is_followed for worker in self.workers)

    @property
    def idle(self) -> bool:
        """True if no request needs it."""
        return not self.holders and not self.num_rows


@dataclass(eq=False, slots=True)
class FollowedRow:
    """The state of one row in its grammar.

    Attributes:
        slot: its slot in the shared memory.
        output: all chosen ids, after `num_begun` ids that were there before the first choice.
        placed: the process that is to compute its masks.
        worker: the process that follows it, under the name `key`.
        drafts: proposed next tokens that its last question names.
        error: the reason why the row can't go on, or None.
        cause: cause of the error: `request` is the grammar, `engine` the machine or the program.
        closed: True once it has ended; its slot may be in use still.
    """

    slot: int
    grammar: FollowedGrammar
    output: list[int]
    num_begun: int = 0
    placed: GrammarWorker | None = None
    worker: GrammarWorker | None = None
    key: int = -1
    drafts: tuple[int, ...] = ()
    error: str | None = None
    cause: ErrorCause = "request"
    closed: bool = False

    def place(self, worker: GrammarWorker | None) -> None:
        """Have its masks computed by a process from now on; None if it has ended."""
        if worker is not self.placed:
            if self.placed is not None:
                self.placed.num_rows -= 1
            if worker is not None:
                worker.num_rows += 1
            self.placed = worker

    def find_place(self) -> GrammarWorker | None:
        """Place it with the process that is to compute its masks: its own, unless another one has far fewer rows."""
        workers = self.grammar.workers
        least = min(workers, key=lambda worker: worker.num_rows, default=None)
        if least is None or self.placed not in workers or self.placed.num_rows > least.num_rows + 2:
            self.place(least)
        return self.placed

    def fail(self, reason: str, cause: ErrorCause) -> None:
        """Note the row's error, from any thread."""
        self.error, self.cause = reason, cause
