"""Mixtures on the GPU backend, and how far their logits are from a twin that goes through the experts they chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.cuda.cuda_runs import GPURunner
from fidelity.engine_routes import watch
from fidelity.given_routes import Choices, GivenRoutes
from random_models import Recipe, random_model, random_tokens
from realizar.config import EngineConfig
from realizar.models.spec import ModelSpec
from reference_model import Array
from reference_tensors import load_tensors


@dataclass(frozen=True)
class RoutedRun:
    """What one prompt gave.

    Attributes:
        logits: [tokens, vocab_size]. chosen: of each mixture, experts [tokens, experts per token].
    """

    token_ids: Sequence[int]
    logits: NDArray[np.float32]
    chosen: list[Choices]

    def errors(self, spec: ModelSpec, tensors: dict[str, Array]) -> Array:
        """Of each token, relative to the twin's logits."""
        expected = GivenRoutes(spec, tensors, self.chosen).logits(self.token_ids)
        found: Array = np.linalg.norm(self.logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        return found


def run_prompts(
    recipe: Recipe, config: EngineConfig, lengths: Sequence[int], chunks: Sequence[int]
) -> tuple[ModelSpec, dict[str, Array], list[RoutedRun]]:
    """Prompts side by side, in chunks of sizes drawn from `chunks`, launch by launch.

    Args:
        config: without graphs, as choices are read between launches.
    """
    spec, checkpoint = random_model(recipe)
    runner, rng, owners = GPURunner(spec, checkpoint, config), np.random.default_rng(5), list[int]()
    prompts = [random_tokens(recipe, length, seed) for seed, length in enumerate(lengths)]
    blocks = -(-max(lengths) // config.block_size)
    requests = [runner.request(row, ids, rng, first=blocks * row) for row, ids in enumerate(prompts)]
    with watch(runner) as notes:
        while left := [request for request in requests if request.computed < len(request.token_ids)]:
            shuffled = [left[i] for i in rng.permutation(len(left))]
            parts = [(each, int(min(len(each.token_ids) - each.computed, rng.choice(chunks)))) for each in shuffled]
            runner.step(parts)
            owners += [request.row for request, count in parts for _ in range(count)]
    runner.close()
    chosen = notes.read().chosen
    runs = [
        RoutedRun(each.token_ids, each.values(), [mixture[np.equal(owners, each.row)] for mixture in chosen])
        for each in requests
    ]
    return spec, load_tensors(spec, checkpoint), runs
