"""The steps that a small model is taken through: prompts in chunks, decodes of several rows and of one. numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Backend, ForwardInput
from realizar.batch import LogprobQuery, OpenedRow, StepRows
from realizar.config import EngineConfig
from realizar.errors import RequestFailedError
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams

_ROWS, _GREEDY_ROWS, _ROW_TOKENS = 8, 3, 128
_DECODES = tuple((row, 1) for row in range(_ROWS))
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 70), (1, 9)),
    ((0, 40), (1, 1), (2, 33), *((row, 17) for row in range(_GREEDY_ROWS, _ROWS))),
    *(_DECODES,) * 3,
    *(_DECODES[:1],) * 2,
)
"""Of each step its rows, and how many tokens each takes."""
CONFIG = EngineConfig(
    context_length=_ROW_TOKENS, max_running=_ROWS, max_step_tokens=192, kv_cache_bytes=64 << 20, host_snapshot_bytes=0,
    graphs=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What a backend gave.

    Attributes:
        logprobs: float64 [tokens, vocab], after each token of each step.
        greedy: of rows that take the most probable id, index in `logprobs` and sampled token: int64 [tokens, 2].
        drawn: sampled tokens of the other rows: int64 [tokens].
    """

    logprobs: NDArray[np.float64]
    greedy: NDArray[np.int64]
    drawn: NDArray[np.int64]


def run_small_steps(backend: Backend, vocab: int) -> Seen:
    """Take a backend that a small model is loaded in through `STEPS`. Tokens are given, whatever is sampled.

    Raises RequestFailedError where a row failed, and as `Backend.submit` does.
    """
    tokens = row_tokens(vocab)
    computed = [0] * _ROWS
    lines: list[NDArray[np.float64]] = []
    greedy: list[tuple[int, int]] = []
    drawn: list[int] = []
    for parts in STEPS:
        firsts = [computed[row] for row, _ in parts]
        for row, count in parts:
            if not computed[row]:
                history = tuple(tokens[row, :count].tolist())
                backend.open(OpenedRow(row, row, _sampling(row, vocab), history, count, 0))
            computed[row] += count
        found = backend.submit(_step(backend, tokens, parts, firsts, vocab)).result()
        if found.errors:
            raise RequestFailedError(next(iter(found.errors.values())).message)
        for index, (row, _) in enumerate(parts):
            listed = found.queried.get(index) or found.logprobs[index]
            lines.extend(_distribution(each, vocab) for each in listed)
            token_id = int(found.sampled[index, 0])
            if row < _GREEDY_ROWS:
                greedy.append((len(lines) - 1, token_id))
            else:
                drawn.append(token_id)
    for row in range(_ROWS):
        backend.close(row)
    return Seen(np.stack(lines), np.array(greedy, np.int64), np.array(drawn, np.int64))


def row_tokens(vocab: int) -> NDArray[np.int64]:
    """Ids of each row's tokens, all that it could have: int64 [rows, tokens]."""
    numbers = np.arange(_ROWS * _ROW_TOKENS, dtype=np.int64).reshape(_ROWS, _ROW_TOKENS)
    return (numbers * 40503 + 1) * 2654435761 % (1 << 32) * vocab >> 32


def _sampling(row: int, vocab: int) -> SamplingParams:
    if row < _GREEDY_ROWS:
        return SamplingParams(temperature=0.0, logprobs=vocab)
    odd = row % 2
    return SamplingParams(
        temperature=0.8, seed=row, logprobs=vocab, top_k=40 if odd else 0, top_p=0.9 if row % 3 else 1.0,
        min_p=0.0 if odd else 0.1,
    )  # fmt: skip


def _distribution(found: TokenLogprobs, vocab: int) -> NDArray[np.float64]:
    values = np.full(vocab, np.nan)
    ids, logprobs = zip(*found.top, strict=True)
    values[list(ids)] = logprobs
    return values


def _step(
    backend: Backend, tokens: NDArray[np.int64], parts: Sequence[tuple[int, int]], firsts: Sequence[int], vocab: int
) -> ForwardInput:
    """A step over rows and numbers of their tokens, from the first of each on; of several the row wants queries."""
    capacity = backend.capacity()
    size, per_row = capacity.block_size, -(-_ROW_TOKENS // capacity.block_size)
    if min(capacity.num_blocks) < _ROWS * per_row:
        raise RuntimeError(f"{min(capacity.num_blocks)} blocks for {_ROWS} rows of {per_row}")
    numbers, counts = np.array(parts, np.int64).T
    none = np.zeros(len(parts), np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    owners = np.repeat(numbers, counts)
    positions = (np.arange(starts[-1]) + np.repeat(np.array(firsts) - starts[:-1], counts)).astype(np.int32)
    columns = StepRows(
        numbers, numbers.astype(np.intp), np.array(firsts, np.int32), tokens[owners, positions].astype(np.int32),
        starts, np.ones(len(parts), np.bool_), none, none,
        logprob_queries={
            index: tuple(LogprobQuery(place, None, vocab) for place in range(count))
            for index, (_, count) in enumerate(parts)
            if count > 1
        },
    )  # fmt: skip
    table = (numbers[:, None] * per_row + np.arange(per_row)).astype(np.int32)
    slots = ((owners * per_row + positions // size) * size + positions % size).astype(np.int32)
    groups = len(capacity.num_blocks)
    return ForwardInput(columns, positions, (slots,) * groups, (table,) * groups)
