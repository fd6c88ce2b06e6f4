"""Every architecture through ranks on the CPU: what they add up is what numpy computes of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from architectures import CASES, make_model
from backends.ranks.cpu_ranks import Ranks
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from reference_model import ReferenceModel
from reference_tensors import load_tensors

pytest.importorskip("torch", reason="the models are transformers', which needs torch")
pytest.importorskip("transformers", reason="the models are transformers'")


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_every_architecture(name: str, tmp_path: Path) -> None:
    make_model(name, wide=True).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec, ids = build_spec(checkpoint, CASES[name].context_length), list(range(24))
    whole = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
    config = EngineConfig(threads=1, max_running=1, context_length=512, max_step_tokens=64)
    ranks = Ranks(spec, checkpoint, config, 2)
    try:
        found = ranks.logits(ids, (20, 1))
    finally:
        ranks.close()
    error = np.linalg.norm(found - whole, axis=-1) / np.linalg.norm(whole, axis=-1)
    assert error.max() < 2e-4
