"""Requests by their ids and by embeddings of these, through an engine on the GPU backend."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from backend_runs import BackendRunner
from backends.cuda.cuda_runs import GPURunner
from engine.core.core_runs import run
from random_models import Recipe, random_model, random_tokens
from realizar.backends.devices import ChosenDevice
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import Device
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.models.spec import Attention, ModelSpec
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


def seeing_model(recipe: Recipe, deepstack: int, *, whole: bool = False) -> tuple[ModelSpec, Checkpoint]:
    """A model whose rope has three axes in turn, and features of images added after so many layers; or whose first
    layers see images `whole`.
    """
    spec, checkpoint = random_model(recipe)
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention)
        assert layer.mixer.rope is not None
        axes = tuple(place % 3 for place in range(layer.mixer.rope.size // 2))
        mixer = replace(layer.mixer, rope=replace(layer.mixer.rope, axes=axes))
        layers.append(replace(layer, mixer=replace(mixer, sees_images_whole=whole and len(layers) < 2)))
    return replace(spec, layers=tuple(layers), deepstack=deepstack), checkpoint


def seeing_requests(spec: ModelSpec, times: int, count: int) -> list[Request]:
    """A prompt of text, and two with images of 3 and of 2 * `times` rows of `times` features, and text around them.

    They are seen whole where the model sees them so.
    """
    whole = any(one.sees_images_whole for _, one in spec.all_attentions())
    rng, size, made = np.random.default_rng(3), spec.hidden_size, []
    for index, images in enumerate(((), ((4, 3),), ((1, 3), (2 + 3 * times, 2 * times)))):
        length = 9 + sum(rows * times for _, rows in images)
        ids = tuple(random_tokens(Recipe(vocab_size=spec.vocab_size), length, index))
        places, runs, shift = np.repeat(np.arange(length, dtype=np.int32)[None], 3, axis=0), [], 0
        for first, rows in images:
            end = first + rows * times
            places[:, first:] = np.arange(first, length) - shift
            places[:, first:end] = np.concatenate([[np.zeros(end - first)], np.indices((rows, times)).reshape(2, -1)])
            places[:, first:end] += first - shift
            shift += end - first - max(rows, times)
            places[:, end:] = np.arange(end, length) - shift
            run = prompt_embeddings(rng.standard_normal((end - first, size * (1 + spec.deepstack))), first)
            runs.append(replace(run, is_seen_whole=whole))
        given = {"embeddings": tuple(runs), "rope_positions": places.tobytes()} if images else {}
        made.append(Request(f"r{index}", ids, SamplingParams(temperature=0.0, logprobs=2), count, **given))
    return made


def given_core(runner: BackendRunner[Any], kind: Device = "cuda") -> EngineCore:
    """An engine whose steps do not depend on how long steps take."""
    device = ChosenDevice(kind)
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
