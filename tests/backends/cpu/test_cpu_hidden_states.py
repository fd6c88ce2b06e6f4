"""The residual stream after named layers, and the final state, on the CPU: as in exact arithmetic, in any batch."""

from __future__ import annotations

import numpy as np
import pytest

from backends.hidden_state_runs import all_states, expected_states, same_bits
from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError

SHAPE = {"weights": "F32", "hidden_size": 64, "feed_forward_size": 96, "head_size": 32, "num_kv_heads": 1}
RECIPES = {
    "norms": Recipe(**SHAPE, windows=(None, 40, None), parts=("post_norms", "output_scale")),
    "lacking": Recipe(**SHAPE, windows=(None, None, 40), lacking=("mixer", "feed_forward")),
    "mixtures": Recipe(**SHAPE, windows=(None, None, None), experts=4),
    "own-inputs": Recipe(**SHAPE, windows=(40, None, None), input_size=32, sources=(None, None, 1)),
    "delta": Recipe(**SHAPE, windows=(None, None), recurrent=("delta",), value_size=16),
}
CONFIG = EngineConfig(threads=1, max_running=4, max_step_tokens=128, kv_cache_bytes=32 << 20, context_length=256)


@pytest.mark.parametrize("name", RECIPES)
def test_states_are_those_of_the_specification(name: str) -> None:
    """Each layer's, and the final one; of more tokens than logits exist at once."""
    recipe = RECIPES[name]
    spec, checkpoint = random_model(recipe)
    layers = tuple(range(len(spec.layers)))
    runner, ids = Runner(spec, checkpoint, CONFIG, layers), random_tokens(recipe, 77, 2)
    found = all_states(runner, runner.request(0, ids), (*layers, None), (70, 7))
    for states, expected in zip(found, expected_states(recipe, ids), strict=True):
        np.testing.assert_allclose(states, expected, rtol=5e-4, atol=5e-4)
    runner.close()


def test_chunks_and_neighbours_change_no_bit_and_kept_states_no_logit() -> None:
    recipe = Recipe(windows=(None, 40, None))
    spec, checkpoint = random_model(recipe)
    plain, runner = Runner(spec, checkpoint, CONFIG), Runner(spec, checkpoint, CONFIG, (0, 2))
    ids = random_tokens(recipe, 40, 3)
    whole = runner.request(0, ids)
    expected = all_states(runner, whole, (0, 2, None), (40,))
    other = runner.request(1, random_tokens(recipe, 60, 4), first=2)
    target = runner.request(2, ids, first=4)
    beside = [[(other, 20)], [(other, 1)], [], [(other, 30)]]
    assert same_bits(all_states(runner, target, (0, 2, None), (1, 19, 3, 17), beside), expected)
    assert np.array_equal(plain.logits(ids), whole.values())
    for each in (plain, runner):
        each.close()


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="hidden_layers names layer 2: the model's are 0 to 1"):
        Runner(*random_model(Recipe(weights="F32")), CONFIG, (0, 2))


def test_a_load_that_keeps_no_states_has_no_room_for_them() -> None:
    spec, checkpoint = random_model(Recipe(weights="F32"))
    plain, keeping = Runner(spec, checkpoint, CONFIG), Runner(spec, checkpoint, CONFIG, (1,))
    spaces = [each.backend.model.workspace for each in (plain, keeping)]
    assert spaces[1].size_bytes - spaces[0].size_bytes == spaces[1].buffers["kept 0"].values.nbytes
    assert len(keeping.backend.model.body.operations) == len(plain.backend.model.body.operations) + 1
    for each in (plain, keeping):
        each.close()
