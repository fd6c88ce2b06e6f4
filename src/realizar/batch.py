"""The records of a step: each row's work, from the scheduler, and its results, from the backend. numpy only.

The scheduler makes `StepRows`, the engine hands it to the backend inside `ForwardInput`, and the scheduler takes in the
`StepOutput` that the backend made. Both hold one column for each fact of a row, because a record for each row would
cost more time than the device needs for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from realizar.outputs import RowError, TokenLogprobs
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams

FROM_PREVIOUS_STEP = -1  # a token id that only the device knows: what the row sampled in the step before
GIVEN_EMBEDDING = -1  # in a row's history, in place of a token id under which the request brings an embedding
NOT_SAMPLED = -1  # in place of a token id where a row has sampled nothing
PROPOSED = -(1 << 30)  # PROPOSED - place: the draft at that place, from 0, of those that the backend proposed last


def head_id_table(ids: Sequence[int]) -> NDArray[np.int32]:
    """int32 [rows + 1], what the rows of a head stand for; as the last, NOT_SAMPLED stands for itself."""
    return np.array([*ids, NOT_SAMPLED], np.int32)


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """Log-probabilities wanted of the token that follows the one at `index` of a row's tokens in this step.

    `target` is an id whose own is wanted too (the next prompt token), or None; `top_n` are the most probable ids.
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
        sampling: with `seed` set, or it is 0.
        history: prompt and any output so far (after preemption); GIVEN_EMBEDDING where the request brings one.
        num_prompt_tokens: how many of `history` are prompt.
        choice: index among the request's n choices.
        rope_positions: as of `Request`.
    """

    sequence_id: int
    row: int
    sampling: SamplingParams
    history: tuple[int, ...]
    num_prompt_tokens: int
    choice: int
    rope_positions: bytes = b""


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a step in the order of their tokens, one column for each fact. Nothing changes it once it is made.

    Attributes:
        sequence_ids: int64 [rows], the scheduler's own number of each sequence, never used twice.
        numbers: intp [rows], the place of each row in the backend and in the block tables.
        num_computed_tokens: int32 [rows], tokens before those of the step, already in the KV cache.
        token_ids: int32 [tokens], those to compute, drafts included; FROM_PREVIOUS_STEP where not known yet, and
            PROPOSED - place for a row's drafts that the backend has proposed, which the host need not know.
        starts: int32 [rows + 1], index of each row's first token, and the number of tokens at the end.
        samples: bool [rows], true where a token is to be sampled after the last one, and before each draft, as long as
            each draft is what was sampled; the sampled tokens are the same as without drafts.
        num_drafts: int32 [rows], how many of the row's last tokens are speculated; only where it samples.
        num_uncertain: int32 [rows], how many of the row's last tokens may be refused or computed again: its drafts, and
            one more where a row may be deferred. A model with a state keeps the state before them; others ignore it.
        logprob_queries: by index of the row, where there are any.
        pooling: the final hidden state wanted, by index of the row: of the row's last token here, or the mean over its
            tokens from the first on. For a mean, all steps of the row must name it; each gives the mean so far.
        only_decodes: each row computes one token without drafts and samples after it, and nothing else is wanted.
        lookahead: int32 [rows], how many drafts the backend may propose after the row's sampled tokens, and its spare
            positions (`Capacity`). For their keys and values the row has blocks: for so many positions after its
            tokens. None where no row wants any.
        embeddings: that requests bring in place of those of their ids (`PromptEmbeddings`): of each run of tokens the
            index of the first in the step, and float32 [run, hidden_size], read-only.
        images: runs of these tokens that see each other: index of the first in the step, and number. They go on to the
            end of an image.
    """

    sequence_ids: NDArray[np.int64]
    numbers: NDArray[np.intp]
    num_computed_tokens: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    num_drafts: NDArray[np.int32]
    num_uncertain: NDArray[np.int32]
    logprob_queries: Mapping[int, tuple[LogprobQuery, ...]] = field(default_factory=dict)
    pooling: Mapping[int, Pooling] = field(default_factory=dict)
    only_decodes: bool = False
    lookahead: NDArray[np.int32] | None = None
    embeddings: tuple[tuple[int, NDArray[np.float32]], ...] = ()
    images: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_decodes(
        cls,
        sequence_ids: NDArray[np.int64],
        numbers: NDArray[np.intp],
        num_computed_tokens: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        num_uncertain: NDArray[np.int32] | None = None,
    ) -> StepRows:
        """Rows of one token each, which sample after it. All arguments are [rows]; no token is uncertain by default."""
        starts, samples, none = _decode_columns(len(numbers))
        uncertain = none if num_uncertain is None else num_uncertain
        return cls(
            sequence_ids, numbers, num_computed_tokens, token_ids, starts, samples, none, uncertain, only_decodes=True
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def num_tokens(self) -> NDArray[np.int32]:
        """int32 [rows], tokens of each row in the step."""
        return self.starts[1:] - self.starts[:-1]

    @cached_property
    def num_context_tokens(self) -> NDArray[np.int32]:
        """int32 [rows], tokens of each row after the step, drafts included."""
        return self.num_computed_tokens + self.num_tokens

    @cached_property
    def most_context_tokens(self) -> int:
        """Tokens of the row that has the most after the step, with those of its lookahead."""
        ends = self.num_context_tokens if self.lookahead is None else self.num_context_tokens + self.lookahead
        return int(ends.max(initial=0))

    @cached_property
    def are_decodes(self) -> NDArray[np.bool_]:
        """bool [rows], true where a row has one token beside drafts and samples, unlike a short chunk of a prompt."""
        decodes: NDArray[np.bool_] = self.samples & (self.num_tokens - self.num_drafts == 1)
        return decodes

    def unknown(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Indices of the tokens whose ids are not known yet, and the numbers of their rows: intp [unknown] each."""
        indices = (self.token_ids < 0).nonzero()[0]
        return indices, self.numbers[np.searchsorted(self.starts, indices, side="right") - 1]

    def are_among(self, numbers: Collection[int]) -> NDArray[np.bool_]:
        """bool [rows], true for the rows of these numbers."""
        return np.array([number in numbers for number in self.numbers.tolist()], np.bool_)

    def without_sampling(self, numbers: Collection[int]) -> StepRows:
        """The same tokens with nothing sampled of some rows; what else is wanted of them stays."""
        kept = ~self.are_among(numbers)
        num_drafts = np.where(kept, self.num_drafts, np.int32(0))
        return replace(self, samples=self.samples & kept, num_drafts=num_drafts, only_decodes=False)

    def without_results(self, numbers: Collection[int]) -> StepRows:
        """The same tokens with no result wanted of some rows, which can't give one."""
        kept = ~self.are_among(numbers)
        return replace(
            self.without_sampling(numbers),
            logprob_queries={index: queries for index, queries in self.logprob_queries.items() if kept[index]},
            pooling={index: pooling for index, pooling in self.pooling.items() if kept[index]},
        )


@lru_cache(maxsize=1024)
def _decode_columns(count: int) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]]:
    """`starts`, `samples`, and numbers of drafts and uncertain tokens of `count` rows that decode; never written."""
    return np.arange(count + 1, dtype=np.int32), np.ones(count, np.bool_), np.zeros(count, np.int32)


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Copies between the states of rows, snapshots, and snapshots in the host's memory, of a model with states.

    All but the last are made before anything else of the step, in this order.

    Attributes:
        stored: pairs (snapshot, host snapshot): the snapshot is copied to the host's memory. Another one may be written
            over it in the same step.
        fetched: pairs (row, host snapshot): the row's state becomes the host snapshot's.
        restored: pairs (row, snapshot): the row's state becomes the snapshot's.
        kept: pairs (row, snapshot): the state of a row that was fetched is copied to the snapshot.
        taken: pairs (row, snapshot): after the row's tokens in the step, none of which is uncertain, its state is
            copied to the snapshot.
    """

    restored: tuple[tuple[int, int], ...] = ()
    taken: tuple[tuple[int, int], ...] = ()
    stored: tuple[tuple[int, int], ...] = ()
    fetched: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def begun(self) -> list[int]:
        """The rows whose state is another one's before the step."""
        return [row for row, _ in (*self.restored, *self.fetched)]


