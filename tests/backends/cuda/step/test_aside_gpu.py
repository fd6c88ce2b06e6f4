"""Chunks that are read aside, on a GPU: steps between their parts change no bit of them, nor they of these steps, and
they leave what a chunk leaves that is read at once.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import opened_row  # noqa: E402

pytestmark = pytest.mark.gpu

LAYERS = (None,) * 6
LONG = partial(Recipe, context_length=4096, windows=LAYERS)
RECIPES = {
    "q4_k-128-gqa4": LONG(128, 8, 2, weights="Q4_K"),
    "q6_k-64-windows": LONG(
        64, 4, 2, weights="Q6_K", windows=(None, 300) * 3, parts=("post_norms", "qk_norm", "sinks")
    ),
    "bf16-64-gqa4": LONG(64, 8, 2, weights="BF16", parts=("biases",)),
    "q4_k-experts": LONG(128, 8, 1, weights="Q4_K", experts=16, per_token=4, parts=("qk_norm",)),
    "q8_0-shared": LONG(64, 4, 2, weights="Q8_0", experts=8, per_token=2, parts=("shared",)),
}
BEFORE, CHUNK, DECODES = 900, 1500, (16, 200)


def logits_of(runner: GPURunner, recipe: Recipe, decodes: int, parts: int | None) -> list[NDArray[np.float32]]:
    """Logits of steps of decodes, then of a token after a chunk, with a step between every so many parts of it.

    None reads the chunk as other steps do, at once before all of the decodes.
    """
    size = runner.config.block_size
    most = -(-(BEFORE + CHUNK + 40) // size)
    prompt = runner.request(decodes, random_tokens(recipe, BEFORE + CHUNK + 20, 99))
    others = [
        runner.request(row, random_tokens(recipe, 60, row), first=most + row * (-(-60 // size)))
        for row in range(decodes)
    ]
    for each in (prompt, *others):
        runner.backend.open(opened_row(each.row, SamplingParams(temperature=0), each.token_ids, len(each.token_ids)))
    runner.step([(prompt, BEFORE)])
    for first in range(0, decodes, 50):
        runner.step([(each, 30) for each in others[first : first + 50]])
    for each in (prompt, *others):
        each.logits.clear()
    aside = runner.capacity.aside
    assert aside is not None
    if parts is None:
        runner.step([(prompt, CHUNK)])
    else:
        runner.backend.begin_aside(runner.input_of([(prompt, CHUNK)]))
        prompt.computed += CHUNK
        left = aside.parts
        while left:
            runner.backend.run_aside(min(parts, left))
            left -= min(parts, left)
            if left:
                runner.step([(each, 1) for each in others])
    while others[0].computed < 50:
        runner.step([(each, 1) for each in others])
    prompt.logits.clear()
    runner.step([(prompt, 1)])
    for each in (prompt, *others):
        runner.backend.close(each.row)
    return [each.values() for each in (prompt, *others)]


@pytest.mark.parametrize("decodes", DECODES)
@pytest.mark.parametrize("name", RECIPES)
def test_steps_between_change_nothing(name: str, decodes: int) -> None:
    recipe = RECIPES[name]
    config = EngineConfig(max_running=256, max_step_tokens=4096, context_length=4096, kv_cache_bytes=512 << 20)
    runner = GPURunner(*random_model(recipe), config)
    at_once, between, sparse, plain = (logits_of(runner, recipe, decodes, parts) for parts in (99, 1, 3, None))
    runner.close()
    assert all(np.isfinite(values).all() for values in at_once)
    for others in (between, sparse):
        for values, expected in zip(others, at_once, strict=True):
            assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))
    errors = [
        np.linalg.norm(values - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        for values, expected in zip(at_once, plain, strict=True)
    ]
    worst = np.nan_to_num(np.concatenate(errors), nan=np.inf)
    assert (
        float(np.quantile(worst, 0.9 if recipe.experts else 1.0)) < 0.02
    )  # another expert may be the better by a hair
