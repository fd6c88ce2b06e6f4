"""A small model in every quantised type, loaded from its file and run, against the reference model in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpu_runs import load_runner
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.generated.generate import generate_gguf
from realizar.quantization.convert import QUANTIZED_TYPES
from reference_model import ReferenceModel
from reference_tensors import load_tensors

_TOLERANCE = 0.03  # activations of eight bits; float weights agree within 2e-5
_COMMON = ("Q2_K", "IQ2_XXS", "Q1_0")
_TYPES = [
    pytest.param(ggml_type, id=ggml_type.name, marks=[pytest.mark.full] * (ggml_type.name not in _COMMON))
    for ggml_type in QUANTIZED_TYPES
]


@pytest.mark.parametrize("ggml_type", _TYPES)
def test_logits(ggml_type: GGMLType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate_gguf("tiny", path, ggml_type)
    runner = load_runner(path, EngineConfig(threads=1, max_running=1, context_length=64))
    ids = np.random.default_rng(7).integers(0, 512, 21).tolist()
    found = runner.logits(ids, (14, 5))
    expected = ReferenceModel(runner.spec, load_tensors(runner.spec, open_checkpoint(path)), np.float64).logits(ids)
    runner.close()
    error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= _TOLERANCE
