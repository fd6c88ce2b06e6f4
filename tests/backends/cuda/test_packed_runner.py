"""The whole GPU backend over packed matrices: kernels interpreted, matmuls by their twins in numpy."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backend_runs import Request  # noqa: E402
from backends.cuda.cuda_runs import GPURunner, load_gpu_runner  # noqa: E402
from backends.cuda.matmul.packed_matmuls import run_packed  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.matmul import tuning_table  # noqa: E402
from realizar.checkpoint.checkpoint import StoredTensor  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.models.generated.generate import generate_gguf  # noqa: E402
from realizar.quantization.random_blocks import random_blocks  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from wider import wider  # noqa: E402

SMALL = Recipe(32, 2, 1, 64, 128, 48, windows=(None,), weights="Q8_0")
CONFIG = EngineConfig(
    threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16"
)


def run(recipe: Recipe, gated: bool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Chunks, and decodes beside a chunk and each other, their logits checked; returns what matmuls ran."""
    monkeypatch.setattr(tuning_table, "_LEAST_FILLED", 0.0 if gated else 1e9)
    launched = run_packed(monkeypatch)
    spec, checkpoint = random_model(recipe)
    runner = GPURunner(spec, checkpoint, config)
    ids, others = random_tokens(recipe, 19, 1), random_tokens(recipe, 7, 2)
    first, second = runner.request(0, ids), runner.request(1, others, first=2)
    runner.step([(first, 17)])
    runner.step([(first, 1), (second, 6)])
    runner.step([(first, 1), (second, 1)])
    check_logits(ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64), (first, second))
    runner.close()
    assert launched.norms.count(True) >= 3
    return launched.names


