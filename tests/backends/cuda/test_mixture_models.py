"""Mixtures of experts on the GPU backend, its kernels interpreted: logits beside exact arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from wider import wider  # noqa: E402

SMALL = Recipe(32, 2, 1, 64, 96, 48, windows=(None,), experts=5, per_token=2)
GPT_OSS = ("biases", "expert_biases", "clamped", "sinks")
RECIPES = {
    "f32": replace(SMALL, weights="F32"),
    "f32 undivided gelu": replace(SMALL, weights="F32", parts=("undivided", "post_norms"), activation="gelu"),
    "f16": replace(SMALL, weights="F16", router_weights="BF16"),
    "q8_0 then dense": replace(SMALL, weights="Q8_0", windows=(None, None)),
    "q4_0, down f16": replace(SMALL, weights="Q4_0", down_weights="F16", router_weights="F16"),
    "sigmoids": replace(SMALL, weights="F32", parts=("sigmoid", "selection_bias")),
    "gpt-oss": replace(SMALL, weights="F32", parts=GPT_OSS),
    "gpt-oss, mxfp4": replace(SMALL, weights="MXFP4", parts=GPT_OSS),
    "groups": replace(SMALL, weights="F32", experts=8, parts=("sigmoid", "selection_bias", "groups")),
    "shared": replace(SMALL, weights="F32", parts=("shared", "post_norms")),
    "shared, gate": replace(
        SMALL, weights="Q8_0", parts=("shared", "shared_gate", "biases", "layer_norm"), windows=(None, None)
    ),
    "parallel dense": replace(
        SMALL,
        weights="F32",
        parts=("shared", "own_norms", "expert_scales", "post_norms"),
        activation="gelu_tanh",
        windows=(None, None),
    ),
    "parallel dense, q8_0": replace(SMALL, weights="Q8_0", parts=("shared", "own_norms", "layer_norm", "biases")),
    "one expert": replace(SMALL, weights="F32", experts=1, per_token=1),
    "all experts": replace(SMALL, weights="F32", experts=3, per_token=3),
}


FIXED_ORDER = ("f32", "q8_0 then dense", "gpt-oss", "shared, gate", "parallel dense")
EACH = [(name, False) for name in RECIPES] + [(name, True) for name in FIXED_ORDER]


@pytest.mark.parametrize(
    ("name", "batch_invariant"),
    wider(EACH, ("gpt-oss, mxfp4", False), ("shared, gate", True)),
)
def test_logits(name: str, batch_invariant: bool) -> None:
    """A chunk, then a token beside another row's chunk, then a token of each."""
    recipe = RECIPES[name]
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64,
        kv_cache_dtype="f16", batch_invariant=batch_invariant,
    )  # fmt: skip
    runner = GPURunner(spec, checkpoint, config)
    first = runner.request(0, random_tokens(recipe, 14, 1))
    second = runner.request(1, random_tokens(recipe, 7, 2), first=1)
    runner.step([(first, 12)])
    runner.step([(first, 1), (second, 6)])
    runner.step([(first, 1), (second, 1)])
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    for request in (first, second):
        expected = reference.logits(request.token_ids)
        error = np.linalg.norm(request.values() - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() <= (2e-3 if recipe.weights == "F32" else 5e-3)
    runner.close()
