"""`Sequence`: one choice of a request while it is in the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from realizar.batch import FROM_PREVIOUS_STEP, LogprobQuery, OpenedRow, ScheduledRow
from realizar.kv_cache.block_keys import BlockKeys
from realizar.outputs import FinishReason
from realizar.request import Request


@dataclass(slots=True)  # one a row and step: frozen it would take four times as long to make
class Gain:
    """The choices of a step that a sequence took in, and the reason if they end it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one choice and how far they have come.

    Attributes:
        sequence_id: never used twice.
        keys: of its full blocks.
        token_ids: prompt and output, as far as known.
        most_tokens: number of tokens at which no further choice is wanted.
        row: from its first step on; a preempted sequence keeps it, and with it the sampler's state.
        running: it holds blocks.
        num_computed_tokens: in the KV cache once every submitted step is done, drafts in flight included.
        num_pending: choices of submitted steps that are not known yet, drafts apart.
        drafts: proposed to follow the last token, which is known; not submitted yet.
        num_drafts: drafts in flight.
        num_queried: prompt positions whose log-probabilities have been asked for.
        num_cached_tokens: prompt tokens found in the prefix cache when it first entered a step.
    """

    sequence_id: int
    request: Request
    choice: int
    keys: BlockKeys
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    most_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    row: int | None = None
    running: bool = False
    num_computed_tokens: int = 0
    num_pending: int = 0
    drafts: tuple[int, ...] = ()
    num_drafts: int = 0
    num_queried: int = 0
    num_cached_tokens: int = 0
    scheduled_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.most_tokens = self.num_prompt_tokens + max(self.request.max_tokens, 1)  # scoring never gets there
        self.stop_token_ids = frozenset(self.request.sampling.stop_token_ids)

    @property
    def own_row(self) -> int:
        """Row of a sequence that has been in a step."""
        if self.row is None:
            raise RuntimeError("a sequence that was in no step has no row")
        return self.row

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to compute for the next choice; 0 when none is wanted, or drafts must be verified first."""
        num_tokens = len(self.token_ids) + self.num_pending
        return 0 if num_tokens >= self.most_tokens or self.num_drafts else num_tokens - self.num_computed_tokens

    @property
    def most_cached_tokens(self) -> int:
        """Tokens that may come from cached blocks: at least the last one is always computed.

        A mean needs the computation of every prompt token, log-probabilities that of tokens not scored yet.
        """
        if self.request.pooling == "mean":
            return 0
        scored = self.choice == 0 and self.request.sampling.prompt_logprobs is not None
        if scored and self.num_queried < self.num_prompt_tokens - 1:
            return self.num_queried
        return len(self.token_ids) - 1

    @property
    def max_drafts(self) -> int:
        """Drafts that may follow the last known token: a choice follows the last draft."""
        return self.most_tokens - len(self.token_ids) - 1

    @property
    def awaits_one_token(self) -> bool:
        """The sequence runs, its last token is known, and that token is the only one to compute."""
        return self.running and not self.num_pending and self.num_remaining_tokens == 1

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens to compute."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + count
        known = tuple(self.token_ids[start:end])
        return known + (FROM_PREVIOUS_STEP,) * (count - len(known))

    def take_queries(self, count: int) -> tuple[LogprobQuery, ...]:
        """Prompt positions to score among the next `count` tokens; not asked for again after preemption."""
        wanted = self.request.sampling.prompt_logprobs
        if wanted is None or self.choice > 0:
            return ()
        start, prompt = self.num_computed_tokens, self.request.prompt_token_ids
        end = min(start + count, len(prompt) - 1)
        first = max(start, self.num_queried)
        self.num_queried = max(self.num_queried, end)
        return tuple(LogprobQuery(at - start, prompt[at + 1], wanted) for at in range(first, end))

    def give_up(self, scheduled: ScheduledRow) -> None:
        """Undo a submitted step that gave no results; later steps ask for them again."""
        self.num_pending = self.num_drafts = 0
        self.drafts = ()
        if scheduled.logprob_queries:
            first = scheduled.num_computed_tokens + scheduled.logprob_queries[0].index
            self.num_queried = min(self.num_queried, first)

    def take_in(self, token_ids: Iterable[int]) -> Gain:
        """Append a step's choices up to the one that ends the sequence."""
        gained: list[int] = []
        sampling = self.request.sampling
        # Where a grammar is complete, ending is all that is left to choose, however few tokens there are.
        least = self.num_prompt_tokens + (sampling.min_tokens if sampling.structured is None else 0)
        for token_id in token_ids:
            gained.append(token_id)
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids and len(self.token_ids) > least:
                return Gain(tuple(gained), "stop", token_id)
            if len(self.token_ids) >= self.most_tokens:
                return Gain(tuple(gained), "length")
        return Gain(tuple(gained))

    def opened(self, row: int) -> OpenedRow:
        """The record with which the backend opens the sequence's row."""
        return OpenedRow(
            sequence_id=self.sequence_id,
            row=row,
            sampling=self.request.sampling,
            history=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            choice=self.choice,
        )
