"""The page says what was measured, of every row there is; its quantised checkpoints and transformers' models agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from architectures import CASES
from images.vision_kinds import KINDS
from models.parity_rows import digest
from parity_table.checkpoints import Weights, forms_of
from parity_table.page import DEVICES, IMAGE_PARTS, PAGE, image_digest, load, render
from wider import diagonal


def test_the_page_is_of_the_figures() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(load()), "run `make parity`"


def test_every_row_was_measured_on_a_cpu() -> None:
    rows = load()["rows"]
    for name in (name for name, case in CASES.items() if "cpu" in case.run_by):
        for form in forms_of(name):
            row = rows.get(f"{name} {form}", {})
            assert row.get("digest") == digest(name, form), f"{name} {form} was never measured: run `make parity`"
            assert row["cpu"]["batch_equals_alone"], f"{name} {form}"
            limit = 1e-4 if form.startswith("F32") else 0.1
            assert all(error < limit for error in row["cpu"]["errors"].values()), f"{name} {form}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_that_sees_was_measured(kind: str) -> None:
    row = load()["images"].get(kind, {})
    assert row.get("digest") == image_digest(kind), f"images of {kind} were never measured: run `make parity`"
    for device in DEVICES if "cuda" in row else ("cpu",):
        assert row[device].keys() == set(IMAGE_PARTS)
        assert max(row[device].values()) < 1e-4


# Reordered out_features; matrices apart that are one here.
@pytest.mark.parametrize(("name", "weights"), diagonal(["smollm3", "qwen3moe"], ["Q8_0 GGUF", "Q4_K_M GGUF"]))
def test_blocks_say_what_transformers_has(name: str, weights: Weights, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
    pytest.importorskip("transformers", reason="parity is against transformers")
    import numpy as np

    from architectures import expected_logits
    from parity_table.checkpoints import build
    from realizar.checkpoint.open import open_checkpoint
    from realizar.models.registry import build_spec
    from reference_model import ReferenceModel
    from reference_tensors import load_tensors

    built = build(name, weights, tmp_path, 24)
    checkpoint = open_checkpoint(built.path)
    spec = build_spec(checkpoint)
    found = ReferenceModel(spec, load_tensors(spec, checkpoint)).logits(built.token_ids)
    np.testing.assert_allclose(found, expected_logits(built), rtol=1e-3, atol=1e-4)
