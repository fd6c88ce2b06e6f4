"""Weights that are NaN or infinite are refused at load, by the tensor's name, whatever they are stored in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backends.spoiled_models import spoil_block, spoiled_model, vector_names
from random_models import Recipe, random_model
from realizar.backends.cpu.weights.load import Weights
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import CheckpointError
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES
from tiny_model import write_tiny_model

CONFIG = EngineConfig(threads=1, max_running=2, max_step_tokens=64, kv_cache_bytes=8 << 20)
PARTS = ("biases", "layer_norm", "qk_norm", "sinks", "post_norms")
VECTORS = Recipe(parts=PARTS, windows=(None,))
TYPES = [each.name for each in (*QUANTIZED_TYPES, *FLOAT_TYPES) if each is not GGMLType.NVFP4]


def pack(recipe: Recipe, name: str, value: str) -> None:
    """Pack all matrices, and look at the embedding."""
    spec, checkpoint = spoiled_model(recipe, name, value)
    Weights(spec, checkpoint, 8, 2).load(list(spec.linears()), lambda _: None)


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("kind", TYPES)
def test_matrices_of_every_type(kind: str, value: str) -> None:
    """The spoiled matrix is in a layer, in the head, or is the embedding, which is read from the file."""
    recipe = Recipe(weights=kind, windows=(None,))
    what = "number" if kind in ("F32", "F16", "BF16") else "the scale of block"
    for name in ("layers.0.down.weight", "head.weight"):
        with pytest.raises(CheckpointError, match=rf"^random\.gguf: tensor '{name}': {what} \d+ is not finite"):
            pack(recipe, name, value)
    if kind == "Q4_0":
        with pytest.raises(CheckpointError, match=r"tensor 'embedding': number \d+ is not finite"):
            pack(recipe, "embedding", value)


@pytest.mark.parametrize("name", vector_names(VECTORS))
def test_norms_biases_and_sinks(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': number \d+ is not finite"):
        pack(VECTORS, name, "nan")


def test_good_weights_pass() -> None:
    for kind in TYPES:
        spec, checkpoint = random_model(Recipe(parts=PARTS, weights=kind, windows=(None,)))
        Weights(spec, checkpoint, 8, 2).load(list(spec.linears()), lambda _: None)


@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "BF16"])
def test_experts(kind: str, part: str) -> None:
    """The bad block lies in the third of four experts, and is counted from the tensor's begin."""
    recipe = Recipe(weights=kind, experts=4, windows=(None,))
    name = f"layers.0.{part}_experts"
    spec, checkpoint = spoiled_model(recipe, name, "nan")
    tensor = checkpoint.tensors[name]
    at = 2 * (tensor.data.size // tensor.ggml_type.type_size) // 3
    what = "number" if kind == "BF16" else "the scale of block"
    with pytest.raises(CheckpointError, match=rf"^random\.gguf: tensor '{name}': {what} {at} is not finite"):
        Weights(spec, checkpoint, 8, 2).load(spec.matrices(), lambda _: None)


def test_a_gguf_file(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    write_tiny_model(good)
    checkpoint = open_checkpoint(good)
    name = next(name for name in checkpoint.tensors if "ffn_down" in name)
    tensors = []
    for each in checkpoint.tensors.values():
        data = each.data.copy()
        if each.name == name:
            spoil_block(data.reshape(-1, each.ggml_type.type_size)[-1], each.ggml_type, "nan")
        tensors.append(NewTensor(each.name, each.ggml_type, each.shape, data))
    write_gguf(bad, checkpoint.metadata, tensors)
    with pytest.raises(CheckpointError, match=rf"bad\.gguf: tensor '{name}': the scale of block \d+ is not finite"):
        load_core(find_checkpoint(bad), CONFIG)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_safetensors_folder(tmp_path: Path, dtype: str, name: str) -> None:
    from handmade_checkpoint import CONFIG as MODEL
    from handmade_checkpoint import config_checkpoint

    size = GGMLType[dtype].type_size
    header: dict[str, object] = {}
    body = b""
    for each in config_checkpoint().tensors.values():
        data = np.zeros((int(np.prod(each.shape)), size), np.uint8)
        if each.name == name:
            spoil_block(data[5], GGMLType[dtype], "inf")
        header[each.name] = {"dtype": dtype, "shape": each.shape, "data_offsets": [len(body), len(body) + data.size]}
        body += data.tobytes()
    (tmp_path / "config.json").write_text(json.dumps(MODEL), encoding="ascii")
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}': number 5 is not finite"):
        load_core(find_checkpoint(tmp_path), CONFIG)
