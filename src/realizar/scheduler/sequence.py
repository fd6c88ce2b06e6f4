"""`Sequence`: one choice of a request while it is in the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.batch import FROM_PREVIOUS_STEP, LogprobQuery, OpenedRow, ScheduledRow
from realizar.kv_cache.block_keys import BlockKeys
from realizar.outputs import NO_SNAPSHOTS, FinishReason
from realizar.request import Request
from realizar.scheduler.row_table import RowTable


@dataclass(slots=True)  # one a row and step: frozen it would take four times as long to make
class Gain:
    """The choices of a step that a sequence took in, and the reason if they end it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Sequence:
    """Tokens of one choice and how far they have come.

    Once it has a row, the numbers that change with every step lie in the columns of a `RowTable`.

    Attributes:
        sequence_id: never used twice.
        turn: its place in the order of starts, see `Turns`.
        keys: of its full blocks.
        most_tokens: number of tokens at which no further choice is wanted.
        row: from its first step on; a preempted sequence keeps it, and with it the sampler's state.
        running: it holds blocks.
        num_queried: prompt positions whose log-probabilities have been asked for.
        places: numbers of tokens, ascending and not computed yet, after each of which a snapshot is to be taken.
        num_cached_tokens: prompt tokens found in the prefix cache when it first entered a step.
        snapshots: that it started from, and left.
    """

    def __init__(self, sequence_id: int, request: Request, choice: int, keys: BlockKeys, table: RowTable) -> None:
        self.sequence_id, self.request, self.choice, self.keys = sequence_id, request, choice, keys
        self.num_prompt_tokens = request.num_prompt_tokens
        self.most_tokens = self.num_prompt_tokens + max(request.max_tokens, 1)  # scoring never gets there
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        # Where a grammar is complete, ending is all that is left to choose, however few tokens there are.
        least = request.sampling.min_tokens if request.sampling.structured is None else 0
        self._least_tokens = self.num_prompt_tokens + least  # up to so many, stop ids do not end it
        self.turn = 0.0
        self.row: int | None = None
        self.running = False
        self.num_queried = self.num_cached_tokens = 0
        self.places: tuple[int, ...] = ()
        self.snapshots = NO_SNAPSHOTS
        self.scheduled_s: float | None = None
        self._table = table
        self._history = np.array(request.prompt_token_ids, np.int32)  # while it has no row
        self._drafts: tuple[int, ...] = ()

    @property
    def own_row(self) -> int:
        """Row of a sequence that has been in a step."""
        if self.row is None:
            raise RuntimeError("a sequence that was in no step has no row")
        return self.row

    def take_row(self, row: int) -> None:
        """Start in a row."""
        self.row = row
        plain = self.request.max_tokens > 0 and self.request.pooling is None
        self._table.open(
            row,
            self.sequence_id,
            self._history,
            most_tokens=self.most_tokens,
            least_tokens=self._least_tokens,
            stop_ids=self.stop_token_ids if plain else None,
            may_be_held=self.request.sampling.structured is not None,
        )

    def leave_row(self) -> None:
        """Wait as if it had not run, but for the tokens that are known; choices and drafts in flight never come."""
        self._history, self._drafts = self.token_ids.copy(), ()
        self._table.close(self.own_row)
        self.row = None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [known tokens], prompt and output; not to be changed."""
        if self.row is None:
            return self._history
        return self._table.token_ids[self.row, : self._table.num_known[self.row]]

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and output that are known."""
        return len(self._history) if self.row is None else self._table.num_known.item(self.row)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in the KV cache once every submitted step is done, drafts in flight included."""
        return 0 if self.row is None else self._table.num_computed.item(self.row)

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self._table.num_computed[self.own_row] = count

    @property
    def num_pending(self) -> int:
        """Choices of submitted steps that are not known yet, drafts apart."""
        return 0 if self.row is None else self._table.num_pending.item(self.row)

    @num_pending.setter
    def num_pending(self, count: int) -> None:
        self._table.num_pending[self.own_row] = count

    @property
    def num_drafts(self) -> int:
        """Drafts in flight."""
        return 0 if self.row is None else self._table.num_drafts.item(self.row)

    @num_drafts.setter
    def num_drafts(self, count: int) -> None:
        self._table.num_drafts[self.own_row] = count

    @property
    def drafts(self) -> tuple[int, ...]:
        """Drafts proposed to follow the last token, which is known; not submitted yet."""
        return self._drafts

    @drafts.setter
    def drafts(self, token_ids: tuple[int, ...]) -> None:
        self._drafts = token_ids
        self._table.num_proposed[self.own_row] = len(token_ids)

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return self.num_known_tokens + self.num_pending

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to compute for the next choice; 0 when none is wanted, or drafts must be verified first."""
        num_tokens = self.num_tokens
        return 0 if num_tokens >= self.most_tokens or self.num_drafts else num_tokens - self.num_computed_tokens

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens that the next step may compute: those for the next choice, or up to the next snapshot."""
        remaining = self.num_remaining_tokens
        return min(remaining, self.places[0] - self.num_computed_tokens) if self.places else remaining

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
        return self.num_known_tokens - 1

    @property
    def max_drafts(self) -> int:
        """Drafts that may follow the last known token: a choice follows the last draft."""
        return self.most_tokens - self.num_known_tokens - 1

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens to compute."""
        start = self.num_computed_tokens
        known = tuple(self.token_ids[start : start + count].tolist())
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
        """Undo a submitted step that gave no results, before or after the row is left; later steps ask for them."""
        if scheduled.logprob_queries:
            first = scheduled.num_computed_tokens + scheduled.logprob_queries[0].index
            self.num_queried = min(self.num_queried, first)

    def take_in(self, token_ids: Iterable[int]) -> Gain:
        """Append a step's choices up to the one that ends the sequence."""
        row, known = self.own_row, self.num_known_tokens
        gained: list[int] = []
        reason: FinishReason | None = None
        for token_id in token_ids:
            gained.append(token_id)
            if token_id in self.stop_token_ids and known + len(gained) > self._least_tokens:
                reason = "stop"
                break
            if known + len(gained) >= self.most_tokens:
                reason = "length"
                break
        self._table.token_ids[row, known : known + len(gained)] = gained
        self._table.num_known[row] = known + len(gained)
        return Gain(tuple(gained), reason, gained[-1] if reason == "stop" else None)

    def opened(self, row: int) -> OpenedRow:
        """The record with which the backend opens the sequence's row."""
        return OpenedRow(
            sequence_id=self.sequence_id,
            row=row,
            sampling=self.request.sampling,
            history=tuple(self.token_ids.tolist()),
            num_prompt_tokens=self.num_prompt_tokens,
            choice=self.choice,
        )
