"""One row's use of a step's logits: log-probabilities of its prompt, and its sampled tokens. numpy only.

With drafts a row has logits before each draft and after the last. The sampler samples at each with the numbers of that
position, and goes on only while what it sampled is the draft: the very tokens that it would sample one by one. So
drafts change neither the text of a seed nor any distribution, and a state (penalties, DRY, mirostat) sees accepted ids
alone.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from backends.reference_sampler.logprobs import token_logprobs
from backends.reference_sampler.sampler import RowSampler
from realizar.errors import RealizarError
from realizar.outputs import RowError, TokenLogprobs
from step_inputs import RowOutput, ScheduledRow

_LOG = logging.getLogger(__name__)


class LogitReader:
    """Reads the logits of one row of a step, in the order of `tokens`.

    Args:
        row: its part of the step.
        query_start: index in the step of its first token.
        sampler: of the row; None where nothing is to be sampled.
        mask: uint32 [words] or [drafts + 1, words], the ids allowed for each token; None allows all.

    Attributes:
        tokens: indices in the step of the tokens whose logits are wanted, queries first.
        token_ids: sampled so far.
        error: why the row gets nothing; whatever one row raises is its own.
    """

    def __init__(
        self, row: ScheduledRow, query_start: int, sampler: RowSampler | None, mask: NDArray[np.uint32] | None
    ) -> None:
        self.row, self.query_start, self._sampler = row, query_start, sampler
        self._masks = None if mask is None else np.atleast_2d(mask)
        self._drafts = row.draft_ids
        self._first = row.num_tokens - 1 - len(self._drafts)  # token, within the row, before the first sampled one
        last = range(self._first, row.num_tokens) if sampler is not None else ()
        self.tokens = [query_start + index for index in (*(query.index for query in row.logprob_queries), *last)]
        self._queries = list(row.logprob_queries)
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._queried: list[TokenLogprobs] = []
        self.error: RowError | None = None

    def read(self, logits: NDArray[np.float32]) -> None:
        """Take in the logits of the next of `tokens`, float32 [vocab]; passes once the row has failed."""
        if self.error is None:
            try:
                self._read(logits)
            except Exception as error:  # noqa: BLE001 - one row's numbers or parameters are not the others' trouble
                self.fail(error, "sampling")

    def fail(self, error: Exception, where: str) -> None:
        """End the row: its output is the error."""
        if not isinstance(error, RealizarError):
            _LOG.error("%s of a row failed", where, exc_info=error)
        self.error = RowError.of(error, where)

    def _read(self, logits: NDArray[np.float32]) -> None:
        place = len(self._queried)
        if place < len(self._queries):
            query = self._queries[place]
            self._queried.append(token_logprobs(logits, query.target, query.top_n))
        elif self._goes_on():
            self._choose(logits)

    def output(self, pooled: NDArray[np.float32] | None = None) -> RowOutput:
        """All that was read, or the error."""
        if self.error is not None:
            return RowOutput((), error=self.error)
        return RowOutput(tuple(self.token_ids), tuple(self._logprobs), tuple(self._queried), pooled)

    def _goes_on(self) -> bool:
        """True if every draft so far was sampled, and none ended the row's output."""
        count = len(self.token_ids)
        if not count:
            return True
        assert self._sampler is not None
        last = self.token_ids[-1]
        return last == self._drafts[count - 1] and not self._sampler.ends(last)

    def _choose(self, logits: NDArray[np.float32]) -> None:
        assert self._sampler is not None
        count = len(self.token_ids)
        mask = None if self._masks is None else self._masks[count]
        position = self.row.num_computed_tokens + self._first + 1 + count
        sampled = self._sampler.sample(logits, position, mask)
        self._sampler.accept(sampled.token_id)
        self.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
