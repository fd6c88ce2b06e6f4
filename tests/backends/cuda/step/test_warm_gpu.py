"""Loading compiles and loads everything that steps need, so that nothing is compiled while a model serves."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from triton.runtime.jit import JITFunction  # noqa: E402

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.attention.decode import DecodeAttention  # noqa: E402
from realizar.backends.cuda.native import launcher  # noqa: E402
from realizar.batch import LogprobQuery  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import opened_row, scheduled_row, step_input  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPES = {
    "gqa3": Recipe(64, 6, 2, weights="Q8_0", windows=(None, None)),
    "mha": Recipe(96, 8, 8, weights="Q6_K", windows=(None, None), parts=("soft_cap", "qk_norm", "post_norms")),
    "gqa8": Recipe(128, 8, 1, weights="Q8_0", windows=(None,), parts=("token_norm",)),
    "floats": Recipe(
        64, 4, 4, weights="BF16", windows=(None, None), parts=("layer_norm", "ungated", "biases"), activation="gelu"
    ),
}
ROWS = 40


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of Triton's kernels as they are compiled for new constants or kinds of arguments."""
    names: list[str] = []
    compile_now = JITFunction._do_compile

    def noted(function: JITFunction, *arguments: object, **options: object) -> object:
        names.append(function.__name__)
        return compile_now(function, *arguments, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    return names


def mixed_steps(runner: GPURunner, recipe: Recipe) -> None:
    """Decodes in all numbers, alone and beside chunks of many sizes."""
    requests = [runner.request(row, random_tokens(recipe, 700, row), first=32 * row) for row in range(ROWS)]
    for request in requests:
        runner.backend.open(opened_row(request.row, SamplingParams(temperature=0), request.token_ids, 700))
    runner._logits = lambda first, count: np.zeros((0, 0), np.float32)  # type: ignore[method-assign]
    for decodes in (1, 2, 3, 5, 9, 17, 25, 33, 39):
        for chunk in (0, 2, 7, 30, 100, 300, 550):
            parts = [(request, 1) for request in requests[:decodes]] + [(requests[-1], chunk)] * (chunk > 0)
            if decodes + chunk <= 640:
                runner.step(parts, sample=True)
            requests[-1].computed = 0
    for request in requests:
        runner.backend.close(request.row)


def other_work(runner: GPURunner, recipe: Recipe) -> None:
    """Pooled states, log-probabilities of many tokens, drafts, samplers."""
    ids = np.array(random_tokens(recipe, 200, 3), np.int32)
    places = np.arange(200, dtype=np.int32)
    table = np.arange(8, dtype=np.int32)[None]
    samplings = (
        SamplingParams(temperature=0, logprobs=3), SamplingParams(seed=1, top_p=0.9, min_p=0.01),
        SamplingParams(seed=2, repetition_penalty=1.2, dry_multiplier=0.8), SamplingParams(seed=3, mirostat=2),
    )  # fmt: skip
    for pooling in (None, "last", "mean"):
        for sampling in samplings:
            runner.backend.open(opened_row(0, sampling, ids))
            queries = tuple(LogprobQuery(at, int(ids[at + 1]), 2) for at in range(0 if pooling else 150))
            row = scheduled_row(0, ids, sample=True, logprob_queries=queries, pooling=pooling)
            tables, slots = (table,) * runner.groups, (places,) * runner.groups
            runner.backend.submit(step_input([row], slots, tables)).result()
            drafts = scheduled_row(0, (5,), 200, True, drafts=(1, 2, 3))
            last = np.arange(200, 204, dtype=np.int32)
            runner.backend.submit(step_input([drafts], (last,) * runner.groups, tables)).result()
            runner.backend.close(0)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_compiled_after_loading(
    name: str, graphs: bool, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run with the CUDA C++ attention; without graphs, Triton's takes its place."""
    if not graphs:
        monkeypatch.setattr(DecodeAttention, "ready", lambda _self, _kernel: False)
    recipe = RECIPES[name]
    config = EngineConfig(
        max_running=ROWS, max_step_tokens=640, kv_cache_bytes=256 << 20, graphs=graphs, speculative_tokens=3
    )  # fmt: skip
    runner = GPURunner(*random_model(recipe), config)
    assert compiled
    assert min(runner.capacity.num_blocks) >= 32 * ROWS
    compiled.clear()
    loaded = set(launcher._functions)
    mixed_steps(runner, recipe)
    other_work(runner, recipe)
    assert compiled == []
    assert set(launcher._functions) == loaded
    runner.close()
