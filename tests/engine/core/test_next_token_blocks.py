"""A model's next-token block on the CPU: its logits are those of the twin in numpy, whatever computed what it reads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.draft_models import next_token_block
from engine.core.core_runs import run, tokens
from random_models import Recipe, random_model, random_tokens
from realizar.backends.base import ForwardInput, ModelSource, Step
from realizar.backends.cpu.runner import CPUBackend
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import UnsupportedModelError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from reference_model import ReferenceModel
from reference_tensors import load_tensors
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


class Reads:
    """The logits that a block computed last after each token of a sequence: id and logits by position."""

    def __init__(self, backend: CPUBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        assert backend._drafter is not None
        drafter = backend._drafter.backend
        assert isinstance(drafter, CPUBackend)
        self.sequences: dict[int, dict[int, tuple[int, NDArray[np.float32]]]] = defaultdict(dict)
        honest = drafter.submit

        def submit(step: ForwardInput) -> Step:
            running, most = honest(step), drafter.model.workspace.max_selected
            owners = np.repeat(step.columns.sequence_ids, step.columns.num_tokens)
            for first in range(0, len(owners), most):
                some = np.arange(first, min(first + most, len(owners)))
                for place, logits in zip(some, drafter.logits(some), strict=True):
                    read = int(step.columns.token_ids[place]), logits.copy()
                    self.sequences[int(owners[place])][int(step.positions[place])] = read
            return running

        monkeypatch.setattr(drafter, "submit", submit)

    def errors(self, recipe: Recipe, drafter: ModelSource, text: list[int], num_prompt_tokens: int) -> list[float]:
        """Relative errors after the true tokens of the sequence that begins with a prompt, but the last one's."""
        expected, found = expected_logits(recipe, drafter, text), []
        for reads in self.sequences.values():
            if all(token_id == text[at] for at, (token_id, _) in reads.items() if at < num_prompt_tokens):
                for at, (token_id, logits) in reads.items():
                    if at < len(text) - 1 and token_id == text[at]:
                        found.append(float(np.linalg.norm(logits - expected[at]) / np.linalg.norm(expected[at])))
        return found


def expected_logits(recipe: Recipe, drafter: ModelSource, ids: list[int]) -> NDArray[np.float32]:
    """The block's logits after each token of a text, by the numpy twins of both."""
    spec, checkpoint = random_model(recipe)
    states = ReferenceModel(spec, load_tensors(spec, checkpoint)).hidden(ids)
    before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])
    twin = ReferenceModel(drafter.spec, load_tensors(drafter.spec, drafter.checkpoint))
    return np.asarray(twin.logits(ids, given=before))


def core_with(drafter: ModelSource, recipe: Recipe = RECIPE, **fields: Any) -> tuple[EngineCore, CPUBackend]:
    spec, checkpoint = random_model(recipe)
    config = resolved(spec, checkpoint, replace(CONFIG, **fields))
    backend = CPUBackend()
    backend.load(spec, checkpoint, config, {"drafter": drafter})
    return EngineCore(backend, spec, config, policy=Policy(measures_drafts=False)), backend


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
        reads = Reads(backend, monkeypatch)
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
    reads = Reads(backend, monkeypatch)
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