def check_logits(reference: ReferenceModel, requests: Iterable[Request]) -> None:
    """Those of all tokens computed so far."""
    for request in requests:
        values = request.values()
        expected = reference.logits(request.token_ids)[: len(values)]
        error = np.linalg.norm(values - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() <= 0.03


@pytest.mark.parametrize("activation", wider(("silu", "gelu_tanh", "gelu", "relu_squared"), "gelu_tanh"))
def test_matmuls_have_an_activation_epilogue(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(SMALL, activation=activation)
    launched = run(recipe, True, CONFIG, monkeypatch)
    gated = {name for name in launched if f"_{activation}_tokens" in name}
    assert {name.rpartition("tokens")[2] for name in gated if name.startswith("wgmma")} == {"8", "32"}
    assert {name.rpartition("tokens")[2] for name in gated if name.startswith("matvec")} == {"2"}


def test_gate_and_up_by_turns_and_their_activation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = run(SMALL, False, CONFIG, monkeypatch)
    assert not any("silu" in name for name in launched)


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        (dataclasses.replace(SMALL, parts=("biases",)), CONFIG),
        pytest.param(dataclasses.replace(SMALL, parts=("ungated",)), CONFIG, marks=pytest.mark.full),
        pytest.param(dataclasses.replace(SMALL, feed_forward_size=96), CONFIG, marks=pytest.mark.full),
        # Activations where the input is.
        pytest.param(dataclasses.replace(SMALL, feed_forward_size=64), CONFIG, marks=pytest.mark.full),
    ],
    ids=["biases", "no gate", "part of a strip", "as wide as the input"],
)
def test_what_does_not_end_with_it(recipe: Recipe, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = run(recipe, True, config, monkeypatch)
    assert launched
    assert not any("silu" in name for name in launched)


def test_fixed_order_has_an_epilogue_for_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = run(SMALL, True, dataclasses.replace(CONFIG, batch_invariant=True), monkeypatch)
    gated = {name.rpartition("tokens")[2] for name in launched if "_silu_tokens" in name}
    assert gated == {name.rpartition("tokens")[2] for name in launched} == {"8", "32"}


ADDING = {
    "plain": (SMALL, CONFIG, 2),
    "two layers": (dataclasses.replace(SMALL, windows=(None, 5)), CONFIG, 4),
    "biases": (dataclasses.replace(SMALL, parts=("biases",)), CONFIG, 2),
    "layer norms": (dataclasses.replace(SMALL, parts=("layer_norm",)), CONFIG, 2),  # which the matmuls do not begin
    "post norms": (dataclasses.replace(SMALL, parts=("post_norms",)), CONFIG, 0),
    "batch-invariant": (SMALL, dataclasses.replace(CONFIG, batch_invariant=True), 0),
}


@pytest.mark.parametrize("name", wider(ADDING, "biases", "batch-invariant"))
def test_few_tokens_add_to_the_stream_where_no_norm_lies_between(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O and down of steps of one row and of two, in turn with each other and with chunks."""
    recipe, config, adding = ADDING[name]
    monkeypatch.setattr(tuning_table, "_LEAST_FILLED", 0.0)
    launched = run_packed(monkeypatch)
    spec, checkpoint = random_model(recipe)
    runner = GPURunner(spec, checkpoint, config)
    first, second = (runner.request(row, random_tokens(recipe, 12, row), first=2 * row) for row in range(2))
    counts = []
    for step in (
        [(first, 6)],
        [(first, 1)],
        [(second, 8)],
        [(first, 1), (second, 1)],
        [(second, 1)],
        [(first, 2), (second, 1)],
    ):
        launched.names.clear()
        runner.step(step)
        counts.append(sum(count for each, count in launched.names.items() if "residual" in each))
    assert counts == [0, adding, 0, adding, adding, 0]
    check_logits(ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64), (first, second))
    runner.close()


FLOATS: dict[str, tuple[str, ...]] = {
    "all": ("q", "k", "v", "o", "gate", "up", "down", "head"),
    "after the stream": ("q", "k", "v", "head"),  # quantised o and down add to it, and begin no norm in integers
    "beside codes": ("v", "up"),
    "after the activation": ("down",),
}


@pytest.mark.parametrize("name", wider(FLOATS, "all", "beside codes"))
def test_floats_are_packed_beside_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk, a step of one row, and both, with matrices in fp16 among those in Q8_0; `all` in fixed order."""
    monkeypatch.setattr(tuning_table, "_LEAST_FILLED", 0.0)
    launched = run_packed(monkeypatch)
    spec, checkpoint = random_model(SMALL)
    rng, tensors = np.random.default_rng(4), dict(checkpoint.tensors)
    for each in tensors.values():
        if each.name.removesuffix(".weight").split(".")[-1] in FLOATS[name]:
            out_features, cols = each.shape
            data = random_blocks(GGMLType.F16, out_features, cols, rng, cols**-0.5)
            tensors[each.name] = StoredTensor(each.name, GGMLType.F16, each.shape, data, each.path, 0)
    checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    runner = GPURunner(spec, checkpoint, dataclasses.replace(CONFIG, batch_invariant=name == "all"))
    first, second = (runner.request(row, random_tokens(SMALL, 12, row), first=2 * row) for row in range(2))
    for step in ([(first, 6)], [(first, 1)], [(first, 1), (second, 3)]):
        runner.step(step)
    check_logits(ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64), (first, second))
    runner.close()
    assert any("floats" in kernel for kernel in launched.names)
    assert not any("matvec" in kernel and "floats" in kernel for kernel in launched.names)
    assert any("matvec" in kernel for kernel in launched.names) == (name != "all")


def test_a_model_of_mixed_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Q4_K_M from a file: Q4_K beside Q6_K within a merged matmul and from layer to layer, the head in Q6_K.

    And the log, where asked, says how each matmul runs.
    """
    caplog.set_level(logging.DEBUG, "realizar.backends.cuda")
    path = tmp_path / "mixed.gguf"
    generate_gguf("tiny", path, "q4_k_m")
    monkeypatch.setattr(tuning_table, "_LEAST_FILLED", 0.0)
    launched = run_packed(monkeypatch)
    runner = load_gpu_runner(path, dataclasses.replace(CONFIG, max_step_tokens=16))
    groups = runner.backend.model.weights.groups
    types = {
        name: matrix.format.bits for key, group in groups.items() for name, matrix in zip(key, group, strict=False)
    }  # type: ignore[union-attr]
    assert set(types.values()) == {4, 6}
    assert any(len({matrix.format for matrix in group}) > 1 for group in groups.values()), "merged, and of two types"  # type: ignore[union-attr]
    ids = np.random.default_rng(3).integers(0, 512, 7).tolist()
    request = runner.request(0, ids)
    for count in (5, 1, 1):
        runner.step([(request, count)])
    reference = ReferenceModel(runner.spec, load_tensors(runner.spec, open_checkpoint(path)), np.float64)
    check_logits(reference, (request,))
    assert {name.split("_")[0] for name in launched.names} >= {"matvec", "wgmma"}
    assert "the KV cache holds f16" in caplog.text
    assert re.search(r"matmul of 256 columns to \d+, by tokens: 1: int8 by MatvecTiles", caplog.text)
    assert re.search(r"half by WgmmaTiles.* with the activation epilogue", caplog.text)
    runner.close()
