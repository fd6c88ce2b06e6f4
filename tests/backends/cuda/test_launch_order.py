"""The launches of a model in order, by the names that profiles give them, for layers of every make."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

CONFIG = EngineConfig(threads=1, max_running=1, max_step_tokens=16, context_length=64, kv_cache_dtype="f16")
MIXER = ["norm", "qkv", "rope", "attention", "attention output", "output"]
FEED_FORWARD = ["norm", "gate and up", "activation", "down"]


@pytest.mark.parametrize("parts", [(), ("post_norms", "ungated"), ("token_norm",)], ids=["plain", "post", "tokens"])
def test_a_norm_begins_each_block_and_adds_the_one_before(parts: tuple[str, ...]) -> None:
    """One more norm's launch adds the last block; a norm after a branch is part of the launch that adds it."""
    recipe = Recipe(32, 2, 1, 64, 96, 48, (None,) * 3, "Q8_0", parts, lacking=(None, "feed_forward", "mixer"))
    spec, checkpoint = random_model(recipe)
    runner = GPURunner(spec, checkpoint, CONFIG)
    body, tail = runner.backend.model.graphs._body, runner.backend.model.graphs._tail
    runner.close()
    mixer = [*MIXER[:2], "qk norm", *MIXER[2:]] if "token_norm" in parts else MIXER
    expected = ["embed", *mixer, *FEED_FORWARD, *mixer, *FEED_FORWARD, "norm"]
    assert [launch.name for launch in body] == expected
    assert [launch.name for launch in tail] == ["final norm", "head", "choose"]
    attentions = [attention for _, attention in spec.attentions()]
    assert [launch.attention for launch in body if launch.attention is not None] == attentions
    weights = {"qkv", "output", "gate and up", "down", "head"}
    assert {launch.name for launch in (*body, *tail) if launch.weight_bytes} == weights
