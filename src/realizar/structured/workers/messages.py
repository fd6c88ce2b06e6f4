"""What goes between the engine's process, the fork server and the processes of grammars. msgspec only.

All of it is asked by the engine's process and answered in order, but `Encode`, which a grammar's process asks while it
owes an answer.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The first record to the fork server; the answer is `Done` or `Refused`.

    Attributes:
        token_bytes: what each id adds to the text.
        special_ids: control tokens, which are no text.
        end_ids: ids that end an answer.
        vocab_size: logits per row.
        can_encode: whether `Encode` is answered.
        memory_bytes: what a grammar's process may take beyond what the fork server has.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    vocab_size: int
    can_encode: bool
    memory_bytes: int


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start a grammar's process; a byte with its end of a pair of sockets follows. The answer is `Forked`."""


class Reap(msgspec.Struct, frozen=True, tag="reap"):
    """Wait for a grammar's process, which has ended or been killed; the answer is `Reaped`."""

    pid: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was asked for is done. `memory_bytes`: what a grammar's process has taken for it."""

    memory_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """What was asked for can't be done; one line for the user that says why."""

    reason: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The pid stays that of this process until it is reaped."""

    pid: int


class Reaped(msgspec.Struct, frozen=True, tag="reaped"):
    """`status`: the exit status, or the negative number of the signal that ended the process."""

    status: int


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """The first record to a grammar's process: the fields of a `StructuredOutput`. The answer: `Done` or `Refused`.

    `cpu_s`: seconds of processor time after which the process is ended by the kernel.
    """

    kind: str
    value: str
    cpu_s: int


class RowStep(msgspec.Struct, frozen=True, array_like=True):
    """One row's part of a step.

    Attributes:
        key: of the row; not one of another row of this process, ever.
        starts: whether the row begins here; `token_ids` is then its whole output so far.
        token_ids: what was chosen since the last step.
        draft_ids: tokens that are proposed to follow.
    """

    key: int
    starts: bool
    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Compute masks of rows; the answer is `Stepped`.

    Attributes:
        rows: their masks follow one another in the shared memory, `len(draft_ids) + 1` each.
        closed: keys of rows that have ended.
        offset_bytes: where in the shared memory the first mask goes.
        memory_bytes: the size of the shared memory.
    """

    rows: tuple[RowStep, ...]
    closed: tuple[int, ...]
    offset_bytes: int
    memory_bytes: int


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """What came of a step.

    Attributes:
        errors: why rows can't go on, by key; their masks are empty.
        ended: keys of rows whose output is complete.
        memory_bytes: what the process has taken so far.
    """

    errors: dict[int, str]
    ended: tuple[int, ...]
    memory_bytes: int


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Which ids the model's tokenizer makes of a text; the answer is `Encoded`."""

    text: str


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """None where the tokenizer fails."""

    token_ids: tuple[int, ...] | None


ToServer: TypeAlias = Vocabulary | Fork | Reap
FromServer: TypeAlias = Done | Refused | Forked | Reaped
ToWorker: TypeAlias = Compile | Step | Encoded
FromWorker: TypeAlias = Done | Refused | Stepped | Encode
