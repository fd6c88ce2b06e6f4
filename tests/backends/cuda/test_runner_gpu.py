"""The whole GPU backend on a GPU: random models of every mixture of parts, every weight type, every architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from architecture_case import Form  # noqa: E402
from architectures import build_case, check_logits, rows_run_by  # noqa: E402
from backends.cuda.cuda_runs import GPURunner, load_gpu_runner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.device import Family  # noqa: E402
from realizar.backends.cuda.matmul import linears, tuning_table  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.models.generated.generate import generate_gguf  # noqa: E402
from realizar.quantization.convert import QUANTIZED_TYPES  # noqa: E402
from reference_model import FP8CacheModel, ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPES = {
    "q4_0-64-gqa2": Recipe(),
    "q4_k-80-gqa4-sinks": Recipe(80, 16, 4, weights="Q4_K", windows=(None, 270), parts=("sinks", "biases")),
    "q4_k-64-gqa4-wide": Recipe(
        64, 16, 4, hidden_size=1024, feed_forward_size=1536, weights="Q4_K", windows=(None,) * 3
    ),
    "q6_k-96-gqa1-cap": Recipe(96, 8, 8, weights="Q6_K", parts=("soft_cap", "qk_norm", "post_norms")),
    "q8_0-128-gqa8": Recipe(128, 8, 1, weights="Q8_0", windows=(300, None), parts=("token_norm",)),
    "iq4_nl-256-gqa3": Recipe(256, 3, 1, weights="IQ4_NL", parts=("partial_rope", "interleaved")),
    "q4_k-512-gqa8": Recipe(
        256,
        8,
        4,
        hidden_size=512,
        weights="Q4_K",
        windows=(270, None),
        full_head_size=512,
        activation="gelu_tanh",
        parts=("qk_norm", "value_norm", "k_is_v", "post_norms", "output_scale"),
    ),
    "q8_0-128-values": Recipe(weights="Q8_0", head_size=128, parts=("value_norm", "output_scale", "k_is_v")),
    "bf16-256-shared": Recipe(
        256,
        8,
        1,
        weights="BF16",
        windows=(40, None, 40, None),
        full_head_size=512,
        activation="gelu_tanh",
        parts=("qk_norm", "post_norms", "value_norm", "output_scale"),
        sources=(None, None, 0, 1),
        input_size=256,
    ),
    "q8_0-64-inputs": Recipe(
        weights="Q8_0",
        windows=(None, None),
        activation="gelu_tanh",
        parts=("qk_norm",),
        sources=(None, 0),
        input_size=256,
    ),
    "q4_k-64-gqa12": Recipe(64, 12, 1, weights="Q4_K", parts=("qk_norm",)),
    "q8_0-128-gqa16": Recipe(128, 16, 1, weights="Q8_0", windows=(270, None)),
    "bf16-64-gqa6": Recipe(64, 6, 1, weights="BF16", parts=("layer_norm", "ungated", "growth"), activation="gelu"),
}
TOLERANCE = {"f16": 0.03, "bf16": 0.035, "int8": 0.045, "fp8": 0.06}
"""Activations have eight bits, and the cache rounds; of fp8 the twin does, too, but for numbers between two others."""


def twin_of(kv: str) -> type[ReferenceModel]:
    return FP8CacheModel if kv == "fp8" else ReferenceModel


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    errors = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.nan_to_num(errors, nan=np.inf).max())


@pytest.mark.parametrize(
    ("kv", "without"),
    [*((kv, ()) for kv in TOLERANCE), ("bf16", ("wgmma",)), ("f16", ("wgmma",)), ("fp8", ("attention",))],
    ids=str,
)
@pytest.mark.parametrize("name", RECIPES)
def test_random_models(name: str, kv: str, without: tuple[Family, ...]) -> None:
    """Prompts of several lengths in chunks, token by token, and side by side over shuffled blocks."""
    recipe = RECIPES[name]
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(max_running=6, max_step_tokens=640, kv_cache_bytes=64 << 20, kv_cache_dtype=kv)  # type: ignore[arg-type]
    runner = GPURunner(spec, checkpoint, config, without=without)
    reference = twin_of(kv)(spec, load_tensors(spec, checkpoint), np.float64)
    prompts = [random_tokens(recipe, length, seed) for seed, length in enumerate((3, 37, 300, 530))]
    expected = [reference.logits(ids) for ids in prompts]
    assert worst(runner.logits(prompts[1], (14, 5, 3)), expected[1]) <= TOLERANCE[kv]
    assert worst(runner.logits(prompts[3]), expected[3]) <= TOLERANCE[kv]
    rng = np.random.default_rng(5)
    requests = [runner.request(row, ids, rng, first=20 * row) for row, ids in enumerate(prompts)]
    while left := [request for request in requests if request.computed < len(request.token_ids)]:
        chosen = [left[i] for i in rng.permutation(len(left))]
        runner.step([(r, int(min(len(r.token_ids) - r.computed, rng.choice([1, 2, 5, 33, 100])))) for r in chosen])
    for request, values in zip(requests, expected, strict=True):
        assert worst(request.values(), values) <= TOLERANCE[kv]
    runner.close()


@pytest.mark.parametrize("kv", TOLERANCE)
@pytest.mark.parametrize("name", ["q4_0-64-gqa2", "q4_k-64-gqa12"])
def test_decodes_before_and_after_their_kernels_change(name: str, kv: str) -> None:
    """Rows whose contexts grow past 2,048 tokens, where other graphs begin, alone and beside a short one."""
    # Windows' blocks would be taken by several of these rows.
    recipe = replace(RECIPES[name], windows=(None, None), context_length=2176)
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        max_running=3, max_step_tokens=512, context_length=2176, kv_cache_bytes=64 << 20, kv_cache_dtype=kv,  # type: ignore[arg-type]
    )  # fmt: skip
    runner = GPURunner(spec, checkpoint, config)
    reference = twin_of(kv)(spec, load_tensors(spec, checkpoint), np.float64)
    prompts = [random_tokens(recipe, length, seed) for seed, length in enumerate((2056, 40, 2064))]
    expected = [reference.logits(ids) for ids in prompts]
    requests = [runner.request(row, ids, first=70 * row) for row, ids in enumerate(prompts)]
    for request, first in zip(requests, (2040, 24, 2056), strict=True):
        while request.computed < first:
            runner.step([(request, min(512, first - request.computed))])
    for _ in range(8):  # the longest begins beyond the place, and one crosses it in these steps
        runner.step([(requests[0], 1), (requests[1], 1), (requests[2], 1)])
    for _ in range(8):
        runner.step([(requests[0], 1)])
    for _ in range(8):
        runner.step([(requests[1], 1)])
    for request, values in zip(requests, expected, strict=True):
        assert request.computed == len(request.token_ids)
        assert worst(request.values(), values) <= TOLERANCE[kv]
    runner.close()


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
@pytest.mark.parametrize("name", ["q4_k-64-gqa12", "q8_0-128-gqa16"])
def test_long_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that stay for many tiles, and of sums in halves, beside a decode and after another chunk."""
    seen: list[bool] = []
    route = MatmulKernels.route_merged

    def noted(*arguments: Any) -> MatmulConfig:
        seen.append((config := route(*arguments)).halves)
        return config

    monkeypatch.setattr(MatmulKernels, "route_merged", noted)
    recipe = replace(RECIPES[name], windows=(None, 300), hidden_size=768, context_length=2176)
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        max_running=2, max_step_tokens=1536, context_length=2176, kv_cache_bytes=64 << 20, kv_cache_dtype="f16"
    )
    runner = GPURunner(spec, checkpoint, config)
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    prompts = [random_tokens(recipe, length, seed) for seed, length in enumerate((30, 2100))]
    short, long = (runner.request(row, ids, first=40 * row) for row, ids in enumerate(prompts))
    runner.step([(short, 29)])
    runner.step([(long, 1030)])
    runner.step([(short, 1), (long, 1070)])
    assert any(seen)
    for request in (short, long):
        assert worst(request.values(), reference.logits(request.token_ids)) <= TOLERANCE["f16"]
    runner.close()


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
@pytest.mark.parametrize("name", ["q4_0-64-gqa2", "q6_k-96-gqa1-cap", "q8_0-128-gqa8", "iq4_nl-256-gqa3"])
def test_matmuls_with_an_activation_epilogue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epilogue is forced in models that are too small for it to pay."""
    seen: set[int] = set()
    launch = linears.launch_gated

    def launch_gated(*arguments: Any) -> None:
        seen.add(arguments[4])
        launch(*arguments)

    monkeypatch.setattr(tuning_table, "_LEAST_FILLED", 0.0)
    monkeypatch.setattr(linears, "launch_gated", launch_gated)
    test_random_models(name, "f16", ())
    assert {1, 2, 4, 16, 640} <= seen  # rows: of graphs, the first two of integers, of a chunk, of more than a block


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda ggml_type: ggml_type.name)
def test_weight_types(ggml_type: GGMLType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate_gguf("tiny", path, ggml_type)
    runner = load_gpu_runner(path, EngineConfig(max_running=1, context_length=128))
    ids = np.random.default_rng(7).integers(0, 512, 61).tolist()
    found = runner.logits(ids, (14, 5, 40))
    expected = ReferenceModel(runner.spec, load_tensors(runner.spec, open_checkpoint(path)), np.float64).logits(ids)
    runner.close()
    assert worst(found, expected) <= 0.03


@pytest.mark.parametrize(("name", "form"), rows_run_by("cuda"))
def test_logits_agree_with_transformers(name: str, form: Form, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="parity is against transformers")
    if form == "gguf":
        pytest.importorskip("gguf", reason="conversion needs gguf")
    built = build_case(name, tmp_path, form)
    config = EngineConfig(block_size=32, max_step_tokens=64, max_running=2)
    runner = load_gpu_runner(built.path, config, built.context_length)
    assert runner.capacity.kv_cache_dtype == "f32"
    check_logits(built, lambda ids: runner.logits(ids, (5, 1, 7)))
    runner.close()


@pytest.mark.parametrize("name", ["q4_0-64-gqa2", "q4_k-64-gqa4-wide", "q4_k-512-gqa8", "bf16-256-shared"])
def test_batch_invariant(name: str) -> None:
    """A row's logits have the same bits alone and in any batch."""
    recipe = RECIPES[name]
    config = EngineConfig(max_running=8, max_step_tokens=640, kv_cache_bytes=64 << 20, batch_invariant=True)
    runner = GPURunner(*random_model(recipe), config)
    prompts = [random_tokens(recipe, 100, seed) for seed in range(8)]
    alone = []
    for ids in prompts:
        request = runner.request(0, ids)
        runner.step([(request, 90)])
        while request.computed < 100:
            runner.step([(request, 1)])
        alone.append(request.values())
    requests = [runner.request(row, ids, first=10 * row) for row, ids in enumerate(prompts)]
    for count in (2, 6, 8):
        runner.step([(request, 90) for request in requests[:count] if not request.computed])
    for _ in range(10):
        runner.step([(request, 1) for request in requests])
    for request, values in zip(requests, alone, strict=True):
        assert np.array_equal(request.values().view(np.uint32), values.view(np.uint32))
    runner.close()
