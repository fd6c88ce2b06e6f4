"""Numbers of parameters, all of them and those of a token, against counts by hand and the models' own pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybrid_spec import hybrid_spec
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.gguf_writer import NewTensor
from realizar.models.generated import generate
from realizar.models.parameters import ParameterCounts, count_parameters, size_of_token
from realizar.models.registry import build_spec


def test_two_of_four_experts_are_left_out() -> None:
    spec = hybrid_spec()
    expert = 3 * 8 * 16
    dense = sum(np.prod(source.shape) for name, source in spec.tensors.items() if source.shape[:1] != (4,))
    routers = 2 * 4 * 8
    assert count_parameters(spec) == ParameterCounts(dense + routers + 8 * expert, dense + routers + 4 * expert)
    sizes = {name: 1000 for layer in spec.mixtures() for name in (each.weight for each in layer[1].expert_linears())}
    assert size_of_token(spec, {**sizes, "other": 7}) == 7 + 6 * 500


@pytest.mark.parametrize(("shape", "active"), [("qwen3-30b-a3b", 3_353_032_704), ("olmoe-7b", 1_282_017_280)])
def test_published_models(shape: str, active: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "3.3B activated" and "1.3B active" parameters, embedding and head among them."""
    written: list[NewTensor] = []
    monkeypatch.setattr(generate, "write_gguf", lambda path, metadata, tensors: written.extend([metadata, *tensors]))
    path = Path("model.gguf")
    generate.generate_gguf(shape, path, "q4_k_m")
    metadata, *tensors = written
    stored = {
        each.name: StoredTensor(each.name, each.ggml_type, each.shape, np.zeros(0, np.uint8), path, 0)
        for each in tensors
    }
    counts = count_parameters(build_spec(Checkpoint(path, "gguf", metadata, stored)))  # type: ignore[arg-type]
    assert counts.active == active
