"""Ranks of a model on the CPU: each computes its part, and what they add up is the whole model's."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.ranks.cpu_ranks import Ranks
from cpu_runs import Runner
from models.ranks.test_shard import RECIPES
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.rank_memory import RankMemory
from realizar.checkpoint.ggml_types import GGMLType
from realizar.config import EngineConfig
from realizar.errors import DeviceLostError, UnsupportedModelError
from realizar.models.shard import shard
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from resolving import resolved
from wider import wider

_CONFIG = EngineConfig(threads=1, max_running=1, context_length=512, max_step_tokens=64)
_PACKED = Recipe(
    windows=(None, None, 40), recurrent=("delta",), key_heads=2, value_heads=4, feed_forward_size=512,
    parts=("tiled", "biases", "sinks"), weights="Q8_0",
)  # fmt: skip
_SMALL = Recipe(
    64, 4, 2, windows=(None,), experts=4, hidden_size=256, feed_forward_size=32, parts=("shared", "shared_gate"),
    weights="Q8_0",
)  # fmt: skip
_CASES = [  # key heads of 16, as a rank's fill whole vectors here
    *(
        (name, replace(recipe, key_size=16, input_size=recipe.input_size and 32), counts[0])
        for name, (recipe, counts) in RECIPES.items()
    ),
    ("packed", _PACKED, 2),
    (
        "packed experts",
        replace(_PACKED, experts=4, parts=(*_PACKED.parts, "shared", "shared_gate", "expert_biases")),
        2,
    ),
    ("fewer blocks than ranks", _SMALL, 2),
]


def _error(found: NDArray[np.float32], expected: NDArray[np.float64]) -> float:
    return float((np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).mean())


_TYPES = [each.name for each in GGMLType if each.name not in ("F32", "Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")]
# Floats, and blocks of every size, with scales for parts of them and without: where a row is cut depends on that.
_CUT = ("F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q1_0", "Q4_K", "Q6_K", "IQ2_XXS", "TQ2_0", "MXFP4", "NVFP4")


@pytest.mark.parametrize("kind", wider(_TYPES, *_CUT))
def test_every_type_of_weights_is_cut(kind: str) -> None:
    """Dense and experts, whose down projections are cut within rows: by whole blocks, of up to 256."""
    recipe = Recipe(
        64, 8, 2, windows=(None,), hidden_size=512, feed_forward_size=512, experts=2, weights=kind, parts=("shared",)
    )
    (spec, checkpoint), ids = random_model(recipe), random_tokens(recipe, 5)
    alone = Runner(spec, checkpoint, _CONFIG)
    expected = alone.logits(ids)
    alone.close()
    ranks = Ranks(spec, checkpoint, _CONFIG, 2)
    try:
        assert _error(ranks.logits(ids), expected.astype(np.float64)) < 0.02
    finally:
        ranks.close()


def test_parts_of_rows_that_are_no_whole_blocks_are_refused() -> None:
    recipe = Recipe(64, 4, 2, windows=(None,), hidden_size=256, feed_forward_size=256, weights="Q4_K")
    spec, checkpoint = random_model(recipe)
    with pytest.raises(UnsupportedModelError, match="128"):
        Ranks(spec, checkpoint, _CONFIG, 2)


@pytest.mark.parametrize(("recipe", "count"), [case[1:] for case in _CASES], ids=[case[0] for case in _CASES])
def test_the_sums_of_ranks_are_the_whole(recipe: Recipe, count: int) -> None:
    """In steps of many tokens and of one, cut in two ways; packed weights with the error that the whole has too."""
    (spec, checkpoint), ids = random_model(recipe), random_tokens(recipe, 24)
    expected = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
    most = 2e-5
    if recipe.weights != "F32":
        alone = Runner(spec, checkpoint, _CONFIG)
        most = 1.3 * _error(alone.logits(ids), expected)
        alone.close()
    ranks = Ranks(spec, checkpoint, _CONFIG, count)
    try:
        found = ranks.logits(ids, (20, 3, 1))
        assert _error(found, expected) < most
        np.testing.assert_array_equal(ranks.logits(ids, (7, 17)), found)
    finally:
        ranks.close()


def test_threads_of_a_rank_share_its_exchanges() -> None:
    (spec, checkpoint), ids = random_model(_PACKED), random_tokens(_PACKED, 24)
    found = []
    for threads in (1, 3):
        ranks = Ranks(spec, checkpoint, replace(_CONFIG, threads=threads), 2)
        found.append(ranks.logits(ids, (20, 3, 1)))
        ranks.close()
    np.testing.assert_array_equal(*found)


def test_nobody_waits_for_a_rank_that_is_gone() -> None:
    """Which it says itself; the others' steps are lost."""
    spec, checkpoint = random_model(_PACKED)
    ranks = Ranks(spec, checkpoint, _CONFIG, 2)
    try:
        timer = threading.Timer(0.2, ranks.memory.break_off)
        timer.start()
        with pytest.raises(DeviceLostError, match="a rank of the model is gone"):
            ranks.ranks[0].logits([1, 2, 3])
    finally:
        ranks.close()


def test_a_part_without_others_and_a_whole_with_some_are_refused() -> None:
    spec, checkpoint = random_model(_PACKED)
    config = resolved(spec, checkpoint, _CONFIG, "cpu")
    with pytest.raises(ValueError, match="that 2 share is loaded with None"):
        CPUBackend().load(shard(spec, 1, 2), checkpoint, config)
    memory = RankMemory(2, 64)
    with pytest.raises(ValueError, match="that 1 share is loaded with"):
        CPUBackend(ranks=memory).load(spec, checkpoint, config)
    memory.close()
