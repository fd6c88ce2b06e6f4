"""Records by hand: rows that open, rows that are scheduled, the arrays that a backend reads, given embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.batch import OpenedRow, ScheduledRow, StepRows
from realizar.engine.llm_prompts import prompt_embeddings
from realizar.request import Request
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


def with_given(
    request: Request, embeddings: NDArray[np.float32], runs: Sequence[tuple[int, int]], placeholder: int | None
) -> Request:
    """The request with embeddings for runs of its prompt's tokens.

    Args:
        embeddings: float32 [prompt tokens, hidden_size]. runs: first token and end of each.
        placeholder: the id under them; None leaves the prompt's ids.
    """
    ids = list(request.prompt_token_ids)
    for start, end in runs:
        ids[start:end] = ids[start:end] if placeholder is None else [placeholder] * (end - start)
    given = tuple(prompt_embeddings(embeddings[start:end], start) for start, end in runs)
    return replace(request, prompt_token_ids=tuple(ids), embeddings=given)
