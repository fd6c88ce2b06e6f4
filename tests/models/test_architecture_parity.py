"""Every architecture, from safetensors and from GGUF, through the reference model, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from architectures import ROWS, Form, build_case, check_logits
from models.parity_rows import record
from realizar.checkpoint.open import open_checkpoint
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from reference_model import ReferenceModel
from reference_tensors import load_tensors

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")


@pytest.mark.parametrize(("name", "form"), ROWS)
def test_logits_agree_with_transformers(name: str, form: Form, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    built = build_case(name, tmp_path, form)
    checkpoint = open_checkpoint(built.path)
    spec = build_spec(checkpoint, built.context_length)
    check_tensors(spec, checkpoint)
    check_logits(built, ReferenceModel(spec, load_tensors(spec, checkpoint)).logits)
    if pytestconfig.getoption("--record-parity"):
        record(name, form)
