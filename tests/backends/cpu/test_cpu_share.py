"""A rank's part of a model on the CPU: its own sizes from its spec, its weights cut out of the file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.runner import CPUBackend
from realizar.config import EngineConfig
from realizar.errors import UnsupportedModelError
from realizar.models.parts import Share
from realizar.models.shard import shard
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from resolving import resolved

_CONFIG = EngineConfig(threads=1, max_running=1, context_length=512)
_RECIPE = Recipe(
    windows=(None, None, 40), recurrent=("delta",), key_heads=2, value_heads=4, experts=4, feed_forward_size=256,
    parts=("tiled", "biases", "sinks", "shared", "shared_gate", "expert_biases"), weights="F32",
)  # fmt: skip


def test_a_rank_computes_its_partial_results() -> None:
    """Alone, with nothing to add up and no other ids, the rank's part is a model that both run alike."""
    spec, checkpoint = random_model(_RECIPE)
    part = shard(spec, 1, 2)
    alone = replace(part, share=Share(), vocab_size=part.head.out_features)
    runner = Runner(alone, checkpoint, _CONFIG)
    try:
        ids = [token % alone.vocab_size for token in random_tokens(_RECIPE, 40)]
        expected = ReferenceModel(alone, load_tensors(alone, checkpoint), np.float64).logits(ids)
        found = runner.logits(ids, (30,))
        error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() < 2e-5
    finally:
        runner.close()


def test_a_part_whose_sums_must_be_added_up_is_refused() -> None:
    spec, checkpoint = random_model(_RECIPE)
    with pytest.raises(
        UnsupportedModelError,
        match=r"^random: this is the part of rank 1 of 2, and the CPU backend can't add up the sums of ranks$",
    ):
        CPUBackend().load(shard(spec, 1, 2), checkpoint, resolved(spec, checkpoint, _CONFIG, "cpu"))
