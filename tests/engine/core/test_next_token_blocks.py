"""A model's next-token block on the CPU: its logits are those of the twin in numpy, whatever computed what it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.block_reads import Reads
from backends.draft_models import next_token_block
from engine.core.core_runs import run, tokens
from random_models import Recipe, random_model, random_tokens
from realizar.backends.base import ModelSource
from realizar.backends.cpu.runner import CPUBackend
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import UnsupportedModelError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from resolving import resolved

RECIPE = Recipe(
    hidden_size=64, feed_forward_size=96, head_size=32, num_heads=2, num_kv_heads=1, vocab_size=96, windows=(None,),
    weights="F32",
)  # fmt: skip
CONFIG = EngineConfig(
    threads=2, max_running=4, max_step_tokens=64, context_length=704, kv_cache_bytes=16 << 20, speculative_tokens=3,
    prompt_lookup_min=100, prompt_lookup_max=100,
)  # fmt: skip
DRAFTER = next_token_block(RECIPE, of_state=0.5)


def core_with(drafter: ModelSource, recipe: Recipe = RECIPE, **fields: Any) -> tuple[EngineCore, CPUBackend]:
    spec, checkpoint = random_model(recipe)
    config = resolved(spec, checkpoint, replace(CONFIG, **fields))
    backend = CPUBackend()
    backend.load(spec, checkpoint, config, {"drafter": drafter})
    return EngineCore(backend, spec, config, policy=Policy(measures_drafts=False)), backend


def reads_of(backend: CPUBackend, monkeypatch: pytest.MonkeyPatch) -> Reads:
    assert backend._drafter is not None
    drafter = backend._drafter.backend
    assert isinstance(drafter, CPUBackend)
    return Reads(drafter, drafter.logits, monkeypatch)


def answered(core: EngineCore, prompts: dict[str, tuple[int, ...]], count: int) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        core.add(Request(name, prompt, SamplingParams(temperature=0), count))
    found = run(core)
    return {name: [*prompt, *tokens(found[name])] for name, prompt in prompts.items()}


@pytest.mark.parametrize("length", [8, 600])
def test_logits_are_those_of_the_twin_in_chunks_and_after_a_prefix(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(random_tokens(RECIPE, length, 3))
    core, backend = core_with(DRAFTER)
    for name in ("first", "again"):  # the second one begins with the blocks of the first
        reads = reads_of(backend, monkeypatch)
        text = answered(core, {name: prompt}, 20)[name]
        errors = reads.errors(RECIPE, DRAFTER, text, length)
        assert len(errors) >= (length if name == "first" else 0) + 18
        assert max(errors) <= 1e-4
    counts = core.scheduler.counts
    assert (counts.prefix_cache_hits > 0) is (length == 600)
    assert counts.draft_tokens > counts.accepted_tokens > 0
    core.close()


def test_logits_are_those_of_the_twin_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {str(length): tuple(random_tokens(RECIPE, length, length)) for length in (90, 120, 40)}
    core, backend = core_with(DRAFTER, kv_cache_bytes=180_000, max_step_tokens=24, context_length=256)
    reads = reads_of(backend, monkeypatch)
    texts = answered(core, prompts, 60)
    assert core.scheduler.counts.num_preemptions > 0
    for name, text in texts.items():
        errors = reads.errors(RECIPE, DRAFTER, text, len(prompts[name]))
        assert len(errors) >= len(text) - 2
        assert max(errors) <= 1e-4
    core.close()


def test_a_block_of_another_width_is_refused() -> None:
    spec, checkpoint = random_model(RECIPE)
    backend, other = CPUBackend(), next_token_block(replace(RECIPE, hidden_size=96))
    with pytest.raises(UnsupportedModelError, match="reads hidden states of 96 numbers, and the model's 64"):
        backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG), {"drafter": other})
