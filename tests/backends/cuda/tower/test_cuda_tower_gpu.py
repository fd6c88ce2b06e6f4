"""Encoders of images on a GPU beside those on the CPU, by graphs and without."""

from __future__ import annotations

import time
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from engine.core.core_runs import run, tokens
from images.vision_kinds import MERGE, PATCH, TILE
from images.vision_models import in_float32, write_vision_files
from realizar.backends.cpu.tower import CPUTower
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.engine.loading import load_core
from realizar.errors import RealizarError
from realizar.images.prepare import patches_of
from realizar.models.registry import build_tower
from realizar.request import Picture, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams
from step_inputs import stepped

torch = pytest.importorskip("torch", reason="needs torch")
from realizar.backends.cuda.tower import CUDATower  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
_MOST = {GGMLType.F32: 1e-5, GGMLType.F16: 2e-3, GGMLType.BF16: 1e-2, GGMLType.Q8_0: 2e-3, GGMLType.Q4_K: 2e-3}


@pytest.mark.parametrize("kind", _MOST)
def test_features_are_near_those_of_the_cpu(kind: GGMLType, tmp_path: Path) -> None:
    """The norm of the difference over that of the features; a graph, from the second time on, gives the same bits."""
    write_vision_files(tmp_path, kind, sizes=(256, 512))
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
        wanted = CPUTower(tower, in_float32(checkpoint), threads=1).encode(patches_of(tower, picture))
        found, *later = (encoder.encode(picture) for _ in range(3))
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < _MOST[kind]
        for each in later:
            np.testing.assert_array_equal(each, found)
        np.testing.assert_array_equal(encoder.encode(255 - picture), encoder.encode(255 - picture))
        assert np.abs(encoder.encode(255 - picture) - found).max() > 0.1


def encoded(core: EngineCore, request: Request) -> Request:
    """With embeddings in the place of its pictures, encoded between the steps of what else runs."""
    done: SimpleQueue[Request | RealizarError] = SimpleQueue()
    core.embed_later(request, done.put)
    while done.empty():
        if core.has_work:
            stepped(core)
        else:
            time.sleep(1e-3)
    found = done.get()
    assert isinstance(found, Request), found
    return found


@pytest.mark.parametrize("has_streams", [False, True])
def test_the_engine_encodes_pictures_on_its_gpu(
    has_streams: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone, by a graph from the second picture on, and in slices beside a stream: answers are those for the features
    that the CPU makes.
    """
    path = write_vision_files(tmp_path)
    holder = open_checkpoint(tmp_path / "mmproj-tiny.gguf")
    tower = build_tower(holder)
    assert tower is not None
    rng, length = np.random.default_rng(2), (TILE // PATCH // MERGE) ** 2
    pictures = rng.integers(0, 256, (3, TILE, TILE, 3), dtype=np.uint8)
    eyes = CPUTower(tower, holder, threads=1)
    values = [eyes.encode(patches_of(tower, picture)) for picture in pictures]
    shown = [
        PromptEmbeddings(2, b"", bytes([place]) * (32 * length), picture=Picture(picture.tobytes(), TILE, TILE, 1))
        for place, picture in enumerate(pictures)
    ]
    config = EngineConfig(
        context_length=512, kv_cache_bytes=64 << 20, max_running=8, max_step_tokens=64, device_check=False,
        device="cuda",
    )  # fmt: skip
    core = load_core(open_checkpoint(path), config)
    ids, greedy = tuple(range(40, 60 + length)), SamplingParams(temperature=0.0, logprobs=1)
    for place, each in enumerate(values):
        core.add(Request(f"given {place}", ids, greedy, 4, embeddings=(prompt_embeddings(each, 2),)))
    given = run(core)
    if has_streams:
        core.add(Request("stream", (5, 6, 7), SamplingParams(temperature=0.0, logit_bias={1: -100.0}), 480))
        for _ in range(40):
            stepped(core)
    requests = [
        encoded(core, Request(f"shown {place}", ids, greedy, 4, embeddings=(each,)))
        for place, each in enumerate([*shown, shown[0]])
    ]
    assert has_streams is core.has_work
    for request, each in zip(requests, values, strict=False):
        found = np.frombuffer(request.embeddings[0].values, np.float32).reshape(each.shape)
        assert np.linalg.norm(found - each) / np.linalg.norm(each) < _MOST[GGMLType.F32]
    assert requests[3].embeddings[0].values is requests[0].embeddings[0].values
    for request in requests:
        core.add(request)
    texts = run(core)
    for place in range(3):
        wanted, answer = given[f"given {place}"], texts[f"shown {place}"]
        assert tokens(answer)[0] == tokens(wanted)[0]  # later ones may be as good as others in halves
        assert answer[0].logprobs[0].logprob == pytest.approx(wanted[0].logprobs[0].logprob, abs=3e-2)
    assert "no graph" not in caplog.text
    assert "encoded on the CPU" not in caplog.text
    core.close()
