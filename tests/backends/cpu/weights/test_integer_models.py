"""Whole models of integers as AWQ, GPTQ and compressed-tensors store them, through the packed kernels of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpu_runs import Runner
from quantization.integer_checkpoints import VOCABULARY, Stored, write_model
from realizar.backends.cpu.plan import plan_memory
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from resolving import resolved

CONFIG = EngineConfig(threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=4 << 20, context_length=64)


@pytest.mark.parametrize(
    "stored",
    [
        Stored("awq"), Stored("gptq", group=32), Stored("gptq", symmetric=True, group=0), Stored("packed", group=32),
        Stored("packed", symmetric=True, scale="bfloat16"), Stored("packed", bits=8, group=64, symmetric=True),
        Stored("unpacked", bits=8, symmetric=True, group=0),
    ],
    ids=str,
)  # fmt: skip
def test_a_whole_model(stored: Stored, tmp_path: Path) -> None:
    """The reference reads the numbers that were written, and the backend computes with them."""
    weights = write_model(tmp_path, stored)
    checkpoint = open_checkpoint(tmp_path)
    spec = build_spec(checkpoint)
    tensors = load_tensors(spec, checkpoint)
    for name, place in spec.tensors.items():
        if place.name in weights:
            rows = weights[place.name][place.first_out_feature :][: place.shape[0]]
            np.testing.assert_allclose(tensors[name], rows, rtol=1e-6, atol=1e-7)
    assert {place.name for place in spec.tensors.values()} >= weights.keys()
    runner = Runner(spec, checkpoint, CONFIG)
    ids = [int(each) for each in np.random.default_rng(1).integers(0, VOCABULARY, 19)]
    found, expected = runner.logits(ids, (14, 3)), ReferenceModel(spec, tensors, np.float64).logits(ids)
    assert (np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max() <= 0.03
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cpu"))
    assert plan.weight_bytes == runner.capacity.weight_bytes
    runner.close()
