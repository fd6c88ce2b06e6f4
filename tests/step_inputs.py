"""Records of a step by hand: rows that open, rows that are scheduled, and the arrays that a backend reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.batch import OpenedRow, ScheduledRow, StepRows
from realizar.sampling_params import SamplingParams


def opened_row(
    row: int, sampling: SamplingParams, history: Iterable[int], num_prompt_tokens: int | None = None, choice: int = 0
) -> OpenedRow:
    """A row that opens; its whole history is prompt unless a number is given."""
    tokens = tuple(int(token_id) for token_id in history)
    return OpenedRow(
        row, row, sampling, tokens, len(tokens) if num_prompt_tokens is None else num_prompt_tokens, choice
    )


def scheduled_row(
    row: int,
    token_ids: Iterable[int],
    computed: int = 0,
    sample: bool = False,
    *,
    drafts: Sequence[int] = (),
    **more: Any,
) -> ScheduledRow:
    """A row's share of a step: drafts follow `token_ids`, which follow `computed` others."""
    tokens = (*(int(token_id) for token_id in token_ids), *drafts)
    more = {"num_uncertain": len(drafts), **more}
    return ScheduledRow(row, row, tokens, computed, sample, num_drafts=len(drafts), **more)


def step_input(
    rows: Sequence[ScheduledRow], slots: Sequence[NDArray[np.int32]], tables: Sequence[NDArray[np.int32]]
) -> ForwardInput:
    """A step over these rows, with slots and block tables per cache group."""
    places = [row.num_computed_tokens + index for row in rows for index in range(row.num_tokens)]
    return ForwardInput(StepRows.of(rows), np.array(places, np.int32), tuple(slots), tuple(tables))
