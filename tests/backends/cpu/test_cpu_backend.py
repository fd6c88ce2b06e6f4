"""The CPU backend through its seam: what rows get from steps, whatever else the step holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.base import ForwardInput
from realizar.backends.cpu.runner import CPUBackend
from realizar.batch import FROM_PREVIOUS_STEP, LogprobQuery
from realizar.config import EngineConfig
from realizar.errors import CheckpointError
from realizar.sampling_params import SamplingParams
from resolving import resolved
from step_inputs import opened_row, results_of, scheduled_row, step_input

RECIPE = Recipe()
CONFIG = EngineConfig(threads=2, max_running=4, max_step_tokens=256, kv_cache_bytes=32 << 20)
BLOCKS = 8  # per row
GREEDY = SamplingParams(temperature=0)

# One row's share of a step: its number, tokens, tokens before, whether it samples, and queries.
Part = tuple[int, Sequence[int], int, bool, tuple[LogprobQuery, ...]]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner(*random_model(RECIPE), CONFIG)
    yield made
    made.close()


def forward(runner: Runner, *parts: Part) -> ForwardInput:
    """A step over rows that own blocks 8 row .. 8 row + 7 of every group."""
    slots, rows = [], []
    tables = np.stack([np.arange(BLOCKS, dtype=np.int32) + BLOCKS * row for row, *_ in parts])
    for row, tokens, computed, sample, queries in parts:
        rows.append(scheduled_row(row, tokens, computed, sample, logprob_queries=queries))
        places = range(computed, computed + len(tokens))
        slots.extend(BLOCKS * CONFIG.block_size * row + place for place in places)
    return step_input(rows, (np.array(slots, np.int32),) * runner.groups, (tables,) * runner.groups)


def step(runner: Runner, *parts: Part) -> list[tuple[int, ...]]:
    """Ids that each part got."""
    return [row.token_ids for row in results_of(runner.backend.submit(forward(runner, *parts)).result())]


def greedy(runner: Runner, prompt: Sequence[int], count: int) -> list[int]:
    """The most probable continuation, by whole passes over everything so far."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(runner.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_rows_decode_greedily_side_by_side(runner: Runner) -> None:
    """Row 2 joins later, row 1 is dead in one step, and ids of the step before are left to the backend."""
    prompts = {row: random_tokens(RECIPE, 5 + 20 * row, row) for row in range(3)}
    found: dict[int, list[int]] = {row: [] for row in prompts}
    lengths = dict.fromkeys(prompts, 0)
    for row, prompt in prompts.items():
        runner.backend.open(opened_row(row, GREEDY, prompt))
    for rows, dead in [((1, 0), None), ((0, 1, 2), None), ((0, 1, 2), 1), ((2, 0, 1), None)]:
        tokens = {row: prompts[row] if not found[row] else [FROM_PREVIOUS_STEP] for row in rows}
        if dead is not None:
            tokens[dead] = []
        got = step(runner, *((row, tokens[row], lengths[row], bool(tokens[row]), ()) for row in rows))
        for row, ids in zip(rows, got, strict=True):
            assert len(ids) == (0 if row == dead else 1)
            found[row].extend(ids)
            lengths[row] += len(tokens[row])
    for row, prompt in prompts.items():
        assert found[row] == greedy(runner, prompt, 4 if row == 0 else 3)
        runner.backend.close(row)


def test_queries_beyond_one_run_of_logits(runner: Runner) -> None:
    """More positions than rows of logits that exist at once, beside a sample and another row's queries."""
    ids, others = random_tokens(RECIPE, 75, 1), random_tokens(RECIPE, 9, 2)
    logits, other_logits = (runner.logits(part).astype(np.float64) for part in (ids, others))
    runner.backend.open(opened_row(0, GREEDY, ids))
    runner.backend.open(opened_row(3, GREEDY, others))
    queries = tuple(LogprobQuery(index, ids[index + 1], 3) for index in range(74))
    other_queries = (LogprobQuery(4, None, 0), LogprobQuery(8, 7, 2))
    taken = forward(runner, (0, ids, 0, True, queries), (3, others, 0, False, other_queries))
    first, second = results_of(runner.backend.submit(taken).result())
    assert first.token_ids == (int(logits[-1].argmax()),)
    assert second.token_ids == ()
    for values, query, found in [
        *zip(logits, queries, first.queried, strict=False),
        *(
            (other_logits[query.index], query, found)
            for query, found in zip(other_queries, second.queried, strict=True)
        ),
    ]:
        logprobs = values - values.max() - np.log(np.exp(values - values.max()).sum())
        target = int(values.argmax()) if query.target is None else query.target
        assert found.token_id == target
        assert found.logprob == pytest.approx(logprobs[target], abs=1e-6)
        assert found.rank == 1 + int((values > values[target]).sum())
        assert [token for token, _ in found.top] == np.argsort(-values, kind="stable")[: query.top_n].tolist()
    assert len(first.queried) == 74
    runner.backend.close(0)
    runner.backend.close(3)


def test_a_mask_that_comes_after_launch_is_kept(runner: Runner) -> None:
    ids = random_tokens(RECIPE, 6, 3)
    ranked = np.argsort(-runner.logits(ids)[-1])
    runner.backend.open(opened_row(0, GREEDY, ids))
    pending = runner.backend.submit(forward(runner, (0, ids, 0, True, ())))
    mask = np.zeros(-(-RECIPE.vocab_size // 32), np.uint32)
    for allowed in ranked[[5, 9]]:
        mask[allowed // 32] |= np.uint32(1 << (allowed % 32))
    pending.set_masks({0: mask})
    assert results_of(pending.result())[0].token_ids == (int(ranked[5]),)
    runner.backend.close(0)


def test_a_result_is_the_same_however_late_and_often_it_is_asked_for(runner: Runner) -> None:
    ids = random_tokens(RECIPE, 6, 4)
    expected = greedy(runner, ids, 2)
    runner.backend.open(opened_row(0, GREEDY, ids))
    first = runner.backend.submit(forward(runner, (0, ids, 0, True, ())))
    second = runner.backend.submit(forward(runner, (0, [FROM_PREVIOUS_STEP], len(ids), True, ())))
    assert results_of(second.result())[0].token_ids == (expected[1],)
    assert results_of(first.result())[0].token_ids == (expected[0],)
    assert first.result() is first.result()
    runner.backend.close(0)


def test_strict_loading() -> None:
    spec, checkpoint = random_model(RECIPE)
    missing = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "layers.1.down.weight"}
    with pytest.raises(CheckpointError, match=r"layers\.1\.down"):
        CPUBackend().load(spec, dataclasses.replace(checkpoint, tensors=missing), resolved(spec, None, CONFIG))


def test_shutdown_is_idempotent() -> None:
    CPUBackend().shutdown()
    made = Runner(*random_model(RECIPE), CONFIG)
    made.close()
    made.close()


def test_progress_reaches_all_of_the_weights() -> None:
    reported: list[tuple[str, float]] = []
    backend = CPUBackend(lambda what, share: reported.append((what, share)))
    spec, checkpoint = random_model(RECIPE)
    backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG))
    backend.shutdown()
    shares = [share for what, share in reported if what == "loading weights"]
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1.0  # the embedding stays in its file
