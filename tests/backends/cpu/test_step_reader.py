"""Rows that take the largest logit without a reader of their own get what their reader would give them."""

from __future__ import annotations

import numpy as np
import pytest

from realizar.backends.cpu.sampling.logit_reader import LogitReader
from realizar.backends.cpu.sampling.sampler import RowSampler
from realizar.backends.cpu.sampling.step_reader import StepReader
from realizar.batch import LogprobQuery, RowOutput, ScheduledRow, StepOutput, StepRows
from realizar.sampling_params import SamplingParams
from step_inputs import opened_row, scheduled_row

VOCAB = 40
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, stop_token_ids=(3, 5), min_tokens=2),
    SamplingParams(temperature=0.0, stop_token_ids=tuple(range(VOCAB)), min_tokens=1),
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(temperature=0.0, logit_bias={7: 5.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=4),
)


def random_row(rng: np.random.Generator, number: int) -> ScheduledRow:
    drafts = rng.integers(0, VOCAB, rng.choice([0, 0, 0, 2])).tolist()
    tokens = rng.integers(0, VOCAB, rng.choice([1, 1, 3])).tolist()
    queries = (LogprobQuery(0, 4, 2),) if rng.random() < 0.2 else ()
    sample = bool(rng.random() < 0.9)
    return scheduled_row(
        number, tokens, 10, sample, drafts=drafts if sample else (), logprob_queries=queries,
        pooling="last" if rng.random() < 0.1 else None,
    )  # fmt: skip


def random_logits(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Of few values, so that many are equal; now and then a row that can't be used."""
    logits = rng.integers(-3, 4, (tokens, VOCAB)).astype(np.float32)
    for row in logits:
        if rng.random() < 0.1:
            row[rng.integers(VOCAB)] = rng.choice([np.nan, np.inf])
    return logits


@pytest.mark.parametrize("seed", range(40))
def test_the_same_as_with_readers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = StepRows.of([random_row(rng, number) for number in rng.permutation(9).tolist()])
    logits = random_logits(rng, len(columns.token_ids))
    opened = [opened_row(row, KINDS[rng.integers(len(KINDS))], [1, 2, 9, 9]) for row in range(9)]
    ours, theirs = ({each.row: RowSampler(each, VOCAB) for each in opened} for _ in range(2))
    words = rng.integers(1, 2**32, (3, 2), dtype=np.uint32)
    masks = {row: words[: 1 + int(columns.num_drafts[index])] for index, row in enumerate(columns.numbers.tolist())}
    masks = {row: mask for row, mask in masks.items() if rng.random() < 0.1}
    reader = StepReader(columns, ours, masks)
    for first in range(0, len(reader.tokens), 4):
        reader.read(first, logits[reader.tokens[first : first + 4]])
    found = {index: each.output() for index, each in reader.readers.items()}
    output = StepOutput.merged(columns.numbers, reader.choices, found)
    wanted: list[RowOutput] = []
    for index, row in enumerate(columns.rows):
        sampler = theirs[row.row] if row.sample else None
        alone = LogitReader(row, columns.query_starts[index], sampler, masks.get(row.row))
        for token in alone.tokens:
            alone.read(logits[token])
        wanted.append(alone.output())
    assert output.rows == tuple(wanted)
    assert [ours[row].num_output_tokens for row in range(9)] == [theirs[row].num_output_tokens for row in range(9)]


def test_plain_rows_have_no_reader() -> None:
    columns = StepRows.of([scheduled_row(row, (1,), 3, True) for row in range(3)])
    samplers = {row: RowSampler(opened_row(row, KINDS[0], [1, 2, 3]), VOCAB) for row in range(3)}
    reader = StepReader(columns, samplers, {})
    reader.read(0, np.eye(3, VOCAB, 5, np.float32))
    assert reader.choices.tolist() == [[5], [6], [7]]
    assert not reader.readers
