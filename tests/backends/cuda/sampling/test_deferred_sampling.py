"""Rows that are deferred sample nothing, and their samplers stay as they are: on the host, and by CUDA kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.cuda.sampling.sampled_steps import SampledSteps  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from step_inputs import scheduled_row  # noqa: E402

VOCAB = 300
NATIVE = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GRAMMAR = StructuredOutput("regex", "a")
ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.6},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.9},
    {"temperature": 0.9, "dry_multiplier": 9.0, "dry_allowed_length": 1},
    {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": tuple(range(0, 300, 2))},
]


def texts(on_host: bool, *, defer: bool, drafts: int = 0) -> list[list[tuple[int, ...]]]:
    """The sampled tokens of rows in some steps with masks, each row deferred once before it samples if `defer`.

    Args:
        drafts: of one more row, which stands beside deferred rows and is not deferred itself.
    """
    rng, count = np.random.default_rng(5), 2 * len(ROWS)
    steps = SampledSteps(count + 1, VOCAB, on_host=on_host, places=1 + drafts)
    steps.open(count, SamplingParams(temperature=0.0), [1] * 9)
    for row in range(count):
        sampling = SamplingParams(seed=row, structured=GRAMMAR, **ROWS[row % len(ROWS)])
        steps.open(row, sampling, rng.integers(0, 12, 9).tolist())
    found: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
    for step in range(6):
        logits = torch.from_numpy(rng.standard_normal((count, VOCAB)).astype(np.float32) * 2)
        masks = {row: rng.integers(0, 1 << 32, 10, dtype=np.uint32) | np.uint32(1 << 7) for row in range(count)}
        rows = [scheduled_row(row, (1,), 8 + step, True) for row in range(count)]
        if defer:
            for deferred in (range(0, count, 2), range(1, count, 2)):
                several = [scheduled_row(count, (1,), 8 + 2 * step, True, drafts=[5] * drafts)] if drafts else []
                beside = torch.ones((1 + drafts if drafts else 0, VOCAB))
                given = torch.cat([logits[list(deferred)], beside])
                outputs = steps.step([*(rows[row] for row in deferred), *several], given, deferred=deferred)
                assert all(output.token_ids == (0,) for output in outputs[len(deferred) :])
                assert [(output.token_ids, output.logprobs, output.error) for output in outputs[: len(deferred)]] == [
                    ((), (), None)
                ] * len(deferred)
        for row, output in enumerate(steps.step(rows, logits, masks)):
            found[row].append(output.token_ids)
    return found


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=NATIVE)])
@pytest.mark.parametrize("drafts", [0, 2])
def test_held_rows_choose_the_same_later(on_host: bool, drafts: int) -> None:
    assert texts(on_host, defer=True, drafts=drafts) == texts(on_host, defer=False)
