"""Choices of experts that `watch` notes of the GPU backend, interpreted, are those of the specification's twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from fidelity.engine_routes import watch  # noqa: E402
from fidelity.given_routes import distance  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402

SMALL = Recipe(32, 2, 1, 64, 96, 48, windows=(None, None), weights="F32", experts=5, per_token=2)


def test_choices_of_a_chunk_and_of_a_token() -> None:
    recipe = replace(SMALL, parts=("sigmoid", "selection_bias", "expert_biases"))
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        threads=1, max_running=1, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, graphs=False,
    )  # fmt: skip
    ids = random_tokens(recipe, 7)
    runner = GPURunner(spec, checkpoint, config)
    with watch(runner) as notes:
        logits = runner.logits(ids, (6,))
    runner.close()
    found = distance(spec, load_tensors(spec, checkpoint), ids, logits, notes.read())
    assert found.kl < 1e-6
    assert (found.choices, found.flipped, found.near) == (len(ids), 0, 0)
    assert np.isfinite(logits).all()
