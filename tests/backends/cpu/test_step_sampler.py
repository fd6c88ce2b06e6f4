"""The kernel's tokens for the rows of a step are the reference's, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from backends.reference_sampler.logit_reader import LogitReader
from backends.reference_sampler.sampler import RowSampler
from realizar.backends.cpu.kernels.sampling.record import ROW
from realizar.backends.cpu.sampling.kernel import SamplingKernel
from realizar.backends.cpu.sampling.rows import SamplingRows
from realizar.backends.cpu.sampling.step_sampler import StepSampler
from realizar.backends.cpu.threads import ThreadTeam
from realizar.batch import LogprobQuery, StepRows
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from step_inputs import ScheduledRow, opened_row, rows_of, scheduled_row, step_rows

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
    SamplingParams(temperature=1.2, seed=5, top_k=9, top_p=0.9, min_p=0.02, logprobs=3, dry_multiplier=1.0),
    SamplingParams(temperature=0.9, seed=6, mirostat=2, mirostat_tau=2.0, presence_penalty=0.5),
    SamplingParams(temperature=1.1, seed=7, typical_p=0.7, xtc_probability=0.5, logprobs=0),
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_the_same_as_row_by_row(seed: int, threads: int) -> None:
    """Rows of all kinds, with drafts, queries and masks, and logits that come in parts which cut rows."""
    rng = np.random.default_rng(seed)
    columns = step_rows([random_row(rng, number) for number in rng.permutation(9).tolist()])
    logits = random_logits(rng, len(columns.token_ids))
    opened = [opened_row(row, KINDS[rng.integers(len(KINDS))], [1, 2, 9, 9]) for row in range(9)]
    ours, theirs = SamplingRows(9, VOCAB, 64), {each.row: RowSampler(each, VOCAB) for each in opened}
    for each in opened:
        ours.open(each)
    words = rng.integers(1, 2**32, (3, 2), dtype=np.uint32)
    masks = {row: words[: 1 + int(columns.num_drafts[index])] for index, row in enumerate(columns.numbers.tolist())}
    masks = {row: mask for row, mask in masks.items() if rng.random() < 0.1}
    step = StepSampler(kernel_of(threads), ours, columns, masks)
    for first in range(0, len(step.tokens), 4):
        step.read(first, logits[step.tokens[first : first + 4]])
    for index, row in enumerate(rows_of(columns)):
        alone = LogitReader(row, columns.starts[index], theirs[row.row] if row.sample else None, masks.get(row.row))
        for token in alone.tokens:
            alone.read(logits[token])
        wanted = alone.output()
        assert step.error(index) == wanted.error
        if wanted.error is None:
            assert tuple(step.sampled[index, : step.made[index]].tolist()) == wanted.token_ids
            assert_alike(step.logprobs(index), wanted.logprobs)
            assert_alike(step.queried(index), wanted.queried)
            assert ours.table[row.row, ROW["outputs"]] == theirs[row.row].num_output_tokens


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_decodes_are_as_any_rows(seed: int, threads: int) -> None:
    """Steps of decodes, whose rows and masks change, in the arrays of the step before; the same, row by row."""
    rng = np.random.default_rng(seed)
    alike = [SamplingRows(9, VOCAB, 64) for _ in range(2)]
    for row in range(9):
        sampling = KINDS[rng.integers(len(KINDS))]
        for each in alike:
            each.open(opened_row(row, sampling, [1, 2, 9, 9]))
    for number in range(8):
        chosen = np.sort(rng.permutation(9)[: rng.choice([2, 5, 5, 9])])
        tokens, computed = np.ones(len(chosen), np.int32), np.full(len(chosen), 4 + number, np.int32)
        decodes = StepRows.of_decodes(chosen, chosen, computed, tokens)
        others = step_rows([scheduled_row(row, (1,), 4 + number, True) for row in chosen.tolist()])
        logits = random_logits(rng, len(chosen))
        masked = chosen[rng.random(len(chosen)) < 0.4] if number % 3 else ()  # none now and then, after some
        masks = {int(row): rng.integers(0, 2**32, 2, np.uint32) for row in masked}
        ours, theirs = (
            StepSampler(kernel_of(threads), rows, columns, masks)
            for rows, columns in zip(alike, (decodes, others), strict=True)
        )
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        for each in (ours, theirs):
            for first in range(0, len(chosen), 4):
                each.read(first, logits[first : first + 4])
        assert ours.sampled.tolist() == theirs.sampled.tolist()
        listed = [index for index, row in enumerate(chosen) if alike[0].logprobs[row] >= 0 and ours.made[index]]
        singly = ours.single_logprobs(np.array(listed, np.intp))
        for index in range(len(chosen)):
            assert ours.error(index) == theirs.error(index)
            assert ours.logprobs(index) == theirs.logprobs(index)
            assert (index in singly) == (index in listed)
            if index in listed:
                assert singly[index] == theirs.logprobs(index)


def test_rows_that_are_opened_again_are_described_again() -> None:
    """The array of numbers is the very same, and what its rows want is not."""
    rows, numbers = SamplingRows(2, VOCAB, 64), np.arange(2)
    ones = np.ones(2, np.int32)
    logits = np.eye(2, VOCAB, 5, np.float32)
    for wanted in (None, 2, 0, None):
        for row in range(2):
            rows.open(opened_row(row, SamplingParams(temperature=0, logprobs=wanted if row else None), [7, 7]))
        for _ in range(2):
            step = StepSampler(kernel_of(1), rows, StepRows.of_decodes(numbers, numbers, ones, ones), {})
            for first in range(2):  # in two parts, then at once
                step.read(first, logits[first : first + 1])
            again = StepSampler(kernel_of(1), rows, StepRows.of_decodes(numbers, numbers, ones, ones), {})
            again.read(0, logits)
            assert step.sampled.tolist() == again.sampled.tolist() == [[5], [6]]
            assert step.wants_logprobs == (wanted is not None)
            if wanted is not None:
                assert [len(entry.top) for entry in again.logprobs(1)] == [wanted]


def assert_alike(found: Sequence[TokenLogprobs], wanted: Sequence[TokenLogprobs]) -> None:
    """The reference rounds exponentials to float32."""
    assert [(each.token_id, each.rank) for each in found] == [(each.token_id, each.rank) for each in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        logprobs = [logprob for _, logprob in ours.top]
        assert logprobs == pytest.approx([logprob for _, logprob in theirs.top], abs=1e-6)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)


@cache
def kernel_of(threads: int) -> SamplingKernel:
    return SamplingKernel(VOCAB, ThreadTeam(threads))


def test_a_row_that_closed_before_its_step_was_read_is_plain() -> None:
    rows = SamplingRows(2, VOCAB, 64)
    for row in range(2):
        rows.open(opened_row(row, SamplingParams(temperature=0, logit_bias={7: 50.0}, dry_multiplier=1.0), [7, 7, 7]))
    columns = step_rows([scheduled_row(row, (1,), 3, True) for row in range(2)])
    rows.close(1)
    step = StepSampler(kernel_of(1), rows, columns, {})
    step.read(0, np.eye(2, VOCAB, 5, np.float32))
    assert step.sampled.tolist() == [[7], [6]]


def test_a_mask_that_is_too_small_is_refused() -> None:
    rows = SamplingRows(1, VOCAB, 64)
    rows.open(opened_row(0, SamplingParams(), [1]))
    columns = step_rows([scheduled_row(0, (1,), 1, True, drafts=(5,))])
    for shape in ((1,), (2, 1), (1, 2)):
        with pytest.raises(ValueError, match="a mask of shape"):
            StepSampler(kernel_of(1), rows, columns, {0: np.ones(shape, np.uint32)})
    number, one = np.arange(1), np.ones(1, np.int32)
    with pytest.raises(ValueError, match=r"a mask of shape \(1, 1\) for 1 tokens and 2 words"):
        StepSampler(kernel_of(1), rows, StepRows.of_decodes(number, number, one, one), {0: np.ones(1, np.uint32)})
