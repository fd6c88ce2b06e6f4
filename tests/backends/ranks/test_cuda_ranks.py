"""Ranks of the GPU backend, interpreted without GPUs: what they add up is what numpy computes of the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.ranks.test_shard import RECIPES, of_gpus
from random_models import random_model, random_tokens
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from waits import HANG_S

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

_REFUSED = ("experts-of-two-matrices",)  # experts without a gate
_BY_TWO = [name for name, (_, counts) in RECIPES.items() if 2 in counts and name not in _REFUSED]


@pytest.mark.parametrize(
    ("names", "count", "ways"),
    [(_BY_TWO, 2, ["memory"]), (["experts-with-norms", "copied-norms-of-tokens"], 3, ["memory", "calls"])],
)
def test_the_sums_of_ranks_are_the_whole(names: list[str], count: int, ways: list[str], tmp_path: Path) -> None:
    from backends.ranks import cuda_ranks

    command = [sys.executable, cuda_ranks.__file__, ",".join(names)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(count), str(tmp_path), ",".join(ways)]) for rank in range(count)
    ]
    try:
        assert [rank.wait(HANG_S) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()
    for name in names:
        (spec, checkpoint), ids = random_model(of_gpus(name)), random_tokens(of_gpus(name), cuda_ranks.TOKENS)
        expected = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
        for way in ways:
            first, *others = (np.load(tmp_path / f"{name}-{way}-{rank}.npy") for rank in range(count))
            for other in others:
                np.testing.assert_array_equal(other, first)
            error = np.linalg.norm(first - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
            assert error.max() < 2e-5, (name, way)
