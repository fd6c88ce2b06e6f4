"""`StepDeltas`: what a step gave choices, as columns, on its way from the engine to a client. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.logprob_columns import LogprobColumns
from realizar.outputs import NO_DRAFTS, DraftUse, FinishReason, RowError, SnapshotUse

_NUMBER_BYTES, _TOKEN_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class ChoiceStart:
    """The number by which deltas name a choice from now on, and the facts that are known with its first delta.

    Attributes:
        number: never used twice by one engine.
        scheduled_s: of `time.monotonic`: when it first entered a step; when it failed, if before that.
        num_cached_tokens: prompt tokens that it found in the prefix cache then.
    """

    number: int
    request_id: str
    choice: int
    scheduled_s: float
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceSnapshots:
    """The snapshots of states that a choice used by now, in place of what was said of it before."""

    number: int
    use: SnapshotUse


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of a choice.

    `stop_token_id` ended it, and is then the last of its tokens. `pooled` are float32 values [hidden_size], and
    `drafts` all that were verified of it.
    """

    number: int
    finish_reason: FinishReason
    stop_token_id: int | None = None
    pooled: tuple[float, ...] | None = None
    drafts: DraftUse = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities that a step gave choices which list equally many ids. ValueError: columns don't fit together.

    `numbers`, int64 [tokens], are the choices of tokens, in the order of each choice's tokens or of its prompt's.
    """

    numbers: bytes
    entries: LogprobColumns

    def __post_init__(self) -> None:
        num_tokens, rest = divmod(len(self.numbers), _NUMBER_BYTES)
        if rest or not self.entries.fits(num_tokens):
            raise ValueError(f"columns of log-probabilities do not fit {len(self.numbers)} bytes of choices")

    def number_list(self) -> list[int]:
        return memoryview(self.numbers).cast("q").tolist()


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a whole request, named by one of its choices, ended without its output; nothing of it follows."""

    number: int
    error: RowError


@dataclass(frozen=True, slots=True)
class StepDeltas:
    """The deltas of one step. Entry i of `numbers` and `token_ids` is one token; what few choices have is listed apart.

    Columns are bytes in the machine's order, since both sides run on one machine: numpy's `tobytes` makes them and
    `memoryview.cast` reads them. A choice's tokens come before its end, and its start before everything else that names
    it.

    Attributes:
        produced_s: of `time.monotonic`: when the step ended.
        numbers: int64 [tokens], the choice of each new token, by its number.
        token_ids: int32 [tokens], in the order of each choice's; a stop token that ended a choice is its last.
        starts: choices of which nothing came before. snapshots: of choices that used more of them than before.
        logprobs: of new tokens, one for each of the choice's tokens here, where asked for.
        prompt_logprobs: of the prompt tokens that this step scored; the prompt's first token has none.
        ends: choices of which nothing follows.
        failures: requests of which nothing follows.

    Raises:
        ValueError: the columns don't fit together.
    """

    produced_s: float
    numbers: bytes = b""
    token_ids: bytes = b""
    starts: tuple[ChoiceStart, ...] = ()
    snapshots: tuple[ChoiceSnapshots, ...] = ()
    logprobs: tuple[StepLogprobs, ...] = ()
    prompt_logprobs: tuple[StepLogprobs, ...] = ()
    ends: tuple[ChoiceEnd, ...] = ()
    failures: tuple[RequestFailure, ...] = ()

    def __post_init__(self) -> None:
        num_tokens, rest = divmod(len(self.token_ids), _TOKEN_BYTES)
        if rest or len(self.numbers) != num_tokens * _NUMBER_BYTES:
            raise ValueError(f"{len(self.token_ids)} bytes of tokens do not fit {len(self.numbers)} bytes of choices")

    def __bool__(self) -> bool:
        """False where no choice got anything."""
        parts = self.numbers, self.starts, self.snapshots, self.prompt_logprobs, self.ends, self.failures
        return any(map(len, parts))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // _TOKEN_BYTES

    def number_list(self) -> list[int]:
        return memoryview(self.numbers).cast("q").tolist()

    def token_list(self) -> list[int]:
        return memoryview(self.token_ids).cast("i").tolist()
