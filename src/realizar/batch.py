"""What the scheduler decides for one step, before it becomes arrays. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.request import Pooling
from realizar.sampling_params import SamplingParams

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
    """A row that starts with this step: the arguments of `Backend.open`, and the scheduler's number of the sequence."""

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
        token_ids: tokens to compute; FROM_PREVIOUS_STEP where not known yet.
        num_computed_tokens: tokens before these.
        sample: whether a choice is wanted after the last of them.
        logprob_queries: prompt positions to score.
        draft_ids: speculated tokens, the last of `token_ids`; only with `sample`.
        pooling: the final hidden state wanted after these tokens.
    """

    sequence_id: int
    row: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    sample: bool
    logprob_queries: tuple[LogprobQuery, ...] = ()
    draft_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    def without_results(self) -> ScheduledRow:
        """The same tokens, computed for nobody: of a row that can't give a result."""
        return ScheduledRow(self.sequence_id, self.row, self.token_ids, self.num_computed_tokens, False)

    @property
    def is_decode(self) -> bool:
        """Whether it computes one token beside drafts, and chooses after it; a chunk of a prompt may be as short."""
        return self.sample and len(self.token_ids) - len(self.draft_ids) == 1


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: rows in the order of their tokens, decodes before chunks of prefill, and the rows to open first."""

    rows: tuple[ScheduledRow, ...]
    opened: tuple[OpenedRow, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of rows that compute one known choice, and its drafts."""
        return sum(row.num_scheduled_tokens for row in self.rows if row.is_decode)

    @property
    def prompt_position(self) -> int:
        """Tokens before a prompt token of this step, in the mean; 0 where it has none."""
        chunks = [(row.num_scheduled_tokens, row.num_computed_tokens) for row in self.rows if not row.is_decode]
        return sum(count * before for count, before in chunks) // max(sum(count for count, _ in chunks), 1)
