"""Encoders of images on a GPU beside those on the CPU, by graphs and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.core.core_runs import run
from images.vision_models import MERGE, PATCH, TILE, write_vision_files
from realizar.backends.cpu.tower import CPUTower
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.engine.loading import load_core
from realizar.images.prepare import patches_of
from realizar.models.registry import build_tower
from realizar.request import Picture, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams

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


CONFIG = EngineConfig(
    context_length=256,
    kv_cache_bytes=64 << 20,
    max_running=8,
    max_step_tokens=64,
    device_check=False,
    kv_cache_dtype="f16",
)


def test_a_model_on_a_gpu_sees_as_on_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine encodes pictures before their requests join its steps, beside those of others."""
    checkpoint = open_checkpoint(write_vision_files(tmp_path))
    holder = open_checkpoint(tmp_path / "mmproj-tiny.gguf")
    tower = build_tower(holder)
    assert tower is not None
    rng, length, found = np.random.default_rng(2), (TILE // PATCH // MERGE) ** 2, []
    pictures = rng.integers(0, 256, (3, TILE, TILE, 3), dtype=np.uint8)
    eyes = CPUTower(tower, holder, threads=1)
    values = [eyes.encode(patches_of(tower, picture)) for picture in pictures]
    names = [bytes([place]) * (32 * length) for place in range(3)]
    shown = [
        PromptEmbeddings(2, b"", each, picture=Picture(picture.tobytes(), TILE, TILE, 1))
        for picture, each in zip(pictures, names, strict=True)
    ]
    for device, runs in (("cpu", [prompt_embeddings(each, 2) for each in values]), ("cuda", [*shown, shown[0]])):
        core = load_core(checkpoint, replace(CONFIG, device=device))
        assert core.encodes_pictures is (device == "cuda")
        ids, sampling = tuple(range(40, 60 + length)), SamplingParams(temperature=0.0, logprobs=1)
        for place, each in enumerate([(), *((one,) for one in runs)]):
            core.add(Request(f"{place}", ids, sampling, 4, embeddings=each))
        texts = run(core)
        assert not any(output.error for outputs in texts.values() for output in outputs)
        found.append({name: outputs[0].logprobs[0].logprob for name, outputs in texts.items()})
        core.close()
    assert found[1].pop("4") == pytest.approx(found[1]["1"], abs=5e-3)  # found in the cache
    for name, expected in found[0].items():
        assert found[1].pop(name) == pytest.approx(expected, abs=5e-3), name
    assert not found[1]
    assert np.ptp([*found[0].values()]) > 0.02
    assert "no graph" not in caplog.text
