"""The architectures' table says which rows the CUDA backend runs. No GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="rows are made by transformers, which needs torch")
pytest.importorskip("transformers", reason="rows are made by transformers")

from architectures import CASES, build_case
from models.mixture_architectures import MIXTURES
from random_models import Recipe, random_model
from realizar.backends.cuda.supported import SUPPORTED
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import UnsupportedModelError
from realizar.models.registry import build_spec


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "cuda" not in case.run_by or name in MIXTURES]
)
def test_rows_that_are_not_run_are_refused(name: str, tmp_path: Path) -> None:
    """Rows that a GPU runs are tested there; a mixture's parts must be known here already."""
    built = build_case(name, tmp_path, "safetensors")
    spec = build_spec(open_checkpoint(built.path), built.context_length)
    if "cuda" in CASES[name].run_by:
        SUPPORTED.check(spec)
        return
    with pytest.raises(UnsupportedModelError, match="the CUDA backend"):
        SUPPORTED.check(spec)


def test_experts_without_a_gate_are_refused() -> None:
    """No architecture that loads has such ones; a dense feed-forward without a gate is run."""
    dense, _ = random_model(Recipe(parts=("ungated",), activation="relu_squared"))
    SUPPORTED.check(dense)
    spec, _ = random_model(Recipe(experts=4, windows=(None,), parts=("ungated_experts",), activation="relu_squared"))
    with pytest.raises(UnsupportedModelError, match="layer 0 has experts without a gate, which the CUDA backend does"):
        SUPPORTED.check(spec)
