"""Encoders of images on a GPU beside those on the CPU, in float32; without a GPU, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from images.tower_files import write_tower_file
from images.vision_kinds import MERGE, PATCH
from images.vision_models import build_vision_model, image_of
from realizar.backends.cpu.tower import CPUTower
from realizar.backends.program import layer_blocks
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import UnsupportedModelError
from realizar.images.prepare import patches_of
from realizar.models.registry import build_tower
from realizar.models.spec import Attention

torch = pytest.importorskip("torch", reason="needs torch")
from realizar.backends.cuda.tower import CUDATower, check_blocks, planned_bytes  # noqa: E402

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("smolvlm", ""), ("lfm2_vl", ""), ("mistral3", ""), ("mistral3", "gguf"), ("qwen3_vl", "")),
        ("qwen3_vl", "gguf"),
    ],
)
def test_features_agree_with_the_cpu(kind: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    checkpoint = open_checkpoint(build_vision_model(kind, tmp_path).path)
    if form:
        write_tower_file(checkpoint, tmp_path / "mmproj.gguf")
        checkpoint = open_checkpoint(tmp_path / "mmproj.gguf")
    tower = build_tower(checkpoint)
    assert tower is not None
    picture = image_of((3 * PATCH * MERGE, 2 * PATCH * MERGE))
    encoder = CUDATower(tower, checkpoint, _DEVICE)
    found = encoder.encode(picture)
    wanted = CPUTower(tower, checkpoint, threads=1).encode(patches_of(tower, picture))
    assert np.ptp(wanted) > 5
    np.testing.assert_allclose(found, wanted, atol=3e-5)
    assert encoder.size_bytes < sum(planned_bytes(tower, checkpoint)) < 2 * encoder.size_bytes
    mixer = tower.layers[0].mixer
    assert isinstance(mixer, Attention)
    windowed = replace(tower, layers=(tower.layers[0], replace(tower.layers[1], mixer=replace(mixer, window=4))))
    with pytest.raises(UnsupportedModelError, match="layer 1 of the encoder has a part that it does not run on a GPU"):
        CUDATower(windowed, checkpoint, _DEVICE)
    with pytest.raises(UnsupportedModelError, match="an encoder with a class token does not run on a GPU"):
        CUDATower(replace(tower, class_token="class.weight"), checkpoint, _DEVICE)


def test_parts_of_glms_tower_are_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    checkpoint = open_checkpoint(build_vision_model("glm4v", tmp_path).path)
    tower = build_tower(checkpoint)
    assert tower is not None
    for each, message in ((tower, "positions after a norm"), (replace(tower, input_norm=None), "feed-forward in its")):
        with pytest.raises(UnsupportedModelError, match=message):
            check_blocks(each, layer_blocks(each.layers))
