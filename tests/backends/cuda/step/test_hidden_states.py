"""The residual stream after named layers, and the final state, of the GPU backend, its kernels interpreted."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner
from backends.hidden_state_runs import all_states, expected_states
from random_models import Recipe, random_model, random_tokens
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError
from wider import wider

SHAPE = {
    "weights": "F32", "hidden_size": 64, "feed_forward_size": 96, "head_size": 32, "num_heads": 2, "num_kv_heads": 1,
    "vocab_size": 48,
}  # fmt: skip
RECIPES = {
    "norms": Recipe(**SHAPE, windows=(None, 5, None), parts=("post_norms", "output_scale")),
    "lacking": Recipe(**SHAPE, windows=(None, None, 5), lacking=("mixer", "feed_forward")),
    "mixtures": Recipe(**SHAPE, windows=(None, None), experts=4),
    "own-norms": Recipe(**SHAPE, windows=(None, None), experts=4, parts=("own_norms", "shared", "post_norms")),
    "own-inputs": Recipe(**SHAPE, windows=(5, None, None), input_size=32, sources=(None, None, 1)),
}
CONFIG = EngineConfig(threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64)


@pytest.mark.parametrize("name", wider(RECIPES, "norms", "lacking", "own-norms"))
def test_states_are_those_of_the_specification(name: str) -> None:
    recipe = RECIPES[name]
    spec, checkpoint = random_model(recipe)
    layers = tuple(range(len(spec.layers)))
    runner, ids = GPURunner(spec, checkpoint, CONFIG, layers), random_tokens(recipe, 14, 2)
    found = all_states(runner, runner.request(0, ids), (*layers, None), (12, 2))
    for states, expected in zip(found, expected_states(recipe, ids), strict=True):
        np.testing.assert_allclose(states, expected, rtol=2e-3, atol=2e-3)
    runner.close()


def test_kept_states_change_no_logit_and_are_a_rows_own() -> None:
    recipe = RECIPES["norms"]
    spec, checkpoint = random_model(recipe)
    plain, runner = GPURunner(spec, checkpoint, CONFIG), GPURunner(spec, checkpoint, CONFIG, (0, 2))
    ids = random_tokens(recipe, 9, 3)
    whole = runner.request(0, ids)
    expected = all_states(runner, whole, (0, 2, None), (9,))
    other, target = runner.request(1, random_tokens(recipe, 9, 4), first=1), runner.request(0, ids, first=2)
    found = all_states(runner, target, (0, 2, None), (1, 6, 2), [[(other, 6)], [(other, 1)], []])
    np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=1e-4, atol=1e-4)
    assert np.array_equal(plain.logits(ids), whole.values())
    for each in (plain, runner):
        each.close()


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="hidden_layers names layer 3: the model's are 0 to 2"):
        GPURunner(*random_model(RECIPES["norms"]), CONFIG, (3,))
