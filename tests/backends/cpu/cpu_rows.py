"""Steps of a `CPUBackend` as the engine would give them: rows with drafts, masks, queries and pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cpu_runs import Runner
from realizar.backends.base import ForwardInput
from realizar.batch import LogprobQuery
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from step_inputs import RowOutput, opened_row, results_of, scheduled_row, step_input


@dataclass(frozen=True)
class Part:
    """One row's share of a step: drafts follow `tokens`, which follow `computed` others.

    With `may_repeat` the last of `tokens` may be computed again.
    """

    row: int
    tokens: Sequence[int]
    computed: int = 0
    sample: bool = True
    drafts: Sequence[int] = ()
    pooling: Literal["last", "mean"] | None = None
    queries: tuple[LogprobQuery, ...] = ()
    may_repeat: bool = False


def forward_input(runner: Runner, parts: Sequence[Part], blocks: int) -> ForwardInput:
    """A step over rows that own blocks `blocks * row` and on, so many each, of every group."""
    assert blocks * (1 + max(part.row for part in parts)) <= min(runner.capacity.num_blocks)
    slots: list[int] = []
    rows = []
    tables = np.stack([np.arange(blocks, dtype=np.int32) + blocks * part.row for part in parts])
    for part in parts:
        row = scheduled_row(
            part.row, part.tokens, part.computed, part.sample, drafts=part.drafts,
            logprob_queries=part.queries, pooling=part.pooling, num_uncertain=len(part.drafts) + part.may_repeat,
        )  # fmt: skip
        rows.append(row)
        places = range(part.computed, row.num_context_tokens)
        slots.extend(blocks * runner.config.block_size * part.row + place for place in places)
    return step_input(rows, (np.array(slots, np.int32),) * runner.groups, (tables,) * runner.groups)


def run_step(
    runner: Runner, parts: Sequence[Part], blocks: int = 6, masks: Mapping[int, NDArray[np.uint32]] | None = None
) -> tuple[RowOutput, ...]:
    """The outputs of each part."""
    step = runner.backend.submit(forward_input(runner, parts, blocks))
    if masks:
        step.set_masks(masks)
    return results_of(step.result())


def mask_of(ids: Sequence[int], vocab_size: int) -> NDArray[np.uint32]:
    """Words that allow these ids alone."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    for token_id in ids:
        mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return mask


def plain_decode(
    runner: Runner, row: int, prompt: Sequence[int], sampling: SamplingParams, count: int
) -> tuple[list[int], list[TokenLogprobs]]:
    """Output of one row alone, a token a step."""
    runner.backend.open(opened_row(row, sampling, prompt))
    found: list[int] = []
    logprobs: list[TokenLogprobs] = []
    tokens, computed = list(prompt), 0
    while len(found) < count:
        (output,) = run_step(runner, [Part(row, tokens, computed)])
        computed += len(tokens)
        tokens = list(output.token_ids)
        found.extend(output.token_ids)
        logprobs.extend(output.logprobs)
    runner.backend.close(row)
    return found, logprobs
