"""What steps give of requests beside tokens: errors, log-probabilities, snapshots and drafts. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import Literal, NamedTuple, Self

from realizar.errors import CapacityError, InvalidRequestError, RealizarError

FinishReason = Literal["stop", "length"]
ErrorCause = Literal["request", "engine", "memory"]


@dataclass(frozen=True, slots=True)
class RowError:
    """The error of one request that ended without its output, while all others go on.

    Attributes:
        message: one line for the user, without paths and addresses.
        cause: `request`: its own fields, so it fails wherever it is sent; `engine`: the model's numbers, a kernel, or a
            fault of the program; `memory`: a step, or the row's own tables, did not fit into memory.
        param: the field of the request at fault, where one is known.
    """

    message: str
    cause: ErrorCause = "engine"
    param: str | None = None

    @classmethod
    def of(cls, error: Exception, where: str) -> RowError:
        """Convert an exception of one row, raised by `where`, such as `sampling`.

        An unexpected exception is shown by its class only; its text is logged.
        """
        if isinstance(error, InvalidRequestError):
            return cls(str(error), "request", error.param)
        if isinstance(error, CapacityError):
            return cls(str(error), "memory")
        if isinstance(error, MemoryError):
            return cls(f"there is no memory for the request's {where}", "memory")
        if isinstance(error, RealizarError):
            return cls(str(error))
        return cls(f"the request's {where} failed: {type(error).__name__}")


class TokenLogprobs(NamedTuple):
    """`logprob` of one id, its `rank` (1 is the most probable), and the top ids with theirs, best first.

    Those of many tokens travel as `LogprobColumns`, a sequence of these.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class _Counts:
    """Counts of one choice, or of several together: a dataclass of integers."""

    __slots__: tuple[str, ...] = ()

    @classmethod
    def total(cls, uses: Iterable[Self]) -> Self:
        """The sums of at least one."""
        return cls(*map(sum, zip(*map(attrgetter(*cls.__slots__), uses), strict=True)))


@dataclass(frozen=True, slots=True)
class SnapshotUse(_Counts):
    """Snapshots of states that a choice of a model with a state started from, and left.

    Attributes:
        restored: starts from one, also after a preemption. fetched: those of them from the host's memory.
        taken: new ones. dropped: others that were given up for those, or with blocks that the choice took.
    """

    taken: int = 0
    restored: int = 0
    fetched: int = 0
    dropped: int = 0


NO_SNAPSHOTS = SnapshotUse()


@dataclass(frozen=True, slots=True)
class DraftUse(_Counts):
    """Drafts of a choice that were verified, and how many of them were right.

    `predicted` and `predicted_right` are those of both that its request's prediction brought.
    """

    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_right: int = 0

    def more(self, drafted: int, accepted: int) -> DraftUse:
        """With so many more, which no prediction brought."""
        return DraftUse(self.drafted + drafted, self.accepted + accepted, self.predicted, self.predicted_right)


NO_DRAFTS = DraftUse()


def added_by_place(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The sums of two lists of counts, one of which may be shorter."""
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of reading a request's prompt: `num_read` of `num_tokens`, cached ones counted as read."""

    num_tokens: int
    num_cached_tokens: int
    num_read: int
