"""Hidden states on a GPU: graphs keep them too, and with `batch_invariant` their bits are the same in any batch."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.hidden_state_runs import all_states, expected_states, same_bits  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPES = {
    "q8_0": Recipe(128, 8, 2, weights="Q8_0", windows=(None, 40, None), parts=("post_norms",)),
    "q8_0-folded": Recipe(128, 8, 2, hidden_size=1024, feed_forward_size=2816, weights="Q8_0", windows=(None,) * 3),
    "q4_k": Recipe(128, 8, 2, hidden_size=1024, feed_forward_size=2816, weights="Q4_K", windows=(None, None, 270)),
}
LAYERS = (0, 1, 2, None)
LENGTH = 96


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_states_of_chunks_and_of_single_tokens(name: str, graphs: bool) -> None:
    """Chunks, then decodes alone and beside others, which have graphs and other epilogues."""
    config = EngineConfig(max_running=16, max_step_tokens=256, kv_cache_bytes=64 << 20, graphs=graphs)
    runner, ids = GPURunner(*random_model(RECIPES[name]), config, (0, 1, 2)), random_tokens(RECIPES[name], LENGTH, 5)
    others = [runner.request(1 + i, random_tokens(RECIPES[name], 40, i), first=4 + 2 * i) for i in range(9)]
    runner.step([(each, 20) for each in others])
    chunks = (70, 9, *[1] * 17)
    beside = [[]] * 7 + [[(each, 1) for each in others]] * 12
    found = all_states(runner, runner.request(0, ids), LAYERS, chunks, beside)
    for states, expected in zip(found, expected_states(RECIPES[name], ids), strict=True):
        error = np.linalg.norm(states - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() <= 0.03
    runner.close()


@pytest.mark.parametrize("name", RECIPES)
def test_chunks_and_neighbours_change_no_bit(name: str) -> None:
    config = EngineConfig(max_running=16, max_step_tokens=256, kv_cache_bytes=64 << 20, batch_invariant=True)
    runner, ids = GPURunner(*random_model(RECIPES[name]), config, (0, 1, 2)), random_tokens(RECIPES[name], LENGTH, 5)
    expected = all_states(runner, runner.request(0, ids), LAYERS, (LENGTH,))
    others = [runner.request(1 + i, random_tokens(RECIPES[name], 40, i), first=4 + 2 * i) for i in range(9)]
    target = runner.request(12, ids, first=30)
    beside = [[(each, 20) for each in others[:4]], [(others[0], 1)], [], [(each, 2) for each in others[:3]]]
    assert same_bits(all_states(runner, target, LAYERS, (1, 30, 64, 1), beside), expected)
    runner.close()
