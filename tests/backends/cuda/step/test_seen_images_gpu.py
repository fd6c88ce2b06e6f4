"""Positions on three axes and features after the first layers, on a GPU; steps of text stay graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.step.given_runs import given_core, seeing_model, seeing_requests, texts_of  # noqa: E402
from cpu_runs import Runner  # noqa: E402
from random_models import Recipe  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

pytestmark = pytest.mark.gpu

WIDE = Recipe(weights="F32", windows=(None,) * 3, parts=("qk_norm",))
CONFIG = EngineConfig(
    max_running=4, max_step_tokens=256, kv_cache_bytes=64 << 20, context_length=1024, kv_cache_dtype="f16",
    block_size=32,
)  # fmt: skip


@pytest.mark.parametrize("recipe", [WIDE, replace(WIDE, experts=4)], ids=["dense", "experts"])
@pytest.mark.parametrize(("deepstack", "whole"), [(0, False), (2, False), (0, True)])
def test_images_are_seen_as_on_the_cpu(recipe: Recipe, deepstack: int, whole: bool) -> None:
    """In any chunks with the same bits, where the model is batch-invariant, and from the blocks of the first time."""
    recipe = replace(recipe, windows=(None, 40, None)) if whole else recipe
    spec, checkpoint = seeing_model(recipe, deepstack, whole=whole)
    core = given_core(Runner(spec, checkpoint, CONFIG), "cpu")
    expected, found = texts_of(core, seeing_requests(spec, 10, 12)), []
    core.close()
    few = 208 if whole else 48
    for changes in ({}, {"batch_invariant": True}, {"batch_invariant": True, "max_step_tokens": few}):
        core = given_core(GPURunner(spec, checkpoint, replace(CONFIG, **changes)))
        found.append(texts_of(core, seeing_requests(spec, 10, 12)))
        core.close()
    for texts in found[:2]:
        assert texts.keys() == expected.keys()
        for name, (_, logprobs, _) in expected.items():
            ours, theirs = (one[0].logprob for one in (texts[name][1], logprobs))
            np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert found[1] == found[2]


def test_steps_with_chunks_of_images_are_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text and with features of images, of which nothing is left in the steps after them."""
    spec, checkpoint = seeing_model(WIDE, 2)
    runner = GPURunner(spec, checkpoint, CONFIG)
    graphs, arrays, core = runner.backend.model.graphs, runner.backend.model.space.arrays, given_core(runner)
    run, replay, launched, brought = graphs.run_eagerly, graphs.replay, list[int](), list[bool]()

    def run_noted(body: StepKind, selected: int) -> None:
        launched.append(body.tiles)
        run(body, selected)

    def replay_noted(kind: StepKind) -> bool:
        brought.append(arrays.brings_features)
        return replay(kind)

    monkeypatch.setattr(graphs, "run_eagerly", run_noted)
    monkeypatch.setattr(graphs, "replay", replay_noted)
    before = texts_of(core, seeing_requests(spec, 10, 4)[:1])
    assert not any(brought)
    texts_of(core, [replace(each, cache_salt="other") for each in seeing_requests(spec, 10, 4)])
    assert any(brought)
    assert not any(launched)
    core.clear_cache()
    assert texts_of(core, seeing_requests(spec, 10, 4)[:1]) == before
    core.close()
