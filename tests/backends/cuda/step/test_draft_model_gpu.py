"""A draft model beside another on a GPU, with graphs: the same tokens in fewer steps, whatever runs beside."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.draft_models import first_layers, itself  # noqa: E402
from engine.core.core_runs import run, tokens  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.base import NO_OTHERS, ModelSource  # noqa: E402
from realizar.backends.cuda.device import open_device  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from realizar.scheduler.pace import Policy  # noqa: E402
from resolving import resolved  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPE = Recipe(128, 8, 2, hidden_size=1024, feed_forward_size=2816, weights="Q8_0", windows=(None, 40, None))
CONFIG = EngineConfig(
    max_running=16, max_step_tokens=256, kv_cache_bytes=64 << 20, context_length=512, speculative_tokens=4,
    prompt_lookup_min=100, prompt_lookup_max=100, batch_invariant=True,
)  # fmt: skip


def texts_of(drafter: ModelSource | None) -> tuple[dict[str, list[int]], EngineCore]:
    """Ten requests of many lengths, some of which are sampled; and the engine, closed."""
    spec, checkpoint = random_model(RECIPE)
    config, backend = resolved(spec, checkpoint, CONFIG, "cuda"), CUDABackend(device=open_device())
    backend.load(spec, checkpoint, config, NO_OTHERS if drafter is None else {"drafter": drafter})
    core = EngineCore(backend, spec, config, policy=Policy(measures_drafts=False))
    for index in range(10):
        sampling = SamplingParams(temperature=0 if index % 3 else 0.8, seed=index)
        core.add(Request(str(index), tuple(random_tokens(RECIPE, 7 + 37 * index, index)), sampling, 60))
    found = run(core)
    core.close()
    return {name: tokens(outputs) for name, outputs in found.items()}, core


def test_texts_are_the_same_with_any_drafter() -> None:
    """One order of sums makes them equal to the last token, and a model's own drafts of greedy rows right."""
    expected, _ = texts_of(None)
    accepted = {}
    for name, drafter in (("itself", itself(RECIPE)), ("first layer", first_layers(RECIPE, 1))):
        found, core = texts_of(drafter)
        assert found == expected
        accepted[name] = core.scheduler.counts.accepted_tokens
    assert accepted["itself"] >= 6 * 47  # of six greedy rows all drafts, four of each five tokens
    assert accepted["itself"] > accepted["first layer"] > 0
