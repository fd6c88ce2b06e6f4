"""Encoders of images on a GPU beside those on the CPU, in float32; without a GPU, under Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from images.tower_files import write_tower_file
from images.vision_kinds import KINDS
from images.vision_models import build_vision_model, image_of, write_vision_files
from realizar.backends.cpu.tower import CPUTower
from realizar.backends.devices import ChosenDevice
from realizar.backends.select import plan_memory, resolve_model
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.planned_load import plan_encoder
from realizar.errors import StepError, UnsupportedModelError
from realizar.images.prepare import patches_of
from realizar.models.parts import Clamps
from realizar.models.registry import build_tower
from realizar.models.spec import Attention

torch = pytest.importorskip("torch", reason="needs torch")
from realizar.backends.cuda.pictures.pinned import PinnedRoom, pinned_bytes  # noqa: E402
from realizar.backends.cuda.pictures.slices import PartsLeft, Slicer  # noqa: E402
from realizar.backends.cuda.tower import CUDATower  # noqa: E402
from realizar.backends.cuda.tower_plan import planned_bytes  # noqa: E402

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("form", ["", "gguf"])
@pytest.mark.parametrize("kind", [each for each in KINDS if each not in ("qwen3_vl_moe", "glm4v_moe")])
def test_features_agree_with_the_cpu(kind: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    checkpoint = open_checkpoint(build_vision_model(kind, tmp_path).path)
    if form:
        write_tower_file(checkpoint, tmp_path / "mmproj.gguf")
        checkpoint = open_checkpoint(tmp_path / "mmproj.gguf")
    tower = build_tower(checkpoint)
    assert tower is not None
    square = tower.patch_size * tower.merge
    # Windows of Qwen2.5-VL's tower are of 6 x 6 patches: here four of four sizes, and squares in two of them.
    picture = image_of((4 * square, 5 * square) if kind == "qwen2_5_vl" else (3 * square, 2 * square))
    encoder = CUDATower(tower, checkpoint, _DEVICE)
    found = encoder.encode(picture)
    wanted = CPUTower(tower, checkpoint, threads=1).encode(patches_of(tower, picture))
    assert np.ptp(wanted) > 5
    np.testing.assert_allclose(found, wanted, atol=3e-5)
    encoder.begin(picture)
    num_slices = 1
    while encoder.go_on(1e-6):
        num_slices += 1
    assert num_slices > 2 * len(tower.layers)
    np.testing.assert_array_equal(encoder.features(), found)
    assert encoder.size_bytes < sum(planned_bytes(tower, checkpoint)) < 2 * encoder.size_bytes
    encoder.begin(picture)
    assert not encoder.go_on(math.inf)
    encoder._features.fill_(math.nan)
    with pytest.raises(StepError, match="are not finite"):
        encoder.features()
    mixer = tower.layers[0].mixer
    assert isinstance(mixer, Attention)
    capped = replace(tower, layers=(tower.layers[0], replace(tower.layers[1], mixer=replace(mixer, soft_cap=4.0))))
    with pytest.raises(UnsupportedModelError, match="layer 1 of the encoder has a part that it does not run on a GPU"):
        CUDATower(capped, checkpoint, _DEVICE)
    linear = replace(mixer.o, clamps=Clamps((-1.0, 1.0), (-1.0, 1.0)), bias="model.layers.0.self_attn.o_proj.bias")
    bounded = replace(tower.layers[0], mixer=replace(mixer, o=linear))
    with pytest.raises(UnsupportedModelError, match="an encoder with bounds of matrices and biases does not run"):
        CUDATower(replace(tower, layers=(bounded, tower.layers[1])), checkpoint, _DEVICE)


def test_bounds_of_what_several_matrices_read_are_kept_where_it_is_made(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    stored = open_checkpoint(build_vision_model("gemma4_e", tmp_path).path)
    ends, tensors = {"input_min": -0.8, "input_max": 0.8}, dict(stored.tensors)
    for name, each in stored.tensors.items():
        if (end := name.rpartition(".")[2]) in ends:
            tensors[name] = replace(each, data=np.array([ends[end]], np.float32).view(np.uint8))
    checkpoint = replace(stored, tensors=tensors)
    tower = build_tower(checkpoint)
    assert tower is not None
    picture = image_of((3 * tower.patch_size * tower.merge, tower.patch_size * tower.merge))
    encoder = CUDATower(tower, checkpoint, _DEVICE)
    assert {each.read for group, each in encoder._weights.items() if len(group) > 1} == {
        (-np.float32(0.8), np.float32(0.8))
    }
    wanted = CPUTower(tower, checkpoint, threads=1).encode(patches_of(tower, picture))
    np.testing.assert_allclose(encoder.encode(picture), wanted, atol=3e-5)


def test_an_encoder_on_a_gpu_is_planned_before_the_cache(tmp_path: Path) -> None:
    """But for a model that may sleep, whose images the CPU encodes."""
    checkpoint = open_checkpoint(write_vision_files(tmp_path))
    config = EngineConfig(context_length=512, threads=1)
    spec, resolved = resolve_model(checkpoint, config, ChosenDevice("cuda", 0, "a GPU"))
    plan = plan_memory(spec, checkpoint, resolved, 1 << 30)
    encoder = plan_encoder(checkpoint, resolved)
    holder = open_checkpoint(tmp_path / "mmproj-tiny.gguf")
    tower = build_tower(holder)
    assert tower is not None
    assert plan.tower_bytes == sum(planned_bytes(tower, holder)) == encoder.weight_bytes + encoder.workspace_bytes
    assert encoder.host_bytes == encoder.kept_bytes == pinned_bytes()
    without = plan_memory(spec, checkpoint, replace(resolved, mmproj="none"), 1 << 30)
    assert without.tower_bytes == 0
    assert plan.needed_bytes - without.needed_bytes == plan.tower_bytes
    assert 0 < without.kv_limit_bytes - plan.kv_limit_bytes <= plan.tower_bytes
    assert plan_memory(spec, checkpoint, resolved, 1 << 30, may_sleep=True) == without
    assert plan_encoder(checkpoint, resolved, may_sleep=True).device == "cpu"


def test_pinned_memory_of_features_is_free_again_once_nothing_refers_to_them() -> None:
    """As requests, and embeddings that are kept, refer to parts of them as bytes; what has no room is told so."""
    room = PinnedRoom(12 * 4096, is_gpu=False)
    first, second, third = (room.take((4, 1000)) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    first[:], second[:], third[:] = 1.0, 2.0, 3.0
    assert room.take((1, 1)) is None
    part = np.frombuffer(np.split(second, 2)[1].data.cast("B"), np.float32).reshape(2, 1000)[1:]
    del second
    assert room.take((1, 1)) is None
    assert (part == 2.0).all()
    del part
    small = room.take((3, 1000))
    assert small is not None
    small[:] = 4.0
    assert room.take((2, 1000)) is None
    assert (first == 1.0).all()
    assert (third == 3.0).all()
    assert room.take((1, 1000)) is not None


def test_a_slice_has_the_parts_that_fit_into_it_and_a_longer_one_comes_when_slices_together_had_its_time() -> None:
    launched: list[float] = []

    def parts(*seconds: float) -> Iterator[float]:
        for each in seconds:
            yield each
            launched.append(each)

    slicer, left, slices = Slicer(is_gpu=False), PartsLeft(parts(3.0, 3.0, 3.0, 25.0, 1.0)), list[list[float]]()
    is_left = True
    while is_left:
        launched.clear()
        is_left = slicer.launch(left, 7.0)
        slices.append(list(launched))
    assert slices == [[3.0, 3.0], [3.0], [], [], [], [25.0, 1.0]]
    assert not slicer.launch(PartsLeft(parts(3.0, 9.0)), math.inf)
    assert launched == [25.0, 1.0, 3.0, 9.0]
