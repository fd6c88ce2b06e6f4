"""Graphs that are captured after the load: steps compute the same before and after, and as with those of the load."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backend_runs import BackendRunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.device import open_device  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPES = {
    "attention": Recipe(128, 8, 2, weights="Q4_K", hidden_size=256),
    "delta": Recipe(
        128,
        8,
        2,
        weights="Q4_K",
        windows=(None,) * 4,
        parts=("output_gate",),
        recurrent=("delta", "delta", None, "delta"),
        value_heads=4,
        key_size=128,
        value_size=128,
    ),
}
CONFIG = EngineConfig(max_running=24, max_step_tokens=256, kv_cache_bytes=64 << 20, context_length=512)


@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_the_same_before_and_after(name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no other card defers")
    recipe = RECIPES[name]
    spec, checkpoint = random_model(recipe)
    prompts = [random_tokens(recipe, 40 + 5 * row, row) for row in range(16)]

    def logits(runner: BackendRunner[CUDABackend]) -> np.ndarray:
        """Of chunks of several rows, then of decodes of 16 and of 3."""
        requests = [runner.request(row, ids, first=4 * row) for row, ids in enumerate(prompts)]
        for first in range(0, 16, 4):
            runner.step([(each, 32) for each in requests[first : first + 4]])
        runner.step([(each, 1) for each in requests])
        runner.step([(each, 1) for each in requests[:3]])
        return np.concatenate([each.values() for each in requests])

    def runner_of(*, defers: bool) -> BackendRunner[CUDABackend]:
        return Runner(CUDABackend(device=open_device(), defers=defers), spec, checkpoint, CONFIG, "cuda")

    deferring, plain = runner_of(defers=True), runner_of(defers=False)
    graphs = deferring.backend.model.graphs
    kinds = set(plain.backend.model.graphs._graphs)
    assert 0 < len(graphs._graphs) < len(kinds)
    expected, before = logits(plain), logits(deferring)
    assert deferring.backend.asks_for_graphs
    while deferring.backend.asks_for_graphs:
        assert deferring.backend.prepare_next(asked=True)
    assert not deferring.backend.prepare_next(asked=True)
    between = logits(deferring)
    while deferring.backend.prepare_next(asked=False):
        pass
    assert set(graphs._graphs) == kinds
    after = logits(deferring)
    for found in (before, between, after):
        np.testing.assert_array_equal(found, expected)
    deferring.close()
    plain.close()


class Runner(BackendRunner[CUDABackend]):
    def read_logits(self, tokens: list[int]) -> np.ndarray:
        found: np.ndarray = self.backend.logits(tokens).cpu().numpy().copy()
        return found
