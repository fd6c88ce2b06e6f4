"""Requests by their ids and by embeddings of these, through an engine on the GPU backend."""

from __future__ import annotations

import math
from dataclasses import replace

from backends.cuda.cuda_runs import GPURunner
from engine.core.core_runs import run
from random_models import Recipe, random_model, random_tokens
from realizar.backends.devices import ChosenDevice
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.engine.core.engine_core import EngineCore
from realizar.models.spec import ModelSpec
from realizar.outputs import TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from reference_tensors import looked_up
from resolving import new_core
from step_inputs import with_given

Text = tuple[list[int], list[TokenLogprobs], int]
RUNS = (((0, 1),), ((0, 16),), ((3, 17), (19, 30)), ((20, 21), (36, 37)))  # of prompts of so many tokens:
LENGTHS = (1, 17, 30, 37)


def given_model(recipe: Recipe, scale: float) -> tuple[ModelSpec, Checkpoint]:
    spec, checkpoint = random_model(recipe)
    return replace(spec, embedding_scale=scale), checkpoint


def given_core(runner: GPURunner) -> EngineCore:
    """An engine whose steps do not depend on how long steps take."""
    device = ChosenDevice("cuda")
    return new_core(
        runner.backend, runner.spec, runner.config, steps_in_flight=2, device=device, policy=Policy(stretch=math.inf)
    )


def requests_of(runner: GPURunner, checkpoint: Checkpoint | None, times: int, count: int) -> list[Request]:
    """Prompts of several lengths.

    Args:
        checkpoint: to look embeddings up, in place of ids; None leaves the ids.
        times: each prompt is so many times as long. count: tokens to generate.
    """
    made = []
    for index, (length, runs) in enumerate(zip(LENGTHS, RUNS, strict=True)):
        ids = tuple(random_tokens(Recipe(vocab_size=runner.spec.vocab_size), length * times, index))
        sampling = SamplingParams(temperature=float(index % 2), seed=index, logprobs=2)
        request = Request(f"r{index}", ids, sampling, count, prompt_marks=(16 * times,))
        if checkpoint is not None:
            placeholder = None if runner.spec.layer_inputs is not None else 5
            longer = [(start * times, end * times) for start, end in runs]
            request = with_given(request, looked_up(runner.spec, checkpoint, ids), longer, placeholder)
        made.append(request)
    return made


def texts_of(core: EngineCore, requests: list[Request]) -> dict[str, Text]:
    """Tokens, log-probabilities, and prompt tokens that were found: of requests, and of the same ones after them."""
    found: dict[str, Text] = {}
    for time in ("first", "again"):
        for request in requests:
            core.add(replace(request, request_id=f"{request.request_id} {time}"))
        for name, outputs in run(core).items():
            assert not any(output.error for output in outputs), outputs
            tokens = [token_id for output in outputs for token_id in output.token_ids]
            logprobs = [each for output in outputs for each in output.logprobs]
            found[name] = tokens, logprobs, outputs[0].num_cached_tokens
    return found
