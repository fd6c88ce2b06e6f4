"""The twin that goes an engine's way, and what counts as flipped or near, on cases that can be worked out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_runs import Runner
from fidelity.engine_routes import watch
from fidelity.given_routes import GivenRoutes, Routes, distance, margins, mean_kl, scores_of
from random_models import Recipe, random_model, random_tokens
from realizar.config import EngineConfig
from realizar.models.spec import Experts, ModelSpec, Scoring
from reference_model import Array, ReferenceModel
from reference_tensors import load_tensors

SMALL = Recipe(32, 2, 1, 64, 96, 48, windows=(None, None, None), weights="F32", experts=6, per_token=2)
IDS = random_tokens(SMALL, 20)


class Own(ReferenceModel):
    """A model that notes what its mixtures choose, and by which scores."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, NDArray[np.float32]]) -> None:
        super().__init__(spec, tensors)
        self.chosen: list[NDArray[np.int64]] = []
        self.logits_of_routers: list[NDArray[np.float32]] = []

    def _choose(self, part: Experts, scores: Array) -> NDArray[np.int64]:
        self.chosen.append(super()._choose(part, scores))
        self.logits_of_routers.append(np.log(scores))
        return self.chosen[-1]


def test_a_model_is_at_no_distance_from_itself() -> None:
    spec, checkpoint = random_model(SMALL)
    tensors = load_tensors(spec, checkpoint)
    own = Own(spec, tensors)
    found = distance(spec, tensors, IDS, own.logits(IDS), Routes(own.chosen, own.logits_of_routers))
    assert found.kl < 1e-9
    assert (found.choices, found.flipped, found.flipped_apart) == (2 * len(IDS), 0, 0)


def test_a_flipped_choice_is_counted_and_followed() -> None:
    """Its logits are those of the experts that were given, and no error of the scores explains it."""
    spec, checkpoint = random_model(SMALL)
    tensors = load_tensors(spec, checkpoint)
    own = Own(spec, tensors)
    plain = own.logits(IDS)
    given = [each.copy() for each in own.chosen]
    given[0][7] = [e for e in range(6) if e not in given[0][7]][:2]
    other = GivenRoutes(spec, tensors, given).logits(IDS)
    found = distance(spec, tensors, IDS, other, Routes(given, own.logits_of_routers))
    assert found.kl < 1e-9
    assert found.flipped >= 1
    assert found.flipped_apart == 1
    assert mean_kl(plain, other) > 1e-4, "without the routes the same logits are far away"


def test_margins_of_experts_and_of_groups() -> None:
    spec, _ = random_model(SMALL)
    part = spec.mixtures()[0][1]
    ranks = np.array([[0.5, 0.3, 0.1, 0.05, 0.03, 0.02]])
    assert margins(part, ranks) == pytest.approx([0.2])
    # Groups of sums 0.8, 0.15 and 0.05: the first two are left, 0.1 apart from the third, and experts 0.2.
    grouped = replace(part, num_groups=3, groups_per_token=2)
    assert margins(grouped, ranks) == pytest.approx([0.05])
    assert margins(replace(part, experts_per_token=6), ranks) == np.inf


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores(scoring: Scoring) -> None:
    part = replace(random_model(SMALL)[0].mixtures()[0][1], scoring=scoring)
    logits = np.array([[0.0, np.log(3.0)]], np.float32)
    assert scores_of(part, logits) == pytest.approx(np.array([[0.25, 0.75] if scoring == "softmax" else [0.5, 0.75]]))


@pytest.mark.parametrize("parts", [(), ("sigmoid", "selection_bias", "groups", "shared", "expert_biases")])
def test_what_is_read_between_a_step_s_operations(parts: tuple[str, ...]) -> None:
    """Choices and router logits of the CPU's engine, in chunks: those that the twin has, where nothing is quantised."""
    recipe = replace(SMALL, experts=8, parts=parts)
    spec, checkpoint = random_model(recipe)
    tensors = load_tensors(spec, checkpoint)
    config = EngineConfig(threads=1, max_running=1, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64)
    runner = Runner(spec, checkpoint, config)
    plain = runner.logits(IDS)
    with watch(runner) as routes:
        logits = runner.logits(IDS, (13, 1))
    runner.close()
    assert np.array_equal(logits, plain), "the steps are what they are unobserved"
    found = distance(spec, tensors, IDS, logits, routes.read())
    assert found.kl < 1e-9
    assert (found.choices, found.flipped, found.flipped_apart) == (2 * len(IDS), 0, 0)
    assert found.near == 0


@pytest.mark.parametrize("weights", ["Q8_0", "Q4_K"])
def test_quantised_mixtures_are_near_their_twin(weights: str) -> None:
    """The bound is a few times what llama.cpp's arithmetic gives on such models; every flip is a near one."""
    recipe = Recipe(windows=(None, None, None), weights=weights, feed_forward_size=256, experts=8, per_token=3)
    spec, checkpoint = random_model(recipe)
    ids = random_tokens(recipe, 64)
    config = EngineConfig(threads=1, max_running=1, max_step_tokens=64, kv_cache_bytes=8 << 20, context_length=64)
    runner = Runner(spec, checkpoint, config)
    with watch(runner) as routes:
        logits = runner.logits(ids)
    runner.close()
    found = distance(spec, load_tensors(spec, checkpoint), ids, logits, routes.read())
    assert 0 < found.kl < 5e-4
    assert found.flipped_apart == 0
    assert found.near is not None
    assert found.near < found.choices // 3
