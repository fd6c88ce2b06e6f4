"""Messages between the engine's process, the fork server and the workers. msgspec.

The fork server answers each command in order. A worker answers `Load` and `Drop`; requests for masks of its rows and
their answers are in the shared memory (`mask_memory`), and each side sends the other what there is to tell beside them.
"""

from __future__ import annotations

from typing import Self, TypeAlias

import msgspec

from realizar.structured.grammar_tokens import Encode as Encoder
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The first record to the fork server; the answer is `Done` or `Refused`. See `GrammarTokens` and `MaskMemory`.

    Attributes:
        can_encode: `Encode` is answered.
        encode_source: makes what `Encode` asks for, in the fork server; None where it can't be made there.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    vocab_size: int
    can_encode: bool
    encode_source: EncodeSource | None
    num_slots: int
    most_drafts: int
    num_lines: int

    @classmethod
    def of(cls, tokens: GrammarTokens, num_slots: int, most_drafts: int, num_lines: int) -> Self:
        """The record of some tokens; ids without a logit are left out."""
        return cls(
            tuple(tokens.token_bytes[: tokens.vocab_size]),
            tuple(tokens.special_ids),
            tokens.ends,
            tokens.vocab_size,
            tokens.encode is not None,
            tokens.encode_source,
            num_slots,
            most_drafts,
            num_lines,
        )

    def tokens(self, encode: Encoder) -> GrammarTokens:
        """The tokens again, with `encode` where the sender answers `Encode`; raises as `GrammarTokens` does."""
        encoder = encode if self.can_encode else None
        return GrammarTokens(self.token_bytes, self.special_ids, self.end_ids, self.vocab_size, encoder)


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Start a worker; a byte with its end of a pair of sockets follows. The answer is `Forked` or `Refused`.

    `place`: its index in the columns of the workers in the shared memory. `memory_bytes`: memory that it may use beyond
    the fork server's.
    """

    place: int
    memory_bytes: int


class Reap(msgspec.Struct, frozen=True, tag="reap"):
    """Wait for a worker, which has ended or been killed; the answer is `Reaped`."""

    pid: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The vocabulary is read."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command is refused, of a worker that to load a grammar; `reason` is one line for the user."""

    reason: str
    grammar: int = 0


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """The pid of the worker, which stays valid until `Reap`."""

    pid: int


class Reaped(msgspec.Struct, frozen=True, tag="reaped"):
    """`status`: the exit status, or the negative number of the signal that ended the process."""

    status: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Compile a grammar, named by a number above 0, of a kind and value. The answer: `Loaded` or `Refused`.

    `cpu_s`: seconds of processor time for it, after which the kernel ends the worker.
    """

    grammar: int
    kind: str
    value: str
    cpu_s: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A grammar is compiled. `memory_bytes`, `cpu_s`: memory and seconds of processor time that this took."""

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


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode a text with the model's tokenizer; the answer is `Encoded`."""

    text: str


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """The text's ids; None if the tokenizer failed."""

    token_ids: tuple[int, ...] | None


ToServer: TypeAlias = Vocabulary | Fork | Reap
FromServer: TypeAlias = Done | Refused | Forked | Reaped
ToWorker: TypeAlias = Load | Drop | Explore | Follow | Leave | Look | Encoded
FromWorker: TypeAlias = Loaded | Refused | Dropped | Stuck | Heavy | WantLines | Encode