NO_MOVES = StateMoves()


@dataclass(frozen=True, slots=True, eq=False)
class AsideWork:
    """What a step has to do with chunks that run aside: `chunk`, if any, begins before it, or it waits for them all."""

    chunk: StepRows | None
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: decodes before chunks of prefill, the rows to open first, and copies of states.

    `aside` is None where no chunk runs aside.
    """

    columns: StepRows
    opened: tuple[OpenedRow, ...] = ()
    state_moves: StateMoves = NO_MOVES
    aside: AsideWork | None = None

    @property
    def num_rows(self) -> int:
        return len(self.columns.numbers)

    @property
    def num_tokens(self) -> int:
        return len(self.columns.token_ids)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of rows that compute one sampled token, and its drafts."""
        if self.columns.only_decodes:
            return len(self.columns)
        return int(self.columns.num_tokens[self.columns.are_decodes].sum())

    @property
    def prompt_position(self) -> int:
        """Tokens before a prompt token of this step, in the mean; 0 where it has none."""
        if self.columns.only_decodes:
            return 0
        chunks = ~self.columns.are_decodes
        counts = self.columns.num_tokens[chunks].astype(np.int64)
        return int((counts * self.columns.num_computed_tokens[chunks]).sum()) // max(int(counts.sum()), 1)


_NONE = np.zeros(0, np.int32)
NO_STEP = ScheduledBatch(StepRows.of_decodes(np.zeros(0, np.int64), np.zeros(0, np.intp), _NONE, _NONE))


@dataclass(frozen=True, slots=True, eq=False)
class ProposedDrafts:
    """Tokens that a backend proposes to follow the last sampled token of a step's rows.

    Attributes:
        counts: int32 [rows], at most the row's lookahead. A later step names them by PROPOSED, until others are
            proposed for the row.
        read: waits for them: int32 [rows, most].
    """

    counts: NDArray[np.int32]
    read: Callable[[], NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class StepOutput:
    """A step's results: its rows in the order of the input, and by a row's index what not every row has.

    Attributes:
        sampled: int32 [rows, 1 + drafts], the sampled tokens of each row, accepted drafts among them; as wide as the
            row with the most drafts needs. NOT_SAMPLED follows a row's last one, and stands for all of a row with an
            error. None follows one of the row's `stop_token_ids`.
        logprobs: per sampled token, where the row's sampling parameters ask for them: those of the model's own
            distribution, before bias, penalties and temperature.
        queried: per `logprob_queries` entry. An entry whose target is None reports the most probable id.
        pooled: float32 [hidden_size], after the model's final norm and not normalised further.
        errors: why a row gets nothing more: its request is to be ended. The row has nothing else, and what later steps
            on their way give it means nothing; other rows are what they would have been without it.
        drafts: None where the backend proposes nothing.
    """

    sampled: NDArray[np.int32]
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    queried: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    pooled: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    errors: Mapping[int, RowError] = field(default_factory=dict)
    drafts: ProposedDrafts | None = None

    @cached_property
    def num_sampled(self) -> NDArray[np.intp]:
        """intp [rows], the number of sampled tokens of each row."""
        counts: NDArray[np.intp] = np.count_nonzero(self.sampled != NOT_SAMPLED, axis=1)
        return counts
