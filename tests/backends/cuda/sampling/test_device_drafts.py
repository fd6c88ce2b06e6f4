"""Choices with drafts, all places at once on the device, beside the CPU's sampler, which goes from token to token."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from backends.cuda.sampling.sampled_steps import SampledSteps  # noqa: E402
from backends.cuda.sampling.test_device_sampler import ROWS, VOCAB, logits_of  # noqa: E402
from backends.reference_sampler.sampler import RowSampler  # noqa: E402
from realizar.backends.cuda.sampling.verify import NOT_REACHED, StepDrafts  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from step_inputs import opened_row, scheduled_row  # noqa: E402

MOST = 4
NATIVE = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]  # the CUDA kernels
MORE: list[dict[str, Any]] = [
    {"temperature": 0, "min_tokens": 6, "stop_token_ids": tuple(range(0, 300, 3))},
    {"temperature": 0, "stop_token_ids": tuple(range(0, 300, 3))},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0, "dry_multiplier": 9.0, "dry_allowed_length": 1, "frequency_penalty": 0.5},
    {"temperature": 0, "min_tokens": 8, "stop_token_ids": tuple(range(12))},
]


def opened_steps(samplings: list[SamplingParams], histories: list[list[int]], at_once: int | None) -> SampledSteps:
    """Rows of one step each with drafts, sampled by torch, or by the CUDA kernels where `at_once` is None."""
    steps = SampledSteps(len(samplings), VOCAB, at_once, MOST + 1)
    for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
        steps.open(row, sampling, history, choice=row % 3)
    return steps


def foreseen(sampler: RowSampler, logits: np.ndarray, position: int, masks: Any) -> tuple[list[int], list[RowSampler]]:
    """Choices of the CPU's sampler from one row of logits after the other, up to the end of the output.

    Returns the sampler as it is after each choice, too.
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


@pytest.mark.parametrize("at_once", [100, 3, pytest.param(None, marks=NATIVE)])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_choices_with_drafts_are_those_without(at_once: int | None, seed: int) -> None:
    """Every kind of sampling, some rows masked, some without drafts; all rows in one group, or groups that cut rows."""
    rng = np.random.default_rng(seed)
    samplings = [SamplingParams(seed=11 + row, **options) for row, options in enumerate([*ROWS, *MORE])]
    histories = [rng.integers(0, 12, 9).tolist() for _ in samplings]
    device = opened_steps(samplings, histories, at_once)
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
            logits[:, :12] += 12.0  # so that ids of the history are chosen, and repeat
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


class Largest(TorchDispatchMode):
    """Notes the most numbers in a tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.lift_fresh.default:  # a NumPy array's own memory
            made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            self.most = max([self.most, *(each.numel() for each in made)])
        return result


def test_no_more_logits_are_gathered_than_are_sampled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved for a group's logits, and not for those of all rows and their drafts."""
    at_once, rng = 3, np.random.default_rng(6)
    samplings = [SamplingParams(temperature=1.0, seed=row) for row in range(5)]
    device = opened_steps(samplings, [list(range(9))] * len(samplings), at_once)
    rows = [scheduled_row(row, (8,), 8, True, drafts=(3, 4, 5, 6)) for row in range(len(samplings))]
    logits = logits_of(rng, len(rows) * 5)
    make, largest = device.maker.make, Largest()

    def measured(step: Any) -> Any:
        with largest:
            return make(step)

    monkeypatch.setattr(device.maker, "make", measured)
    assert all(output.token_ids for output in device.step(rows, logits))
    assert largest.most == at_once * VOCAB


@pytest.mark.parametrize("at_once", [10, pytest.param(None, marks=NATIVE)])
def test_nothing_is_wanted_after_the_end(at_once: int | None) -> None:
    """A draft ends the output where its grammar is complete: the masks after it allow nothing, and are not read."""
    sampling = SamplingParams(temperature=0, stop_token_ids=(5,), structured=StructuredOutput("regex", "a"))
    device = opened_steps([sampling], [list(range(9))], at_once)
    masks = np.zeros((3, -(-VOCAB // 32)), np.uint32)
    masks[0, 0] = 1 << 5
    logits = logits_of(np.random.default_rng(1), 3)
    logits[:, 5] = 1.0
    (output,) = device.step([scheduled_row(0, (8,), 8, True, drafts=(5, 3))], logits, {0: masks})
    assert output.token_ids == (5,)


def test_verify_beside_a_loop() -> None:
    """Random choices and drafts of few ids, many of them right; ids are read on the device."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        sizes = rng.integers(0, MOST + 1, int(rng.integers(1, 6))).tolist()
        if not max(sizes):
            continue
        rows = [scheduled_row(i, (9,), 3, True, drafts=rng.integers(-1, 2, size)) for i, size in enumerate(sizes)]
        ends = np.cumsum([row.num_tokens for row in rows]).tolist()
        ids = torch.tensor([token_id for row in rows for token_id in row.token_ids], dtype=torch.int32)
        choices = rng.integers(-3, 2, sum(sizes) + len(sizes)).astype(np.int32)
        table, stands = StepDrafts.of(rows, ends, ids).verify(torch.from_numpy(choices))
        first = 0
        for index, row in enumerate(rows):
            expected = []
            for place in range(row.num_drafts + 1):
                expected.append(int(choices[first + place]))
                if place < row.num_drafts and (row.draft_ids[place] < 0 or row.draft_ids[place] != expected[-1]):
                    break
            first += row.num_drafts + 1
            assert stands[index].tolist() == [place < len(expected) for place in range(max(sizes) + 1)]
            assert table[index].tolist() == [*expected, *[NOT_REACHED] * (max(sizes) + 1 - len(expected))]
