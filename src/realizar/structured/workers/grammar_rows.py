"""`KnownGrammar`, `GrammarRow`: the engine process's records of a grammar and its rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.worker import Worker

NO_LINE = -1
"""In place of a line of the shared memory."""

_NUMBERS = itertools.count(1)


@dataclass(eq=False, slots=True)
class KnownGrammar:
    """A grammar that has been compiled once.

    Attributes:
        memory_bytes: memory that compiling it and its masks have taken, in one worker.
        number: its name in messages.
        users: clients of the requests that use it or will use it, by request id.
        is_dropped: no row follows it, and none will.
        compiled_in: a worker that has compiled it and that nobody uses yet.
        copies: workers that have it.
        is_alone: it has a worker of its own: it takes long, or has ended another one.
        num_failed_loads: workers that have ended one after the other while they compiled it.
        num_late: workers of its own that took too long.
        is_condemned: one of its rows has ended its worker twice.
        refusal: the reason and cause for which no row may follow it any more.
        first_line: of its known states in the shared memory, or NO_LINE.
    """

    structured: StructuredOutput
    memory_bytes: int = 0
    number: int = field(default_factory=lambda: next(_NUMBERS))
    users: dict[str, str] = field(default_factory=dict)
    num_rows: int = 0
    is_dropped: bool = False
    compiled_in: Worker | None = None
    copies: int = 0
    is_alone: bool = False
    num_failed_loads: int = 0
    num_late: int = 0
    is_condemned: bool = False
    refusal: tuple[str, ErrorCause] | None = None
    first_line: int = NO_LINE

    @property
    def size_bytes(self) -> int:
        """Memory that it uses, in all workers."""
        return self.memory_bytes * max(self.copies, 1)

    @property
    def idle(self) -> bool:
        return not self.users and not self.num_rows


@dataclass(eq=False, slots=True)
class GrammarRow:
    """The state of one row in its grammar.

    Attributes:
        slot: its slot in the shared memory.
        output: all sampled ids, after `num_begun` ids that were there before the first of them.
        worker: the worker that follows it, under the name `key`.
        is_stale: a worker is to follow it anew, as its worker lacks tokens, or others need that one for themselves.
        num_new: ids at the output's end that came after the last request.
        line: of its known state in the shared memory, or NO_LINE.
        drafts: proposed next tokens that its last request names.
        error: the reason why the row can't go on, or None. cause: `request` is the grammar, `engine` all else.
        closed: it has ended; its slot may be in use still.
        died_at: its length when its worker died of it, or -1. died_of: the cause of that.
        waited_at: its length when its worker died last while it was asked. num_waits: so often at that length.
    """

    slot: int
    grammar: KnownGrammar
    output: list[int]
    num_begun: int = 0
    worker: Worker | None = None
    key: int = 0
    is_stale: bool = True
    num_new: int = 0
    line: int = NO_LINE
    drafts: tuple[int, ...] = ()
    error: str | None = None
    cause: ErrorCause = "request"
    closed: bool = False
    died_at: int = -1
    died_of: ErrorCause = "request"
    waited_at: int = -1
    num_waits: int = 0
