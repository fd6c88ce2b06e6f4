"""A draft model beside a real one on the CPU: no token changes, and its cache follows the other's, whatever happens.

A model that drafts for itself is always right, as long as its cache holds what the main model's does: so all drafts
being accepted says that chunks, refused drafts, shared prefixes and preemption leave it whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.draft_models import another, first_layers, itself, spoiled
from engine.core.core_runs import run, tokens
from random_models import Recipe, random_model, random_tokens
from realizar.backends.base import NO_OTHERS, ModelSource
from realizar.backends.cpu.runner import CPUBackend
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from reference_tensors import looked_up
from resolving import resolved
from step_inputs import with_given

RECIPE = Recipe(
    hidden_size=64, feed_forward_size=96, head_size=32, num_heads=2, num_kv_heads=1, vocab_size=96, windows=(None, 40),
    weights="F32",
)  # fmt: skip
CONFIG = EngineConfig(
    threads=1, max_running=4, max_step_tokens=64, context_length=256, kv_cache_bytes=16 << 20, speculative_tokens=3,
    prompt_lookup_min=100, prompt_lookup_max=100,
)  # fmt: skip
DRAFTERS = {
    "itself": itself(RECIPE), "first layer": first_layers(RECIPE, 1), "another": another(RECIPE),
    "fewer ids": another(replace(RECIPE, vocab_size=95)), "more ids": another(replace(RECIPE, vocab_size=97)),
}  # fmt: skip
SAMPLINGS = (SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=3, n=2), SamplingParams(temperature=0))


def core_with(drafter: ModelSource | None, recipe: Recipe = RECIPE, **fields: Any) -> EngineCore:
    spec, checkpoint = random_model(recipe)
    config = resolved(spec, checkpoint, replace(CONFIG, **fields))
    backend = CPUBackend()
    backend.load(spec, checkpoint, config, NO_OTHERS if drafter is None else {"drafter": drafter})
    return EngineCore(backend, spec, config, policy=Policy(measures_drafts=False))


def requests(count: int = 40) -> list[Request]:
    """A short prompt, one of several chunks, and one that begins as that does."""
    long = tuple(random_tokens(RECIPE, 90, 2))
    prompts = tuple(random_tokens(RECIPE, 9, 1)), long, long[:70]
    return [
        Request(str(index), prompt, sampling, count)
        for index, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True))
    ]


def texts_of(core: EngineCore, asked: list[Request]) -> dict[tuple[str, int], list[int]]:
    for request in asked:
        core.add(request)
    found = run(core)
    return {
        (request.request_id, choice): tokens([each for each in found[request.request_id] if each.choice == choice])
        for request in asked
        for choice in range(request.sampling.n)
    }


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], list[int]]:
    core = core_with(None, speculative_tokens=0)
    found = texts_of(core, requests())
    core.close()
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_what_they_are_without_drafts(name: str, expected: dict[tuple[str, int], list[int]]) -> None:
    core = core_with(DRAFTERS[name])
    assert texts_of(core, requests()) == expected
    counts = core.scheduler.counts
    assert counts.draft_tokens > 100
    assert counts.accepted_tokens >= {"itself": 50, "first layer": 5}.get(name, 0)
    core.close()


@pytest.mark.parametrize("fields", [{}, {"kv_cache_bytes": 3 << 17, "max_step_tokens": 24}], ids=["roomy", "short"])
def test_a_model_foresees_itself_in_chunks_from_prefixes_and_after_preemption(fields: dict[str, int]) -> None:
    core = core_with(DRAFTERS["itself"], **fields)
    greedy = [replace(each, sampling=SamplingParams(temperature=0)) for each in requests(100)]
    first = texts_of(core, greedy)
    again = texts_of(core, [replace(each, request_id=f"{each.request_id} again") for each in greedy])
    assert list(first.values()) == list(again.values())
    counts = core.scheduler.counts
    assert counts.draft_tokens == counts.accepted_tokens > 300
    assert counts.prefix_cache_hits > 0
    assert (counts.num_preemptions > 0) is bool(fields)
    core.close()


def test_a_model_with_states_has_a_drafter_without() -> None:
    recipe = replace(RECIPE, windows=(None, None), recurrent=("delta",), value_size=16)
    drafter = ModelSource(*random_model(replace(RECIPE, windows=(None,))))
    plain, drafted = core_with(None, recipe, speculative_tokens=0), core_with(drafter, recipe)
    assert texts_of(drafted, requests()) == texts_of(plain, requests())
    assert drafted.scheduler.counts.draft_tokens > 100
    for core in (plain, drafted):
        core.close()


def test_a_drafter_reads_the_ids_under_given_embeddings(expected: dict[tuple[str, int], list[int]]) -> None:
    """With ids that say nothing its drafts are poorer, and the text is the same."""
    spec, checkpoint = random_model(RECIPE)
    given = [with_given(each, looked_up(spec, checkpoint, each.prompt_token_ids), ((1, 6),), 5) for each in requests()]
    core = core_with(DRAFTERS["itself"])
    assert texts_of(core, given) == expected
    assert core.scheduler.counts.draft_tokens > core.scheduler.counts.accepted_tokens
    core.close()


def test_memory_of_both_is_planned_together_and_freed_together(caplog: pytest.LogCaptureFixture) -> None:
    """A block has room for both models' layers, and the cache as many blocks of each; one team of threads runs both."""
    caplog.set_level("INFO")
    core, alone = core_with(DRAFTERS["first layer"]), core_with(None)
    assert "the KV cache" not in caplog.text
    backend, plain = core._backend, alone._backend
    assert isinstance(backend, CPUBackend)
    assert isinstance(plain, CPUBackend)
    assert backend._drafter is not None
    drafter = backend._drafter.backend
    assert isinstance(drafter, CPUBackend)
    assert drafter.model.team is backend.model.team
    assert drafter.model.kv.num_blocks == backend.model.kv.num_blocks[:1]
    both, one = backend.capacity(), plain.capacity()
    assert both.num_blocks < one.num_blocks
    assert both.kv_cache_bytes == backend.model.kv.size_bytes + drafter.model.kv.size_bytes <= CONFIG.kv_cache_bytes
    assert both.weight_bytes == one.weight_bytes + drafter.capacity().weight_bytes
    assert (both.num_drafts, one.num_drafts) == (3, 0)
    for each in (core, alone):
        each.close()
    with pytest.raises(RuntimeError, match="no model is loaded"):
        drafter.capacity()


