"""The records of a step: each row's work, from the scheduler, and its results, from the backend.

One record serves every hop. The scheduler makes `ScheduledRow`, the engine hands the same object to the backend inside
`ForwardInput`, and the scheduler takes in the `RowOutput` that the backend made. Standard library only; numpy appears
in annotations alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from realizar.outputs import RowError, TokenLogprobs
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FROM_PREVIOUS_STEP = -1  # a token id that only the device knows: the row's choice in the step before


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """Log-probabilities wanted at one token of a row: those of the token that follows it.

    Attributes:
        index: token within this step's tokens of the row.
        target: id whose log-probability is wanted too (the next prompt token), or None.
        top_n: how many of the most probable ids.
    """

    index: int
    target: int | None
    top_n: int


@dataclass(frozen=True, slots=True)
class OpenedRow:
    """A row that starts with this step, as `Backend.open` takes it.

    Attributes:
        sequence_id: the scheduler's number of the sequence.
        row: its place in the backend and in the block tables.
        sampling: parameters of the request.
        history: prompt and any output so far (after preemption).
        num_prompt_tokens: how many of `history` are prompt.
        choice: index among the request's n choices.
    """

    sequence_id: int
    row: int
    sampling: SamplingParams
    history: tuple[int, ...]
    num_prompt_tokens: int
    choice: int


@dataclass(slots=True)  # one a row and step: frozen it would take four times as long to make
class ScheduledRow:
    """One row's share of a step.

    Attributes:
        sequence_id: the scheduler's own number of the sequence, never used twice.
        row: its place in the backend and in the block tables.
        token_ids: tokens to compute, none for a dead or padded row; FROM_PREVIOUS_STEP where not known yet.
        num_computed_tokens: tokens before these, already in the KV cache.
        sample: the logits after the last token give a choice, with drafts those before each draft too.
        logprob_queries: positions at which log-probabilities are wanted (prompt scoring).
        num_drafts: how many of `token_ids`, the last ones, are speculated; only with `sample`. A choice is made before
            each of them and after the last, as long as each is what was chosen; the choices are the same as without
            drafts.
        pooling: the final hidden state wanted: of the row's last token here, or the mean over its tokens from the first
            on. For a mean, all steps of the row must name it; each gives the mean so far.
    """

    sequence_id: int
    row: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    sample: bool
    logprob_queries: tuple[LogprobQuery, ...] = ()
    num_drafts: int = 0
    pooling: Pooling | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the row after this step, drafts included."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def draft_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def without_results(self) -> ScheduledRow:
        """The same tokens with no result wanted, for a row that can't give one."""
        return ScheduledRow(self.sequence_id, self.row, self.token_ids, self.num_computed_tokens, False)

    @property
    def is_decode(self) -> bool:
        """The row computes one token beside drafts and chooses after it; a chunk of a prompt may be as short."""
        return self.sample and len(self.token_ids) - self.num_drafts == 1


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: rows in the order of their tokens, decodes before chunks of prefill, and the rows to open first."""

    rows: tuple[ScheduledRow, ...]
    opened: tuple[OpenedRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([len(row.token_ids) for row in self.rows])

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of rows that compute one known choice, and its drafts."""
        return sum([len(row.token_ids) for row in self.rows if row.is_decode])

    @property
    def prompt_position(self) -> int:
        """Tokens before a prompt token of this step, in the mean; 0 where it has none."""
        chunks = [(row.num_tokens, row.num_computed_tokens) for row in self.rows if not row.is_decode]
        return sum(count * before for count, before in chunks) // max(sum(count for count, _ in chunks), 1)


@dataclass(slots=True)  # one a row and step: frozen it would take four times as long to make
class RowOutput:
    """One row's results.

    Attributes:
        row: its number.
        token_ids: choices of this step: one, more with accepted drafts, none when not sampling. None follows one of
            the row's `stop_token_ids`.
        logprobs: per choice, where the row's sampling parameters ask for them: those of the model's own distribution,
            before bias, penalties and temperature.
        queried: per `logprob_queries` entry. An entry whose target is None reports the most probable id.
        pooled: float32 [hidden_size], after the model's final norm and not normalised further; or None.
        error: why this row gets nothing more: its request is to be ended. All else is then empty, and what later steps
            on their way give the row means nothing; other rows are what they would have been without it.
    """

    row: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    queried: tuple[TokenLogprobs, ...] = ()
    pooled: NDArray[np.float32] | None = None
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's results: its rows in the order of the input."""

    rows: tuple[RowOutput, ...]
