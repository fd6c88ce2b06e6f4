"""A layout of no ggml type on the CPU: packed from planes, multiplied, embedded, planned, and a whole model of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from backends.cpu.kernels.linear_harness import HOST_SETS, check_matmul, random_activations
from backends.cpu.packed import pack
from backends.grouped_source import exact_weights, grouped_layout, grouped_model, grouped_source
from cpu_runs import Runner
from random_models import Recipe, random_tokens
from realizar.backends.cpu.plan import plan_memory
from realizar.backends.cpu.weights import pack as packing
from realizar.backends.cpu.weights.load import EmbeddingRows
from realizar.config import EngineConfig
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.source import random_source
from resolving import resolved

CONFIG = EngineConfig(threads=1, max_running=2, max_step_tokens=64, kv_cache_bytes=8 << 20, context_length=64)


@pytest.mark.parametrize("group", [pytest.param(64, marks=pytest.mark.full), 128])
@pytest.mark.parametrize("instruction_set", HOST_SETS[:1])
def test_matmul_is_float64s(instruction_set: str, group: int) -> None:
    """The matmuls of the matrix, and of a shard that is cut by out_features and by columns, agree with float64."""
    rng = np.random.default_rng(1)
    source = grouped_source(40, 4 * group, group)
    np.testing.assert_allclose(source.dequantize(), exact_weights(source), rtol=1e-6, atol=1e-7)
    check_matmul(instruction_set, source, random_activations(14, 4 * group, rng))
    shard = source.slice_out_features(5, 39).slice_columns(group, 3 * group)
    np.testing.assert_allclose(shard.dequantize(), exact_weights(source)[5:39, group : 3 * group], rtol=1e-6, atol=1e-7)
    check_matmul(instruction_set, shard, random_activations(3, 2 * group, rng))


_LAYOUTS = {
    "two levels": replace(grouped_layout(64), scale="u8", super_group_size=256, block_size=256),
    "wide": replace(grouped_layout(256), bits=6, offset=16, minimum=False),
    "bytes": replace(grouped_layout(32), bits=8, offset=128, minimum=False),
    "halves": replace(grouped_layout(16), bits=5, offset=8, minimum=True),
    "nibbles": replace(grouped_layout(32), bits=3, scale="u4", super_group_size=128, block_size=128),
    "powers of two": replace(grouped_layout(64), minimum=False, offset=8, scale="e8m0"),
}
_FEW = ("two levels",)


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.full] * (each not in _FEW)) for each in _LAYOUTS]
)
def test_parameters_that_no_ggml_type_puts_together(case: str) -> None:
    layout = _LAYOUTS[case]
    rng = np.random.default_rng(2)
    source = random_source(layout, 21, 512, rng, 0.05)
    check_matmul(HOST_SETS[0], source, random_activations(5, 512, rng))


def test_threads_pack_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = grouped_source(200, 256, 128)
    want = pack(source, 16)
    monkeypatch.setattr(packing, "_PIECE_BYTES", 5000)
    with ThreadPoolExecutor(3) as pool:
        got = pack(source, 16, pool)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.supers, want.supers)
    assert got.size_bytes == 208 * 256 // 128 * (64 + 4)


def test_rows_of_an_embedding() -> None:
    source, out = grouped_source(24, 128, 64), np.empty((3, 128), np.float32)
    EmbeddingRows(source).read(np.array([23, 0, 9], np.int32), 2.0, out)
    np.testing.assert_array_equal(out, 2 * source.dequantize()[[23, 0, 9]])


def test_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(weights="Q4_0", windows=(None,), parts=("biases", "qk_norm"))
    spec, checkpoint, reference = grouped_model(recipe, 128, monkeypatch)
    runner = Runner(spec, checkpoint, CONFIG)
    ids = random_tokens(recipe, 21)
    found, expected = runner.logits(ids, (14, 5)), reference.logits(ids)
    runner.close()
    error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= 0.03
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cpu"))
    assert plan.weight_bytes == runner.capacity.weight_bytes


def test_weights_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint, _ = grouped_model(Recipe(windows=(None,)), 64, monkeypatch)
    from realizar.backends import weight_tensors

    weight_tensors.tensor_source(checkpoint, "layers.0.up.weight")._minima[0, 300] = np.inf  # type: ignore[attr-defined]
    named = r"^grouped\.safetensors: tensor 'layers\.0\.up\.weight': a minimum of out_feature 300 is not finite$"
    with pytest.raises(CheckpointError, match=named):
        Runner(spec, checkpoint, CONFIG)


def test_a_model_in_a_layout_that_no_kernel_expresses_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint, _ = grouped_model(Recipe(windows=(None,)), 64, monkeypatch, bits=7)
    named = r"^tensor 'layers\.0\.q\.weight': weights in the layout GROUPED64 do not run on the CPU: codes have 7 bits$"
    with pytest.raises(UnsupportedModelError, match=named):
        plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cpu"))
    with pytest.raises(UnsupportedModelError, match=named):
        Runner(spec, checkpoint, CONFIG)
