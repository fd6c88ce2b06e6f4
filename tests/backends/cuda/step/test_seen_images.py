"""Positions on three axes and features after the first layers, interpreted, are the CPU backend's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.step.given_runs import Text, given_core, seeing_model, seeing_requests, texts_of  # noqa: E402
from cpu_runs import Runner  # noqa: E402
from random_models import Recipe  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

SMALL = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="F32", windows=(None,) * 3)
CONFIG = EngineConfig(
    threads=1, max_running=4, max_step_tokens=32, kv_cache_bytes=2 << 20, context_length=96, kv_cache_dtype="f16",
    block_size=32,
)  # fmt: skip


def texts_in_chunks(recipe: Recipe, deepstack: int, tokens: int, *, whole: bool) -> dict[str, Text]:
    spec, checkpoint = seeing_model(recipe, deepstack, whole=whole)
    runner = GPURunner(spec, checkpoint, replace(CONFIG, max_step_tokens=tokens, batch_invariant=True))
    core = given_core(runner)
    found = texts_of(core, seeing_requests(spec, 3, 3))
    core.close()
    return found


@pytest.mark.parametrize(
    ("recipe", "deepstack", "whole"),
    [(SMALL, 0, False), (SMALL, 2, False), (replace(SMALL, windows=(None, 8, None)), 0, True)],
)
def test_images_are_seen_as_on_the_cpu(recipe: Recipe, deepstack: int, whole: bool) -> None:
    """Beside text, and from the blocks that the first time left; and in chunks with the same bits."""
    spec, checkpoint = seeing_model(recipe, deepstack, whole=whole)
    core = given_core(Runner(spec, checkpoint, CONFIG), "cpu")
    expected = texts_of(core, seeing_requests(spec, 3, 3))
    found = texts_in_chunks(recipe, deepstack, 32, whole=whole)
    core.close()
    assert found.keys() == expected.keys()
    for name, (tokens, logprobs, _) in expected.items():
        assert found[name][0] == tokens
        ours, theirs = ([each.logprob for each in one] for one in (found[name][1], logprobs))
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert texts_in_chunks(recipe, deepstack, 20 if whole else 7, whole=whole) == found
