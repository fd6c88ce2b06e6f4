"""The device's sampler beside the CPU's: the same choices from the same logits, token after token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.reference_sampler.logprobs import token_logprobs  # noqa: E402
from backends.reference_sampler.sampler import RowSampler  # noqa: E402
from realizar.backends.cuda.sampling.logprobs import LogprobsAsked, start_logprobs  # noqa: E402
from realizar.backends.cuda.sampling.positions import Positions  # noqa: E402
from realizar.backends.cuda.sampling.sampler import (  # noqa: E402
    NONE_ALLOWED,
    SCRATCH_BYTES_PER_ID,
    DeviceSampler,
    reserved_bytes,
    scratch_bytes,
)
from realizar.errors import InvalidRequestError  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import opened_row  # noqa: E402

VOCAB = 300
CPU = torch.device("cpu")
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
]


def sample(
    device: DeviceSampler, logits: Any, rows: Sequence[int], positions: Sequence[int], masks: Mapping[int, Any]
) -> Any:
    """Choose for rows without drafts, and take the choices into their state."""
    chosen = device.choose(logits, Positions(rows, positions), masks)
    device.accept(chosen)
    return chosen.ids


def logits_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Few distinct values, so that equal logits occur, and some forbidden ids."""
    values = np.round(rng.standard_normal((rows, VOCAB)) * 8).astype(np.float32) / np.float32(2)
    values[rng.random(values.shape) < 0.02] = -np.inf
    return values


@pytest.mark.parametrize(("top_k", "at_once"), [(0, 100), (3, 100), (30, 2)])
def test_choices_are_the_cpu_samplers(top_k: int, at_once: int) -> None:
    """Rows run as listed, and with a top-k in all but mirostat's, so that the sampler looks at candidates alone.

    All rows at once, or in the groups that little memory allows.
    """
    rng = np.random.default_rng(3)
    listed = [{"top_k": top_k, **options} for options in ROWS if not (top_k and "top_n_sigma" in options)]
    samplings = [SamplingParams(seed=11 + row, **options) for row, options in enumerate(listed)]
    device = DeviceSampler(len(listed), VOCAB, 64, CPU, at_once * SCRATCH_BYTES_PER_ID * VOCAB)
    assert device.rows_at_once == at_once
    rows, lengths = [], []
    for row, sampling in enumerate(samplings):
        history = rng.integers(0, 12, 9).tolist()
        device.open(opened_row(row, sampling, history, 6, row % 3))
        rows.append(RowSampler(opened_row(row, sampling, history, 6, row % 3), VOCAB))
        lengths.append(len(history))
    for step in range(8):
        values = logits_of(rng, len(listed))
        order = rng.permutation(len(listed)).tolist()
        positions = [lengths[row] for row in order]
        found = sample(device, torch.from_numpy(values[order]), order, positions, {}).tolist()
        for token_id, row in zip(found, order, strict=True):
            expected = rows[row].sample(values[row], lengths[row]).token_id
            assert token_id == expected, f"row {row} ({listed[row]}), step {step}"
            rows[row].accept(expected)
            lengths[row] += 1


def test_masks() -> None:
    """With min_tokens the end stays allowed where the mask allows nothing else; no allowed token gives NONE_ALLOWED."""
    rng = np.random.default_rng(4)
    device = DeviceSampler(4, VOCAB, 64, CPU)
    values = logits_of(rng, 4)
    values[:, [17, 40, 290]] = [[3.0, 5.0, 1.0]] * 4
    ends_late = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(40,))
    for row, sampling in enumerate((SamplingParams(temperature=0), ends_late, ends_late, SamplingParams(seed=1))):
        device.open(opened_row(row, sampling, [1]))
    masks = {}
    for row, allowed in enumerate(((17, 290), (17, 40), (40,), ())):
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        masks[row] = np.packbits(bits, bitorder="little").view(np.uint32)
    found = sample(device, torch.from_numpy(values), [0, 1, 2, 3], [1] * 4, masks).tolist()
    assert found == [17, 17, 40, NONE_ALLOWED]


def test_unusable_logits_are_reported() -> None:
    values = np.zeros((3, VOCAB), np.float32)
    values[0, 5], values[1, 6], values[2] = np.nan, np.inf, -np.inf
    device = DeviceSampler(3, VOCAB, 64, CPU)
    for row in range(3):
        device.open(opened_row(row, SamplingParams(temperature=row / 2), [1]))
    assert sample(device, torch.from_numpy(values), [0, 1, 2], [1] * 3, {}).tolist() == [-1, -1, -1]


def test_bias_beyond_the_vocabulary() -> None:
    with pytest.raises(InvalidRequestError, match="300"):
        DeviceSampler(1, VOCAB, 64, CPU).open(opened_row(0, SamplingParams(logit_bias={300: 1.0}), [1]))


def test_a_row_that_closes_leaves_nothing() -> None:
    """The next row of the same number has its own penalties, or none."""
    device = DeviceSampler(1, VOCAB, 64, CPU)
    penalised = SamplingParams(temperature=0, frequency_penalty=2.0, dry_multiplier=1.0)
    values = np.zeros((1, VOCAB), np.float32)
    values[0, [8, 9]] = 1.0, 0.5
    for _ in range(2):
        device.open(opened_row(0, penalised, [1]))
        assert [sample(device, torch.from_numpy(values), [0], [1], {}).item() for _ in range(2)] == [8, 9]
        device.close(0)
    device.open(opened_row(0, SamplingParams(temperature=0), [1]))
    assert device.takes_largest(0)
    assert sample(device, torch.from_numpy(values), [0], [1], {}).item() == 8


def test_logprobs() -> None:
    rng = np.random.default_rng(5)
    values = logits_of(rng, 4)
    asked = [LogprobsAsked(None, 3), LogprobsAsked(44, 0), LogprobsAsked(0, 20), LogprobsAsked(7, 1)]
    chosen = torch.tensor([int(values[0].argmax()), 0, 0, 0])
    for (found,), row, one in zip(
        start_logprobs(torch.from_numpy(values), asked, chosen, torch.clone).read(), values, asked, strict=True
    ):
        expected = token_logprobs(row, one.target, one.top_n)
        assert found.token_id == expected.token_id
        assert found.rank == expected.rank
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-6)
        assert [i for i, _ in found.top] == [i for i, _ in expected.top]
        assert [p for _, p in found.top] == pytest.approx([p for _, p in expected.top], abs=1e-6)


def test_a_row_without_tables_takes_nothing_and_what_is_reserved_is_bounded() -> None:
    """256 rows of 131,072 tokens each: repetition penalties took 1 GB for all of them as soon as one asked for it."""
    device = DeviceSampler(256, VOCAB, 131_072, CPU)
    device.open(opened_row(0, SamplingParams(dry_multiplier=0.8), [1, 2, 3]))
    device.open(opened_row(1, SamplingParams(), [1, 2, 3]))
    (table,) = device._dry._active.values()
    assert table.tokens.nbytes + table.lengths.nbytes <= 1.1 * 8 * 131_072
    device.close(0)
    assert not device._dry._active
    small, large = (reserved_bytes(256, 152_064, 131_072, size) for size in (24 << 30, 140 << 30))
    assert small <= 1.1e9
    assert large <= 2.9e9
    assert reserved_bytes(2, 512, 256, 24 << 30) <= 1 << 20
    assert scratch_bytes(1, 152_064, 24 << 30) == 152_064 * SCRATCH_BYTES_PER_ID
