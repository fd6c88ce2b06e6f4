"""`Sequence`: one choice of a request while it is in the scheduler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.batch import GIVEN_EMBEDDING, LogprobQuery, OpenedRow
from realizar.kv_cache.block_keys import BlockKeys
from realizar.outputs import NO_SNAPSHOTS
from realizar.request import Request
from realizar.scheduler.row_table import RowTable


class Sequence:
    """Tokens of one choice and how far they have come.

    Once it has a row, the numbers that change with every step lie in the columns of a `RowTable`.

    Attributes:
        sequence_id: never used twice.
        turn: its place in the order of starts, see `Turns`.
        keys: of its full blocks.
        row: from its first step on; a preempted sequence keeps it, and with it the sampler's state.
        num_queried: prompt positions whose log-probabilities have been asked for.
        snapshot_positions: numbers of tokens, ascending and not computed yet, after each of which a snapshot is taken.
        num_cached_tokens: prompt tokens found in the prefix cache when it first entered a step.
    """

    def __init__(self, sequence_id: int, request: Request, choice: int, keys: BlockKeys, table: RowTable) -> None:
        self.sequence_id, self.request, self.choice, self.keys = sequence_id, request, choice, keys
        self.turn = 0.0
        self.row: int | None = None
        self.num_queried = self.num_cached_tokens = 0
        self.snapshot_positions: tuple[int, ...] = ()
        self.snapshots = NO_SNAPSHOTS
        self.scheduled_s: float | None = None
        self._table = table
        self._history = np.array(request.prompt_token_ids, np.int32)  # while it has no row

    @property
    def own_row(self) -> int:
        if self.row is None:
            raise RuntimeError("a sequence that was in no step has no row")
        return self.row

    def take_row(self, row: int) -> None:
        self.row = row
        self._table.open(row, self.sequence_id, self._history, self.request)

    def leave_row(self) -> None:
        self._history = self.token_ids.copy()
        self._table.close(self.own_row)
        self.row = None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [known tokens], prompt and output; not to be changed."""
        if self.row is None:
            return self._history
        return self._table.token_ids[self.row, : self._table.num_known[self.row]]

    @property
    def running(self) -> bool:
        return self.row is not None and self._table.is_running.item(self.row)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in the KV cache once every submitted step is done, drafts in flight included."""
        return 0 if self.row is None else self._table.num_computed.item(self.row)

    @property
    def num_pending(self) -> int:
        """Sampled tokens of submitted steps that are not known yet, drafts apart."""
        return 0 if self.row is None else self._table.num_pending.item(self.row)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens that the next step may compute: those before the next sampled one, or up to the next snapshot."""
        remaining = self._table.num_remaining(np.array([self.own_row])).item()
        positions = self.snapshot_positions
        return min(remaining, positions[0] - self.num_computed_tokens) if positions else remaining

    @property
    def most_cached_tokens(self) -> int:
        """Tokens that may come from cached blocks: at least the last one is always computed.

        A mean needs the computation of every prompt token, log-probabilities that of tokens not scored yet.
        """
        if self.request.pooling == "mean":
            return 0
        scored = self.choice == 0 and self.request.sampling.prompt_logprobs is not None
        if scored and self.num_queried < self.request.num_prompt_tokens - 1:
            return self.num_queried
        return len(self.token_ids) - 1

    @property
    def max_drafts(self) -> int:
        """Drafts that may follow the last known token: another token follows the last draft."""
        return self._table.most_tokens.item(self.own_row) - len(self.token_ids) - 1

    def propose(self, drafts: tuple[int, ...]) -> None:
        """Let drafts follow its last token, which is known and alone to compute."""
        self._table.propose(self.own_row, drafts)

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

    def opened(self) -> OpenedRow:
        history = self.token_ids.tolist()
        for run in self.request.embeddings:
            history[run.start : run.end] = [GIVEN_EMBEDDING] * run.num_tokens
        return OpenedRow(
            sequence_id=self.sequence_id,
            row=self.own_row,
            sampling=self.request.sampling,
            history=tuple(history),
            num_prompt_tokens=self.request.num_prompt_tokens,
            choice=self.choice,
        )
