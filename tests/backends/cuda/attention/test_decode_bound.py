"""Attention of single tokens in CUDA C++ as the backend starts it: the kernel's twin gets the same arguments."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backends.cuda.attention.decode_twin import attend_by_twin  # noqa: E402
from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.packed_matmuls import run_packed  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from reference_model import FP8CacheModel, ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from wider import wider  # noqa: E402

RECIPES = {
    "f16-64-gqa2-window": (Recipe(64, 4, 2, 128, 128, 48, windows=(None, 10), weights="Q8_0"), {"int8", "half", "f32"}),
    "int8-32-sinks-biases": (
        Recipe(32, 4, 2, 128, 128, 48, windows=(None,), weights="Q8_0", parts=("sinks", "biases", "interleaved")),
        {"int8", "half", "f32"},
    ),
    "bf16-80-norms-cap": (
        Recipe(80, 2, 2, 160, 128, 48, (None,), "Q8_0", ("qk_norm", "soft_cap", "partial_rope", "layer_norm")), {"f32"},
    ),
    "bf16-64-value norm-growth": (
        Recipe(64, 4, 2, 128, 128, 48, (None,), "Q8_0", ("qk_norm", "value_norm", "growth")), {"int8", "half", "f32"},
    ),
    "bf16-64-shared": (
        Recipe(64, 4, 2, 128, 128, 48, (10, None, 10, None), "Q8_0", ("qk_norm",), sources=(None, None, 0, 1),
               input_size=64),
        {"int8", "half", "f32"},
    ),
    "fp8-64-gqa2-window": (Recipe(64, 4, 2, 128, 128, 48, windows=(None, 10), weights="Q8_0"), {"int8", "half", "f32"}),
    "f16-64-token norm": (Recipe(64, 2, 1, 128, 128, 48, (None,), "Q8_0", ("token_norm",)), {"int8", "half", "f32"}),
}  # fmt: skip


@pytest.mark.parametrize("name", wider(RECIPES, "int8-32-sinks-biases", "fp8-64-gqa2-window", "f16-64-token norm"))
def test_the_kernel_gets_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes alone by one and by three, and beside a chunk; blocks that are not in order."""
    recipe, outs = RECIPES[name]
    run_packed(monkeypatch)
    launched = attend_by_twin(monkeypatch)
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        threads=1, max_running=3, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64,
        kv_cache_dtype=name.partition("-")[0],  # type: ignore[arg-type]
    )  # fmt: skip
    runner = GPURunner(spec, checkpoint, config)
    rng = np.random.default_rng(1)
    requests = [
        runner.request(row, random_tokens(recipe, length, row), rng, first=4 * row)
        for row, length in enumerate((22, 9, 8))
    ]
    runner.step([(requests[0], 17)])
    runner.step([(requests[0], 1), (requests[1], 6), (requests[2], 5)])
    for _ in range(3):
        runner.step([(request, 1) for request in requests])
    runner.step([(requests[0], 1)])
    twin = FP8CacheModel if name.startswith("fp8") else ReferenceModel
    reference = twin(spec, load_tensors(spec, checkpoint), np.float64)
    for request in requests:
        found, expected = request.values(), reference.logits(request.token_ids)
        error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() <= 0.04
    runner.close()
    assert {kernel.out for kernel in launched} == outs
    assert len(launched) == 5 * len(spec.layers)
