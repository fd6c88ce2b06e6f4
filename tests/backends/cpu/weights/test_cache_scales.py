"""A cache in FP8 divides keys and values by the checkpoint's scales, or by what leaves room for biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cpu.test_cpu_parts import relative_error
from cpu_runs import Runner
from quantization.stored_checkpoints import VOCABULARY, Stored, write_model
from random_models import Recipe, random_model, random_tokens
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import CheckpointError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec
from reference_model import FP8CacheModel
from reference_tensors import load_tensors

CONFIG = EngineConfig(threads=1, max_running=1, max_step_tokens=32, kv_cache_bytes=4 << 20, context_length=64,
                      kv_cache_dtype="fp8")  # fmt: skip
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SCALES = {0: (1 / 64, 0.375), 1: (3.0, 1 / 1024)}  # keys of the one and values of the other are cut
PLACES = {"modelopt": "self_attn.{0}_proj.{0}_scale", "compressed-tensors": "self_attn.{0}_scale"}


def stored_scales(place: str, dtype: Any = np.float32) -> dict[str, Any]:
    return {
        f"model.layers.{layer}.{PLACES[place].format(part)}": np.array([scale], dtype)
        for layer, pair in SCALES.items()
        for part, scale in zip("kv", pair, strict=True)
    }


def opened(folder: Path, more: dict[str, Any], **method: Any) -> tuple[ModelSpec, Checkpoint]:
    write_model(folder, Stored("float", group=0, rows=1), more=more, **method)
    checkpoint = open_checkpoint(folder)
    spec = build_spec(checkpoint)
    check_tensors(spec, checkpoint)
    return spec, checkpoint


def check(spec: ModelSpec, checkpoint: Checkpoint, scales: dict[int, tuple[float, float]], ids: list[int]) -> None:
    """The engine computes what the twin does with these scales, and not what it does without."""
    runner = Runner(spec, checkpoint, CONFIG)
    found = runner.logits(ids, (20, 1))
    runner.close()
    twin = FP8CacheModel(spec, load_tensors(spec, checkpoint), np.float64)
    without = relative_error(found, twin.logits(ids))
    twin.scales = scales
    assert relative_error(found, twin.logits(ids)) <= 5e-3 < without / 10


@pytest.mark.parametrize(("place", "dtype"), [("modelopt", np.float32), ("compressed-tensors", np.float16)])
def test_scales_of_a_checkpoint(place: str, dtype: Any, tmp_path: Path) -> None:
    spec, checkpoint = opened(tmp_path, stored_scales(place, dtype), kv_cache_scheme=SCHEME)
    scales = {layer: (float(dtype(keys)), float(dtype(values))) for layer, (keys, values) in SCALES.items()}
    assert WeightTensors(spec, checkpoint).cache_scales("fp8") == scales
    assert WeightTensors(spec, checkpoint).cache_scales("int8") == {}
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 40).tolist()
    check(spec, checkpoint, scales, ids)


def test_scales_of_other_codes_are_not_taken(tmp_path: Path) -> None:
    for scheme in (SCHEME | {"type": "int"}, SCHEME | {"strategy": "attn_head"}):
        spec, checkpoint = opened(tmp_path, stored_scales("compressed-tensors"), kv_cache_scheme=scheme)
        assert WeightTensors(spec, checkpoint).cache_scales("fp8") == dict.fromkeys(SCALES, (1.0, 1.0))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (np.ones(2, np.float32), r"has the shape \(2,\), and not one number$"),
        (np.ones(1, np.int32), "is of type I32, and not of floats$"),
        (np.zeros(1, np.float32), r"is 0\.0, and not a finite number above 0$"),
        (np.array(np.nan, np.float32), "is nan, and not a finite number above 0$"),
        (np.array(-0.5, np.float32), r"is -0\.5, and not a finite number above 0$"),
    ],
)
def test_scales_that_are_none_are_refused_by_name(stored: Any, message: str, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.v_scale"
    spec, checkpoint = opened(tmp_path, stored_scales("compressed-tensors") | {name: stored})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}': {message}"):
        Runner(spec, checkpoint, CONFIG)
    Runner(spec, checkpoint, replace(CONFIG, kv_cache_dtype="int8")).close()


def test_keys_have_room_beside_their_biases() -> None:
    recipe = Recipe(weights="F32", windows=(None, 40), parts=("biases",))
    spec, checkpoint = random_model(recipe)
    tensors, scales = dict(checkpoint.tensors), {}
    for layer, attention in spec.attentions():
        assert attention.k.bias is not None
        name = spec.tensors[attention.k.bias].name
        bias = tensors[name].data.view(np.float32).copy()
        bias[layer] = 1000.0
        tensors[name] = replace(tensors[name], data=bias.view(np.uint8))
        scales[layer] = 1000 / 224, 1.0
    changed = replace(checkpoint, tensors=tensors)
    assert WeightTensors(spec, checkpoint).cache_scales("fp8") == dict.fromkeys(scales, (1.0, 1.0))
    assert WeightTensors(spec, changed).cache_scales("fp8") == scales
    check(spec, changed, scales, random_tokens(recipe, 40))
