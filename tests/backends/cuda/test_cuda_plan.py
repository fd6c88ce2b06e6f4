"""`realizar plan --device cuda` against what packing and loading come to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from random_models import Recipe, random_model
from realizar.backends.cuda import shapes
from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.device import DeviceProfile, interpreter_device
from realizar.backends.cuda.kernel_sizes import MAX_PARTS, chunk_parts, tile_tokens
from realizar.backends.cuda.plan import graph_bytes, plan_memory
from realizar.backends.cuda.sampling.native_graphs import num_graphs
from realizar.backends.cuda.shapes import step_sizes
from realizar.backends.cuda.step_arrays import StepSizes
from realizar.backends.cuda.weights import load as weights_module
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.weights.pack_raw import pack_by_threads, reserve
from realizar.backends.cuda.weights.plain import PlainMatrix
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import build_program
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.cli.main import app, run_app
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec
from realizar.quantization.block_source import BlockSource, block_source
from realizar.quantization.random_blocks import random_blocks
from resolving import resolved

HOPPER = DeviceProfile(torch.device("meta"), "an H200", (9, 0), 132, 1 << 37)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "MXFP4"])
def test_a_matrix_is_as_large_as_planned(name: str) -> None:
    ggml_type, rows, cols = GGMLType[name], 130, 512
    data = random_blocks(ggml_type, rows, cols, np.random.default_rng(1), 0.02)
    source = block_source(ggml_type, data, rows, cols)
    reserved = reserve([source], "meta")
    assert reserved.weights.is_meta
    assert reserved.size_bytes == pack_by_threads([source], "cpu").size_bytes


@pytest.mark.parametrize("weights", ["Q4_K", "BF16", "F32"])
@pytest.mark.parametrize("parts", [(), ("shared", "shared_gate"), ("shared", "own_norms")])
def test_weights_are_not_read(weights: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(weights=weights, windows=(None,), experts=4, router_weights="Q8_0", parts=parts)
    spec, checkpoint = random_model(recipe)
    config = resolved(spec, checkpoint, EngineConfig(context_length=512, max_running=2), "cuda")
    expected = sum(checkpoint.tensors[spec.tensors[one.weight].name].data.nbytes for one in spec.matrices())

    def fail(*_: object) -> None:
        pytest.fail("weights are read")

    for name in ("check_finite", "planes", "dequantize", "read", "gather"):
        monkeypatch.setattr(BlockSource, name, fail)
    monkeypatch.setattr(weights_module, "_copy", fail)
    planned = plan_memory(spec, checkpoint, config, 1 << 33).weight_bytes
    assert expected < planned < 1.3 * expected, "routers become floats, and scales are padded"


def test_cache_and_workspace_are_as_large_as_planned(gemma3_path: Path) -> None:
    checkpoint = open_checkpoint(gemma3_path)
    spec = build_spec(checkpoint, 3000)
    given = EngineConfig(context_length=3000, max_running=4, kv_cache_dtype="int8", kv_cache_bytes=200 << 20)
    config = resolved(spec, checkpoint, given, "cuda")
    plan = plan_memory(spec, checkpoint, config, 1 << 30)
    device = interpreter_device()
    cache = KVMemory(spec, replace(config, max_running=1, prefix_cache=False), device)
    assert plan.contexts[-1].request_bytes == cache.size_bytes
    assert plan.contexts[-1].num_requests == (200 << 20) // cache.size_bytes
    compute = torch.float16  # of an int8 cache, on a GPU
    sizes = step_sizes(spec, config, tile_tokens(spec, config.kv_dtype, HOPPER, fixed=False))
    parts = max(MAX_PARTS, chunk_parts(spec, config.kv_dtype, HOPPER, fixed=False))
    assert plan.workspace_bytes == Workspace(spec, sizes, device, compute, parts).size_bytes
    heads = sum(layer.mixer.num_kv_heads * (layer.mixer.head_size * 34 // 32) for layer in spec.layers)
    assert plan.kv_bytes_per_token == 2 * heads, "a byte an element, and a scale of two for 32"


DENSE = Recipe(32, 2, 1, 64, 640, 48, windows=(None,), weights="Q8_0")
MIXTURE = replace(DENSE, feed_forward_size=128, experts=4, per_token=4, context_length=2048)


@pytest.mark.parametrize(
    ("recipe", "tokens", "decoded"),
    [(DENSE, 512, 1280 * 128 + 256), (MIXTURE, 512, 4 * 256 * 128 + 256), (MIXTURE, 256, 3 * (256 * 128 + 256))],
)
def test_weights_that_long_steps_decode_are_planned(recipe: Recipe, tokens: int, decoded: int) -> None:
    """Those of gate and up: bytes of blocks of 256 output features and 128 columns, and a scale for each 64; those of
    all experts where a step can have enough pairs of each, else of queries, keys and values."""
    spec, checkpoint = random_model(recipe)
    plain, decoding = (
        plan_memory(spec, checkpoint, resolved(spec, checkpoint, given, "cuda"), 1 << 30)
        for given in (
            EngineConfig(context_length=1024, max_step_tokens=tokens, prompt_dtype=each) for each in ("f16", "fp8")
        )
    )
    assert decoding.workspace_bytes - plain.workspace_bytes == decoded


def test_tables_of_layers_inputs_are_planned() -> None:
    spec, checkpoint = random_model(Recipe(weights="Q8_0", windows=(None, None), sources=(None, 0), input_size=64))
    config = resolved(spec, checkpoint, EngineConfig(context_length=512, max_running=2), "cuda")
    plan, without = (
        plan_memory(each, replace(checkpoint, tensors=tensors), config, 1 << 30)
        for each, tensors in ((spec, checkpoint.tensors), without_inputs(spec, checkpoint))
    )
    table = checkpoint.tensors["layer_table"]
    assert plan.embedding_bytes - without.embedding_bytes == table.data.nbytes
    tokens = step_sizes(spec, config, tile_tokens(spec, "bf16", HOPPER, fixed=False)).tokens
    assert plan.workspace_bytes - without.workspace_bytes == 4 * tokens * 2 * 64
    weights = Weights(spec, build_program(spec), checkpoint, interpreter_device())
    weights.load([], lambda _: None)
    assert isinstance(weights.layer_table, PlainMatrix)
    assert weights.layer_table.size_bytes == table.data.nbytes


def without_inputs(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[ModelSpec, dict[str, StoredTensor]]:
    """The same model where layers have no inputs of their own, and its tensors."""
    layers = tuple(replace(layer, input_gate=None) for layer in spec.layers)
    names = [name for name in spec.tensors if name.startswith("layer_") or ".input." in name]
    kept = {name: source for name, source in spec.tensors.items() if name not in names}
    stored = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in names}
    return replace(spec, layers=layers, layer_inputs=None, tensors=kept), stored


def test_graphs_take_what_they_took_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 1B on an H200, 256 rows, steps of 1,536 tokens: 74 graphs of steps, 75 of sampling, 15 of log-probabilities."""
    monkeypatch.setattr(shapes, "_ROWS", tuple(count for count in shapes._ROWS if count not in (80, 112)))  # as it was
    monkeypatch.setattr(shapes, "_FEW", (16, 32))  # likewise
    sizes = StepSizes(1536, 256, 256, 256 + 1536 // 64 + 1, 1, 320, 64)
    measured = (245_366_784 - 140_509_184) + 10_485_760 + 2_097_152
    assert graph_bytes(16, sizes) == pytest.approx(measured, rel=0.03)
    assert num_graphs(256) == 75 + 15
    few = StepSizes(512, 4, 32, 13, 1, 320, 64)
    assert graph_bytes(16, few) < 0.6 * graph_bytes(16, sizes)


def test_command_without_a_gpu(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(smollm2_path), "--device", "cuda"]
    assert run_app(app, [*arguments, "--memory", "1GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_dtype"] == "bf16"
    assert 0 < plan["graph_bytes"] < plan["reserved_bytes"]
    taken = plan["weight_bytes"] + plan["embedding_bytes"] + plan["workspace_bytes"] + plan["reserved_bytes"]
    assert plan["kv_limit_bytes"] == int(0.9 * ((1 << 30) - taken))
    assert run_app(app, [*arguments, "--memory", "64M"]) == 1
    captured = capsys.readouterr()
    assert ", and 64.0 MB are free" in captured.err
    lines = captured.out.splitlines()
    assert "do not fit" in lines[4]
    assert lines[lines.index("") + 2].endswith("none")
    assert "does not fit" in captured.out[captured.out.index("GPUs that compute") :]
    if not torch.cuda.is_available():
        assert run_app(app, arguments) == 1
        assert "no GPU can be used" in capsys.readouterr().err
