"""Every architecture, from safetensors and from GGUF, through the reference model, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from architecture_case import Form
from architectures import build_case, check_logits, rows_by_turns
from models.parity_rows import STORED_ROWS, record
from models.ranks.sharded_reference import sharded_logits
from parity_table.checkpoints import build
from parity_table.stored import Method
from realizar.checkpoint.open import open_checkpoint
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from reference_model import ReferenceModel, State
from reference_tensors import load_tensors
from wider import wider

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")


def _in_chunks(model: ReferenceModel, token_ids: Sequence[int]) -> NDArray[Any]:
    """Logits of chunks of 5, 1, 7 tokens and the rest, with the state of each layer between them."""
    state, bounds = State(), (0, 5, 6, 13, len(token_ids))
    return np.concatenate([model.logits(token_ids[start:stop], state) for start, stop in pairwise(bounds)])


@pytest.mark.parametrize(("name", "form"), rows_by_turns(1))
def test_logits_agree_with_transformers(name: str, form: Form, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    built = build_case(name, tmp_path, form)
    checkpoint = open_checkpoint(built.path)
    spec = build_spec(checkpoint, built.context_length)
    check_tensors(spec, checkpoint)
    model = ReferenceModel(spec, load_tensors(spec, checkpoint))
    whole = model.logits(built.token_ids)
    check_logits(built, lambda _: whole)
    np.testing.assert_allclose(_in_chunks(model, built.token_ids), whole, rtol=1e-3, atol=1e-4)
    sharded = sharded_logits(spec, checkpoint, 2, built.token_ids[:24])
    np.testing.assert_allclose(sharded, whole[:24], rtol=1e-3, atol=1e-4)
    if pytestconfig.getoption("--record-parity"):
        record(name, form)


@pytest.mark.parametrize(("name", "method"), wider(STORED_ROWS, *STORED_ROWS[::4], STORED_ROWS[-1]))
def test_logits_of_stored_matrices_agree_with_transformers(
    name: str, method: Method, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    built = build(name, method, tmp_path, 24)
    checkpoint = open_checkpoint(built.path)
    spec = build_spec(checkpoint, built.context_length)
    check_tensors(spec, checkpoint)
    check_logits(built, ReferenceModel(spec, load_tensors(spec, checkpoint)).logits)
    if pytestconfig.getoption("--record-parity"):
        record(name, method)


def test_experts_saved_as_one_tensor(tmp_path: Path) -> None:
    """The layout that transformers 5 has in memory, and saves on request."""
    built = build_case("qwen3moe", tmp_path, "safetensors")
    fused = built._replace(path=tmp_path / "fused")
    built.model.save_pretrained(fused.path, save_original_format=False)
    checkpoint = open_checkpoint(fused.path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in checkpoint.tensors
    spec = build_spec(checkpoint)
    check_tensors(spec, checkpoint)
    check_logits(fused, ReferenceModel(spec, load_tensors(spec, checkpoint)).logits)
