"""A draft model beside another on a GPU, or its kernels interpreted: the same tokens in fewer steps."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import new_backend
from backends.draft_models import first_layers, itself, spoiled
from engine.core.core_runs import run, tokens
from random_models import Recipe, random_model, random_tokens
from realizar.backends.base import NO_OTHERS, ModelSource
from realizar.backends.cuda.plan import plan_memory
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from resolving import resolved

RECIPE = Recipe(
    weights="F32", hidden_size=64, feed_forward_size=96, head_size=32, num_heads=2, num_kv_heads=1, vocab_size=48,
    windows=(None, 40),
)  # fmt: skip
CONFIG = EngineConfig(
    threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, speculative_tokens=2,
    prompt_lookup_min=100, prompt_lookup_max=100, graphs=False,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0)


def texts_of(drafter: ModelSource | None) -> tuple[list[list[int]], EngineCore]:
    """Two requests at once; and the engine, closed."""
    spec, checkpoint = random_model(RECIPE)
    config, backend = resolved(spec, checkpoint, CONFIG, "cuda"), new_backend()
    backend.load(spec, checkpoint, config, NO_OTHERS if drafter is None else {"drafter": drafter})
    core = EngineCore(backend, spec, config, policy=Policy(measures_drafts=False))
    for index, length in enumerate((9, 40)):
        core.add(Request(str(index), tuple(random_tokens(RECIPE, length, index)), GREEDY, 9))
    found = run(core)
    core.close()
    return [tokens(found[name]) for name in ("0", "1")], core


def test_texts_are_the_same_and_a_model_foresees_itself() -> None:
    expected, _ = texts_of(None)
    found, core = texts_of(itself(RECIPE))
    assert found == expected
    assert core.scheduler.counts.draft_tokens == core.scheduler.counts.accepted_tokens >= 8
    found, core = texts_of(first_layers(RECIPE, 1))
    assert found == expected
    assert core.scheduler.counts.draft_tokens > core.scheduler.counts.accepted_tokens


def test_memory_of_both_is_planned_together() -> None:
    spec, checkpoint = random_model(RECIPE)
    backend, alone, config = new_backend(), new_backend(), resolved(spec, checkpoint, CONFIG, "cuda")
    backend.load(spec, checkpoint, config, {"drafter": first_layers(RECIPE, 1)})
    alone.load(spec, checkpoint, config)
    joint, single = (each.model.config for each in (backend, alone))
    both, one = backend.capacity(), alone.capacity()
    assert both.num_blocks < one.num_blocks
    assert 0.99 * one.kv_cache_bytes < both.kv_cache_bytes <= one.kv_cache_bytes
    assert both.num_drafts == 2
    plans = [plan_memory(spec, checkpoint, each, 1 << 30) for each in (joint, single)]
    assert plans[0].needed_bytes - plans[1].needed_bytes == joint.beside.fixed_bytes > 0
    assert plans[0].contexts[-1].request_bytes > plans[1].contexts[-1].request_bytes
    for each in (backend, alone):
        each.shutdown()


def test_what_does_not_run_is_named_and_leaves_nothing() -> None:
    spec, checkpoint = random_model(RECIPE)
    config, drafter = resolved(spec, checkpoint, CONFIG, "cuda"), itself(RECIPE)
    with pytest.raises(UnsupportedModelError, match="no backend runs a model as 'tower'"):
        new_backend().load(spec, checkpoint, config, {"tower": drafter})
    backend = new_backend()
    with pytest.raises(CheckpointError, match="not finite"):
        backend.load(spec, checkpoint, config, {"drafter": spoiled(RECIPE)})
    with pytest.raises(RuntimeError, match="no model is loaded"):
        backend.capacity()