def test_a_drafter_that_fails_is_asked_no_more(
    monkeypatch: pytest.MonkeyPatch, expected: dict[tuple[str, int], list[int]]
) -> None:
    core = core_with(DRAFTERS["itself"])
    backend = core._backend
    assert isinstance(backend, CPUBackend)
    assert backend._drafter is not None
    drafter, calls = backend._drafter.backend, 0
    honest = drafter.submit

    def submit(step: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise ZeroDivisionError("a bug")
        return honest(step)

    monkeypatch.setattr(drafter, "submit", submit)
    assert texts_of(core, requests()) == expected
    assert calls == 6
    core.close()


@pytest.mark.parametrize(
    ("role", "fields", "message"),
    [
        ("tower", {}, "no backend runs a model as 'tower': the one role is 'drafter'"),
        ("drafter", {"vocab_size": 64}, "has 64 ids, and the model's 96: they must be the same, but for padding"),
        (
            "drafter",
            {"context_length": 128},
            "reads 128 tokens, fewer than the 256 of the context: lower context_length",
        ),
        ("drafter", {"windows": (20,)}, "has layers that keep a window of 20 tokens, and the model has none"),
        ("drafter", {"recurrent": ("convolution",)}, "a drafter whose layers have states does not run"),
    ],
)
def test_models_that_can_not_draft_are_refused_by_name(role: str, fields: dict[str, Any], message: str) -> None:
    spec, checkpoint = random_model(RECIPE)
    backend, other = CPUBackend(), ModelSource(*random_model(replace(RECIPE, **fields)))
    with pytest.raises(UnsupportedModelError, match=message):
        backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG), {role: other})
    backend.shutdown()


def test_a_drafter_without_room_for_drafts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a drafter needs speculative_tokens of at least 1, not 0"):
        core_with(DRAFTERS["itself"], speculative_tokens=0)


def test_a_drafter_that_can_not_be_loaded_takes_the_model_with_it() -> None:
    spec, checkpoint = random_model(RECIPE)
    backend = CPUBackend()
    with pytest.raises(CheckpointError, match="not finite"):
        backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG), {"drafter": spoiled(RECIPE)})
    with pytest.raises(RuntimeError, match="no model is loaded"):
        backend.capacity()
