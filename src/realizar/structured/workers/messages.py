"""Messages between the engine's process, the fork server and the workers. msgspec.

The fork server answers each command in order. A worker answers `Load` and `Drop`; requests for masks of its rows and
their answers are in the shared memory (`mask_memory`), and each side sends the other what there is to tell beside them.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The first record to the fork server, with sizes of `MaskMemory`; the answer is `Done` or `Refused`."""

    tokens: GrammarTokens
    num_slots: int
    most_drafts: int
    num_lines: int


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start a worker; a byte with its end of a pair of sockets follows. The answer is `Forked` or `Refused`.

    `place`: its index in the columns of the workers in the shared memory. `memory_bytes`: memory that it may use beyond
    the fork server's.
    """

    place: int
    memory_bytes: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """Kill a worker, which may have ended already, and wait for its end; the answer is `Ended`."""

    place: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The vocabulary is read."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command is refused, of a worker that to load a grammar; `reason` is one line for the user."""

    reason: str
    grammar: int = 0


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The worker's process."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """`status`: the exit status, or the negative number of the signal that ended the process; None: it had none."""

    status: int | None


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Compile a grammar, named by a number above 0. The answer: `Loaded` or `Refused`.

    `cpu_s`: seconds of processor time for it, after which the kernel ends the worker.
    """

    grammar: int
    structured: StructuredOutput
    cpu_s: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A grammar is compiled. `cpu_s`: seconds of processor time that this took. `memory_bytes`: the memory that the
    largest of the worker's grammars took.
    """

    grammar: int
    memory_bytes: int
    cpu_s: float


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """No row will follow a grammar any more; the answer is `Dropped`."""

    grammar: int


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """A grammar is forgotten; nothing more is written to its lines."""

    grammar: int


class Explore(msgspec.Struct, frozen=True, tag="explore"):
    """A grammar has MOST_STATES of the shared memory's lines from `first` on for its known states, until `Dropped`."""

    grammar: int
    first: int


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Follow a row from now on, whose requests and masks are in the shared memory.

    `key` is a number above 0 that is never used again; requests of its slot are about this row while the slot has it.
    `token_ids` is its whole output so far.
    """

    key: int
    slot: int
    grammar: int
    token_ids: tuple[int, ...]


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The row of a slot has ended, or is followed elsewhere."""

    key: int
    slot: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Rows have requests; sent to a worker that sleeps."""


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """A row can't go on, for a reason in one line. Sent before its request counts as answered."""

    key: int
    reason: str


class Heavy(msgspec.Struct, frozen=True, tag="heavy"):
    """A grammar should have a worker of its own: its masks take long, or it has used much memory."""

    grammar: int
    memory_bytes: int


class WantLines(msgspec.Struct, frozen=True, tag="want_lines"):
    """The worker would look for all states of a grammar; `Explore` follows if lines are free."""

    grammar: int


ToServer: TypeAlias = Vocabulary | Fork | End
FromServer: TypeAlias = Done | Refused | Forked | Ended
ToWorker: TypeAlias = Load | Drop | Explore | Follow | Leave | Look
FromWorker: TypeAlias = Loaded | Refused | Dropped | Stuck | Heavy | WantLines
