"""Encoders of images on a GPU beside those on the CPU, by graphs and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from images.vision_kinds import MERGE, PATCH, TILE
from images.vision_models import write_vision_files
from realizar.backends.cpu.tower import CPUTower
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.images.prepare import patches_of
from realizar.models.registry import build_tower

torch = pytest.importorskip("torch", reason="needs torch")
from realizar.backends.cuda.tower import CUDATower  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
_MOST = {GGMLType.F32: 1e-5, GGMLType.F16: 2e-3, GGMLType.BF16: 2e-2, GGMLType.Q8_0: 2e-2}


@pytest.mark.parametrize("kind", _MOST)
def test_features_are_near_those_of_the_cpu(kind: GGMLType, tmp_path: Path) -> None:
    """The norm of the difference over that of the features; a graph, from the second time on, gives the same bits."""
    write_vision_files(tmp_path, kind)
    checkpoint = open_checkpoint(tmp_path / "mmproj-tiny.gguf")
    tower = build_tower(checkpoint)
    assert tower is not None
    encoder, rng, square = (
        CUDATower(tower, checkpoint, torch.device("cuda", 0)),
        np.random.default_rng(1),
        PATCH * MERGE,
    )
    for height, width in ((TILE, TILE), (2 * square, 3 * square)):
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        wanted = CPUTower(tower, checkpoint, threads=1).encode(patches_of(tower, picture))
        found, *later = (encoder.encode(picture) for _ in range(3))
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < _MOST[kind]
        for each in later:
            np.testing.assert_array_equal(each, found)
        np.testing.assert_array_equal(encoder.encode(255 - picture), encoder.encode(255 - picture))
        assert np.abs(encoder.encode(255 - picture) - found).max() > 0.1
