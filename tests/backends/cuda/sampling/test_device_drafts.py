"""Sampled tokens with and without drafts, by the CUDA kernels and on the host, beside the reference, one by one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.cuda.sampling.sampled_steps import SampledSteps  # noqa: E402
from backends.reference_sampler.sampler import RowSampler  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from step_inputs import opened_row, scheduled_row  # noqa: E402

VOCAB, MOST = 300, 4
NATIVE = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]  # the CUDA kernels
ROWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0, "logit_bias": {3: 4.0, 7: -100.0, 299: 2.5}},
    {"temperature": 0, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": (5, 9)},
    {"temperature": 0, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 6},
    {"temperature": 0, "min_tokens": 4, "stop_token_ids": tuple(range(0, 300, 2))},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "typical_p": 0.5},
    {"temperature": 1.5, "top_n_sigma": 1.2},
    {"temperature": 1.0, "top_k": 40, "typical_p": 0.8, "top_p": 0.9, "min_p": 0.02, "top_n_sigma": 2.0},
    {"temperature": 1.0, "xtc_probability": 0.6, "xtc_threshold": 0.02},
    {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01, "top_k": 20},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "dry_multiplier": 0.8, "logit_bias": {1: 1.5}},
    {"temperature": 0, "min_tokens": 6, "stop_token_ids": tuple(range(0, 300, 3))},
    {"temperature": 0, "stop_token_ids": tuple(range(0, 300, 3))},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0, "dry_multiplier": 9.0, "dry_allowed_length": 1, "frequency_penalty": 0.5},
    {"temperature": 0, "min_tokens": 8, "stop_token_ids": tuple(range(12))},
]


def opened_steps(samplings: list[SamplingParams], histories: list[list[int]], on_host: bool) -> SampledSteps:
    """Rows of one step each with drafts."""
    steps = SampledSteps(len(samplings), VOCAB, on_host=on_host, places=MOST + 1)
    for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
        steps.open(row, sampling, history, choice=row % 3)
    return steps


def logits_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Few distinct values, so that equal logits occur, and some forbidden ids."""
    values = np.round(rng.standard_normal((rows, VOCAB)) * 8).astype(np.float32) / np.float32(2)
    values[rng.random(values.shape) < 0.02] = -np.inf
    return values


def foreseen(sampler: RowSampler, logits: np.ndarray, position: int, masks: Any) -> tuple[list[int], list[RowSampler]]:
    """Tokens that the reference samples from one row of logits after the other, up to the end of the output.

    Returns the sampler as it is after each token, too.
    """
    found: list[int] = []
    after: list[RowSampler] = []
    for place, values in enumerate(logits):
        sampler = copy.deepcopy(sampler)
        token_id = sampler.sample(values, position + place, None if masks is None else masks[place]).token_id
        sampler.accept(token_id)
        found.append(token_id)
        after.append(sampler)
        if sampler.ends(token_id):
            break
    return found, after


def random_masks(rng: np.random.Generator, count: int) -> Any:
    """uint32 [count, words] that allow about half of the ids."""
    return rng.integers(0, 1 << 32, (count, -(-VOCAB // 32)), dtype=np.uint32) | np.uint32(1 << 7)


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=NATIVE)])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_choices_with_drafts_are_those_without(on_host: bool, seed: int) -> None:
    """Every kind of sampling, some rows masked, some without drafts."""
    rng = np.random.default_rng(seed)
    samplings = [SamplingParams(seed=11 + row, **options) for row, options in enumerate(ROWS)]
    histories = [rng.integers(0, 12, 9).tolist() for _ in samplings]
    device = opened_steps(samplings, histories, on_host)
    cpu = [
        RowSampler(opened_row(row, sampling, histories[row], 6, row % 3), VOCAB)
        for row, sampling in enumerate(samplings)
    ]
    going, accepted = list(range(len(samplings))), 0
    for _ in range(6):
        rows, values, masks, wanted, states = [], [], {}, [], []
        for row in rng.permutation(going).tolist():
            size = int(rng.integers(0, MOST + 1))
            logits = logits_of(rng, size + 1)
            logits[:, :12] += 12.0  # so that ids of the history are sampled, and repeat
            if rng.random() < 0.3:
                masks[row] = random_masks(rng, size + 1)
            known = len(histories[row])
            right, after = foreseen(cpu[row], logits, known, masks.get(row))
            drafts = [*right, *rng.integers(0, VOCAB, MOST).tolist()][:size]
            if size and rng.random() < 0.6:
                drafts[int(rng.integers(0, size))] = int(rng.choice([VOCAB + 3, -1, 5]))  # ids of nothing, too
            stands = next((i for i, pair in enumerate(zip(right, drafts, strict=False)) if pair[0] != pair[1]), size)
            wanted.append(tuple(right[: stands + 1]))
            states.append(after)
            rows.append(scheduled_row(row, histories[row][-1:], known - 1, True, drafts=drafts))
            values.append(logits)
        found = [output.token_ids for output in device.step(rows, np.concatenate(values), masks)]
        for scheduled, got, expected, after in zip(rows, found, wanted, states, strict=True):
            row = scheduled.row
            assert got == expected, f"{samplings[row]}, drafts {scheduled.draft_ids}"
            accepted += len(got) - 1
            cpu[row] = after[len(got) - 1]
            histories[row] += got
            ended = cpu[row].ends(got[-1])
            if not ended:
                assert int(device.space.last[row]) == got[-1]
            going = [other for other in going if other != row or not ended]
    assert accepted > 40


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=NATIVE)])
def test_nothing_is_wanted_after_the_end(on_host: bool) -> None:
    """A draft ends the output where its grammar is complete: the masks after it allow nothing, and are not read."""
    sampling = SamplingParams(temperature=0, stop_token_ids=(5,), structured=StructuredOutput("regex", "a"))
    device = opened_steps([sampling], [list(range(9))], on_host)
    masks = np.zeros((3, -(-VOCAB // 32)), np.uint32)
    masks[0, 0] = 1 << 5
    logits = logits_of(np.random.default_rng(1), 3)
    logits[:, 5] = 1.0
    (output,) = device.step([scheduled_row(0, (8,), 8, True, drafts=(5, 3))], logits, {0: masks})
    assert output.token_ids == (5,)


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=NATIVE)])
def test_a_row_that_closes_leaves_nothing(on_host: bool) -> None:
    """The next row of the same number has its own penalties, or none."""
    steps = SampledSteps(1, VOCAB, on_host=on_host)
    penalised = SamplingParams(temperature=0, frequency_penalty=2.0, dry_multiplier=1.0)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [8, 9]] = 1.0, 0.5
    for sampling, expected in ((penalised, (9,)), (penalised, (9,)), (SamplingParams(temperature=0), (8,))):
        steps.open(0, sampling, [1])
        found = [steps.decode([0], [length], logits)[0].token_ids for length in (1, 2)]
        assert found == [(8,), expected]
        steps.maker.close(0)
