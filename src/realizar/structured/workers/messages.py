"""Messages between the engine's process, the fork server and the grammars' processes. msgspec.

The engine's process sends all commands and gets their answers in order. The exception is `Encode`, which a grammar's
process sends before its own answer.
"""

from __future__ import annotations

from typing import Self, TypeAlias

import msgspec

from realizar.structured.grammar_tokens import Encode as Encoder
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The first record to the fork server; the answer is `Done` or `Refused`.

    Attributes:
        token_bytes, special_ids, end_ids, vocab_size: fields of `GrammarTokens`.
        can_encode: True if `Encode` is answered.
        encode_source: makes what `Encode` asks for, in the fork server; None where it can't be made there.
        memory_bytes: memory that a grammar's process may use beyond the fork server's.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    vocab_size: int
    can_encode: bool
    encode_source: EncodeSource | None
    memory_bytes: int

    @classmethod
    def of(cls, tokens: GrammarTokens, memory_bytes: int) -> Self:
        """The record of some tokens; ids without a logit are left out."""
        return cls(
            tuple(tokens.token_bytes[: tokens.vocab_size]),
            tuple(tokens.special_ids),
            tokens.ends,
            tokens.vocab_size,
            tokens.encode is not None,
            tokens.encode_source,
            memory_bytes,
        )

    def tokens(self, encode: Encoder) -> GrammarTokens:
        """The tokens again, with `encode` where this record's sender answers `Encode`.

        Raises:
            InvalidRequestError: as of `GrammarTokens`.
        """
        encoder = encode if self.can_encode else None
        return GrammarTokens(self.token_bytes, self.special_ids, self.end_ids, self.vocab_size, encoder)


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start a grammar's process; a byte with its end of a pair of sockets follows. The answer is `Forked`."""


class Reap(msgspec.Struct, frozen=True, tag="reap"):
    """Wait for a grammar's process, which has ended or been killed; the answer is `Reaped`."""

    pid: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command is done. `memory_bytes`: memory that a grammar's process has used for it."""

    memory_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command is refused; `reason` is one line for the user."""

    reason: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The pid of the forked process, which stays valid until `Reap`."""

    pid: int


class Reaped(msgspec.Struct, frozen=True, tag="reaped"):
    """`status`: the exit status, or the negative number of the signal that ended the process."""

    status: int


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """The first record to a grammar's process: the fields of a `StructuredOutput`. The answer: `Done` or `Refused`.

    `cpu_s`: seconds of processor time after which the kernel ends the process.
    """

    kind: str
    value: str
    cpu_s: int


class RowStep(msgspec.Struct, frozen=True, array_like=True):
    """One row's part of a step.

    Attributes:
        key: the row's key, which is never reused in this process.
        starts: True if the row begins here; `token_ids` is then its whole output so far.
        token_ids: ids chosen since the last step.
        draft_ids: proposed next tokens.
        place: number of the first of its `len(draft_ids) + 1` masks in the shared memory.
    """

    key: int
    starts: bool
    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    place: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Compute masks of rows; the answer is `Stepped`.

    Attributes:
        rows: the rows, each at most once.
        closed: keys of rows that have ended or follow the grammar elsewhere.
        memory_bytes: the size of the shared memory.
    """

    rows: tuple[RowStep, ...]
    closed: tuple[int, ...]
    memory_bytes: int


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The result of a step.

    Attributes:
        errors: reasons why rows can't go on, by key; their masks are empty.
        ended: keys of rows whose output is complete.
        memory_bytes: memory that the process has used so far.
        busy_s: seconds that the step took it.
    """

    errors: dict[int, str]
    ended: tuple[int, ...]
    memory_bytes: int
    busy_s: float


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode a text with the model's tokenizer; the answer is `Encoded`."""

    text: str


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """The text's ids; None if the tokenizer failed."""

    token_ids: tuple[int, ...] | None


ToServer: TypeAlias = Vocabulary | Fork | Reap
FromServer: TypeAlias = Done | Refused | Forked | Reaped
ToWorker: TypeAlias = Compile | Step | Encoded
FromWorker: TypeAlias = Done | Refused | Stepped | Encode
