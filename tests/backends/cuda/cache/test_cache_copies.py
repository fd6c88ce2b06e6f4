"""Blocks and snapshots of a GPU's cache, copied to the host and into other places; on the CPU's memory here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import new_backend  # noqa: E402
from backends.draft_models import next_token_block  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from resolving import resolved  # noqa: E402

WINDOWS = Recipe(64, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, windows=(None, 40, None))
HYBRID = replace(
    WINDOWS, windows=(None,) * 3, weights="F32", recurrent=("delta", "convolution"), value_heads=4, key_size=16,
    value_size=16,
)  # fmt: skip
CASES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "windows": (WINDOWS, {}),
    "int8": (WINDOWS, {"kv_cache_dtype": "int8"}),
    "fp8": (WINDOWS, {"kv_cache_dtype": "fp8"}),
    "hybrid": (HYBRID, {}),
    "drafter": (replace(WINDOWS, windows=(None, None)), {"speculative_tokens": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_contents_come_back_in_other_places(name: str) -> None:
    recipe, options = CASES[name]
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(max_running=2, max_step_tokens=64, context_length=256, kv_cache_bytes=8 << 20, **options)
    backend = new_backend()
    drafters = {"drafter": next_token_block(recipe)} if name == "drafter" else {}
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config, "cuda"), drafters)
    num_groups = len(backend.capacity().num_blocks)
    assert len(backend.part_bytes) == num_groups + (name == "hybrid")
    assert sum(backend.part_bytes[:num_groups]) == sum(backend.model.kv.block_bytes)
    assert name != "hybrid" or backend.part_bytes[-1] == backend.snapshot_bytes
    for part, size in enumerate(backend.part_bytes):
        planes = backend.planes(part)
        for place, plane in enumerate(planes):
            generator = torch.Generator().manual_seed(place)
            plane.copy_(torch.randint(-100, 100, plane.shape, generator=generator).to(plane.dtype))
        before = [plane.clone() for plane in planes]
        contents = backend.read_cached(part, [3, 0])()
        assert contents.shape == (2, size)
        assert (contents[0] != contents[1]).any()
        buffer = backend.new_buffer(2 * size).reshape(2, size)
        np.copyto(buffer, contents)
        backend.write_cached(part, [1, 4], buffer)()
        for plane, old in zip(planes, before, strict=True):
            assert torch.equal(plane[[1, 4]], old[[3, 0]])
            assert torch.equal(plane[[0, 2, 3]], old[[0, 2, 3]])
    backend.shutdown()
