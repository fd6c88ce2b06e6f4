"""Chunks of prompts that are read aside, interpreted: parts of them run between steps of others, and all texts are
those of an engine that reads none aside.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.devices import ChosenDevice
from realizar.config import EngineConfig
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Pace, Policy
from resolving import new_core
from step_inputs import stepped
from wider import wider

MODELS = {
    "plain": Recipe(32, 2, 1, 64, 96, 48, (None, None, None), "F32"),
    "windows": Recipe(32, 2, 1, 64, 96, 48, (5, None, 20), "Q8_0", parts=("qk_norm", "post_norms", "output_scale")),
    "inputs of layers": Recipe(32, 2, 1, 64, 96, 48, (None, None, None), "F32", sources=(None, None, 0), input_size=32),
    "experts": Recipe(32, 2, 1, 64, 64, 48, (None, None, None), "Q8_0", experts=4, per_token=2),
}
CONFIG = EngineConfig(
    threads=1, max_running=4, max_step_tokens=64, kv_cache_bytes=2 << 20, context_length=256, kv_cache_dtype="f16",
    block_size=16,
)  # fmt: skip
BESIDE = 16


def texts_of(recipe: Recipe) -> dict[str, list[int]]:
    """Tokens of two streams, of a long prompt beside them, and of a short one that comes while it is read."""
    runner = GPURunner(*random_model(recipe), CONFIG)
    core = new_core(
        runner.backend, runner.spec, runner.config, steps_in_flight=2, device=ChosenDevice("cuda"),
        policy=Policy(stretch=1e9),
    )  # fmt: skip
    texts = defaultdict[str, list[int]](list)
    for name, length, count, steps in (("a", 9, 60, 0), ("bb", 20, 60, 4), ("long", 240, 8, 5), ("short", 30, 8, 999)):
        ids = tuple(random_tokens(Recipe(vocab_size=48), length, len(name)))
        core.add(Request(name, ids, SamplingParams(temperature=0.0), count))
        while core.has_work and steps:
            steps -= 1
            for output in stepped(core):
                texts[output.request_id] += output.token_ids
    core.audit()
    core.close()
    return texts


@pytest.mark.parametrize("name", wider(MODELS, "plain", "windows", "inputs of layers", "experts"))
@pytest.mark.parametrize("parts", [1, 2])
def test_texts_are_those_without(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short prompt that comes between the parts of a long one, too."""
    monkeypatch.setattr("realizar.backends.cuda.load._LEAST_PARTS", 99)
    expected = texts_of(MODELS[name])
    for module in ("load", "runner", "step_arrays"):
        monkeypatch.setattr(f"realizar.backends.cuda.{module}.BESIDE", BESIDE)
    monkeypatch.setattr("realizar.backends.cuda.load._LEAST_PARTS", 2)
    monkeypatch.setattr(Pace, "aside_parts", lambda *_: parts)
    monkeypatch.setattr(Pace, "aside_pays", lambda *_, **__: True)
    counts, run_aside = list[int](), CUDABackend.run_aside

    def noted(backend: CUDABackend, num_parts: int) -> None:
        counts.append(num_parts)
        run_aside(backend, num_parts)

    monkeypatch.setattr(CUDABackend, "run_aside", noted)
    found = texts_of(MODELS[name])
    assert found == expected
    assert len(counts) >= 4
    assert max(counts) == parts
