"""Chunks that are read aside, on a GPU: steps beside them change no bit of them, nor they of these steps, and they
leave what a chunk leaves that is read in a step.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import opened_row  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPE = Recipe(
    128, 8, 1, hidden_size=512, feed_forward_size=1024, vocab_size=512, windows=(None,) * 12, weights="Q4_K",
    parts=("qk_norm",), context_length=16_384, experts=16, per_token=4,
)  # fmt: skip
BEFORE, CHUNKS, STEPS = 900, (2048, 2048, 2048, 2048, 2048, 1500), 20


def logits_of(runner: GPURunner, decodes: int, *, aside: bool) -> list[NDArray[np.float32]]:
    """Logits of a token after chunks, and of steps of decodes beside them: none begin before those have, or all do."""
    size, total = runner.config.block_size, BEFORE + sum(CHUNKS) + 1
    most = -(-total // size)
    prompt = runner.request(16, random_tokens(RECIPE, total, 99))
    others = [
        runner.request(row, random_tokens(RECIPE, 30 + STEPS, row), first=most + row * (-(-(30 + STEPS) // size)))
        for row in range(decodes)
    ]
    for each in (prompt, *others):
        runner.backend.open(opened_row(each.row, SamplingParams(temperature=0), each.token_ids, len(each.token_ids)))
    runner.step([(prompt, BEFORE)])
    if others:
        runner.step([(each, 30) for each in others])
    for each in (prompt, *others):
        each.logits.clear()
    for count in CHUNKS:
        if aside:
            runner.backend.read_aside(runner.input_of([(prompt, count)]))
            prompt.computed += count
        else:
            runner.step([(prompt, count)])
    beside = 0
    while others and others[0].computed < 30 + STEPS:
        beside += runner.backend.num_aside()
        runner.step([(each, 1) for each in others])
    assert beside > 0 or not aside or not others
    runner.backend.await_aside()
    prompt.logits.clear()
    runner.step([(prompt, 1)])
    assert not runner.backend.num_aside()
    for each in (prompt, *others):
        runner.backend.close(each.row)
    return [each.values() for each in (prompt, *others)]


def test_steps_beside_change_nothing() -> None:
    config = EngineConfig(max_running=17, max_step_tokens=2048, context_length=16_384, kv_cache_bytes=2 << 30)
    runner = GPURunner(*random_model(RECIPE), config)
    assert runner.capacity.aside_tokens == max(CHUNKS)
    (alone,) = logits_of(runner, 0, aside=True)
    (beside, *steps), (plain, *expected) = (logits_of(runner, 16, aside=each) for each in (True, False))
    assert np.isfinite(alone).all()
    assert np.array_equal(beside.view(np.uint32), alone.view(np.uint32))
    for values, others in zip(steps, expected, strict=True):
        assert np.array_equal(values.view(np.uint32), others.view(np.uint32))
    # where another expert was the better by a hair, keys and values of its token differ
    assert np.linalg.norm(beside - plain) < 0.1 * np.linalg.norm(plain)
    runner.close()
