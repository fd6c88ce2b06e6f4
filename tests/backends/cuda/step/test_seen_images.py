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


def texts_in_chunks(deepstack: int, tokens: int) -> dict[str, Text]:
    spec, checkpoint = seeing_model(SMALL, deepstack)
    runner = GPURunner(spec, checkpoint, replace(CONFIG, max_step_tokens=tokens, batch_invariant=True))
    core = given_core(runner)
    found = texts_of(core, seeing_requests(spec, 3, 3))
    core.close()
    return found


@pytest.mark.parametrize("deepstack", [0, 2])
def test_images_are_seen_as_on_the_cpu(deepstack: int) -> None:
    """Beside text, and from the blocks that the first time left; and in chunks with the same bits."""
    spec, checkpoint = seeing_model(SMALL, deepstack)
    core = given_core(Runner(spec, checkpoint, CONFIG), "cpu")
    expected, found = texts_of(core, seeing_requests(spec, 3, 3)), texts_in_chunks(deepstack, 32)
    core.close()
    assert found.keys() == expected.keys()
    for name, (tokens, logprobs, _) in expected.items():
        assert found[name][0] == tokens
        ours, theirs = ([each.logprob for each in one] for one in (found[name][1], logprobs))
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert texts_in_chunks(deepstack, 7) == found
