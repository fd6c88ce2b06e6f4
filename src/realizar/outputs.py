"""Outputs: of a step for each choice, of a stream for each delta, and of a whole request. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


@dataclass(frozen=True, slots=True)
class SnapshotUse:
    """Snapshots of states that a choice of a model with a state started from, and left.

    Attributes:
        restored: starts from one, also after a preemption. fetched: those of them from the host's memory.
        taken: new ones. dropped: others that were given up for those, or with blocks that the choice took.
    """

    taken: int = 0
    restored: int = 0
    fetched: int = 0
    dropped: int = 0

    @classmethod
    def total(cls, uses: Iterable[SnapshotUse]) -> SnapshotUse:
        counts = [(use.taken, use.restored, use.fetched, use.dropped) for use in uses]
        return cls(*map(sum, zip(*counts, strict=True)))


NO_SNAPSHOTS = SnapshotUse()


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of reading a request's prompt: `num_read` of `num_tokens`, cached ones counted as read."""

    num_tokens: int
    num_cached_tokens: int
    num_read: int


@dataclass(slots=True)  # one a choice and step: frozen it would take four times as long to make
class ChoiceDelta:
    """A delta of a stream: the output that one choice gained. The texts of all deltas concatenate to the whole.

    Attributes:
        token_ids: the tokens gained; their text may come with a later delta, if it ends inside a character or could be
            the start of a stop string.
        finish_reason: set on the last delta of the choice.
        stop_reason: the stop string or the stop token id that ended it.
        num_cached_tokens: prompt tokens that the first choice found in the prefix cache, as far as it is known yet.
        prompt_progress: set where the delta tells of the prompt, and of nothing else.
        snapshots: that the choice used by now.
        marks: where in `text` tokens begin that mark tool calls or reasoning: the same words elsewhere are a quotation.
    """

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    prompt_progress: PromptProgress | None = None
    snapshots: SnapshotUse = NO_SNAPSHOTS
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of a request's stages, in seconds of `time.monotonic`."""

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float

    @property
    def queue_s(self) -> float:
        return self.scheduled_s - self.arrival_s

    @property
    def prefill_s(self) -> float:
        """Seconds from the first step to the first token, or to the end of scoring."""
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float:
        return self.finished_s - self.first_token_s


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished choice.

    Attributes:
        index: among the n choices.
        text: without the stop string or the text of a stop token.
        token_ids: all generated tokens, a stop token included.
        logprobs: per token; None where not asked for. A server's streams give them with their deltas alone.
        stop_reason: the stop string or the stop token id that ended it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: Sequence[TokenLogprobs] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        prompt: its text, or None where token ids were given.
        prompt_logprobs: per prompt token, the first None; None where not asked for.
        outputs: the choices, by index.
        num_cached_tokens: prompt tokens that the first choice found in the prefix cache.
        snapshots: that all choices used.
        pooled: float32 values [hidden_size], of a pooled request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    pooled: tuple[float, ...] | None = None
    snapshots: SnapshotUse = NO_SNAPSHOTS

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens over the time to the first token; 0 where no time passed."""
        return len(self.prompt_token_ids) / self.timings.prefill_s if self.timings.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after each choice's first over the time after the first token; 0 where there were none."""
        later = self.num_generated_tokens - sum(bool(output.token_ids) for output in self.outputs)
        return later / self.timings.decode_s if later and self.timings.decode_s > 0 else 0.0
