"""Texts of an engine on a GPU, or its kernels interpreted, whose drafts come from a model beside it or nobody."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from backend_runs import LOGITS_AT_ONCE
from backends.block_reads import AssistantReads, BlockReads, Reads, StepReads
from backends.cuda.cuda_runs import new_backend
from engine.core.core_runs import run, tokens
from random_models import Recipe, random_model
from realizar.backends.base import NO_OTHERS, ForwardInput, ModelSource
from realizar.backends.cuda.runner import CUDABackend
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.models.parts import AssistantInputs, BlockInputs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from realizar.scheduler.scheduler import SchedulerCounts
from resolving import resolved


@dataclass(frozen=True)
class Run:
    """Prompts that a model goes on from by so many tokens each, every third with a temperature of 0.8."""

    recipe: Recipe
    config: EngineConfig
    prompts: list[list[int]]
    num_tokens: int
    drafter: ModelSource | None = None


@dataclass
class Found:
    """Texts, what the scheduler counted, and where asked for the relative errors of a block's logits."""

    texts: list[list[int]]
    counts: SchedulerCounts
    errors: list[float] = field(default_factory=list)


def texts_of(of: Run, monkeypatch: pytest.MonkeyPatch | None = None) -> Found:
    """Run to the end; with `monkeypatch` the drafter, a next-token block, is held to its twin."""
    spec, checkpoint = random_model(of.recipe)
    config, backend = resolved(spec, checkpoint, of.config, "cuda"), new_backend()
    backend.load(spec, checkpoint, config, NO_OTHERS if of.drafter is None else {"drafter": of.drafter})
    reads = None if monkeypatch is None else _reads(backend, monkeypatch)
    core = EngineCore(backend, spec, config, policy=Policy(measures_drafts=False))
    for index, prompt in enumerate(of.prompts):
        sampling = SamplingParams(temperature=0 if (index + 1) % 3 else 0.8, seed=index)
        core.add(Request(str(index), tuple(prompt), sampling, of.num_tokens))
    outputs = run(core)
    core.close()
    found = Found([tokens(outputs[str(index)]) for index in range(len(of.prompts))], core.scheduler.counts)
    if reads is not None and of.drafter is not None:
        texts = [[*prompt, *text] for prompt, text in zip(of.prompts, found.texts, strict=True)]
        for index, text in enumerate(texts):
            if isinstance(reads, Reads):
                found.errors += reads.errors(of.recipe, of.drafter, text, len(of.prompts[index]))
            else:
                made = reads.blocks if isinstance(reads, BlockReads) else reads.chains
                sequences = sorted({each[0] for each in made})
                found.errors += reads.errors(of.recipe, of.drafter, text, sequences[index])
    return found


def _reads(backend: CUDABackend, monkeypatch: pytest.MonkeyPatch) -> Reads | BlockReads | AssistantReads:
    assert backend._drafter is not None
    drafter = backend._drafter.backend
    assert isinstance(drafter, CUDABackend)

    space = drafter.model.space

    def read(step: ForwardInput) -> StepReads:
        tokens, num_sampled, sampled = len(step.positions), int(step.columns.samples.sum()), space.sampled.clone()
        selected = space.arrays["selected"][:num_sampled].tolist()
        parts = [range(first, min(first + LOGITS_AT_ONCE, tokens)) for first in range(0, tokens, LOGITS_AT_ONCE)]
        logits = np.concatenate([drafter.logits(list(part)).cpu().numpy().copy() for part in parts])
        drafter.states(selected)  # the next draft follows from them, and from what was sampled
        space.sampled.copy_(sampled)
        ids, positions = (space.arrays[name][:tokens].cpu().numpy() for name in ("ids", "positions"))
        return StepReads(ids, positions, logits)

    kinds = {BlockInputs: BlockReads, AssistantInputs: AssistantReads}
    return kinds.get(type(drafter.model.spec.next_token), Reads)(drafter, read, monkeypatch)
