"""Messages between the engine's process, the fork server and the grammars' processes. msgspec.

The fork server answers each command in order. A grammar's process answers `Compile`; from then on its rows' questions
and answers are in the shared memory (`mask_memory`), and each side sends the other what there is to tell beside them.
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
        num_slots, most_drafts, num_lines: of the shared memory.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    vocab_size: int
    can_encode: bool
    encode_source: EncodeSource | None
    memory_bytes: int
    num_slots: int
    most_drafts: int
    num_lines: int

    @classmethod
    def of(cls, tokens: GrammarTokens, memory_bytes: int, num_slots: int, most_drafts: int, num_lines: int) -> Self:
        """The record of some tokens; ids without a logit are left out."""
        return cls(
            tuple(tokens.token_bytes[: tokens.vocab_size]),
            tuple(tokens.special_ids),
            tokens.ends,
            tokens.vocab_size,
            tokens.encode is not None,
            tokens.encode_source,
            memory_bytes,
            num_slots,
            most_drafts,
            num_lines,
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

    `cpu_s`: seconds of processor time after which the kernel ends the process. `slow_s`, `slow_answers`: `Slow` is sent
    when so many answers, each for several rows, took so many seconds.
    """

    kind: str
    value: str
    cpu_s: int
    slow_s: float
    slow_answers: int


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Follow a row from now on, whose questions and masks are in the shared memory.

    Attributes:
        key: a number that is never used again; questions of its slot are about this row while the slot has it.
        slot: the row's slot in `MaskMemory`.
        token_ids: its whole output so far.
    """

    key: int
    slot: int
    token_ids: tuple[int, ...]


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A row has ended, or follows the grammar elsewhere."""

    key: int


class Lines(msgspec.Struct, frozen=True, tag="lines"):
    """The process has MOST_STATES of the shared memory's lines from `first` on, for its known states, to its end."""

    first: int


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Rows have questions; sent where no bell rings."""


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """A row can't go on, for a reason in one line. Sent before its question counts as answered."""

    key: int
    reason: str


class Slow(msgspec.Struct, frozen=True, tag="slow"):
    """Many answers for several rows at once have taken long."""


class WantLines(msgspec.Struct, frozen=True, tag="want_lines"):
    """The process would look for all states of its grammar; `Lines` follows if some are free."""


class Used(msgspec.Struct, frozen=True, tag="used"):
    """The process has used so much memory, noticeably more than it said before."""

    memory_bytes: int


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode a text with the model's tokenizer; the answer is `Encoded`."""

    text: str


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """The text's ids; None if the tokenizer failed."""

    token_ids: tuple[int, ...] | None


ToServer: TypeAlias = Vocabulary | Fork | Reap
FromServer: TypeAlias = Done | Refused | Forked | Reaped
ToWorker: TypeAlias = Compile | Follow | Leave | Lines | Look | Encoded
FromWorker: TypeAlias = Done | Refused | Stuck | Slow | WantLines | Used | Encode
