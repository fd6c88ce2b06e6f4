"""Models with matrices that a checkpoint stores as several tensors, from the file to logits; and their refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.grouped_format import HIDDEN, VOCABULARY, WIDTH, write_config, write_grouped_model
from cpu_runs import Runner
from quantization.stored_checkpoints import Stored, write_model
from realizar.backends.cpu.plan import plan_memory
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from resolving import resolved

CONFIG = EngineConfig(threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=4 << 20, context_length=64)
DOWN = "model.layers.1.mlp.down_proj"


def check_whole_model(folder: Path, weights: Mapping[str, NDArray[np.float64]]) -> None:
    """The reference and the backend read the numbers that were written, and the backend computes with them."""
    checkpoint = open_checkpoint(folder)
    spec = build_spec(checkpoint)
    tensors = load_tensors(spec, checkpoint)
    for name, place in spec.tensors.items():
        if place.name in weights:
            parts = [weights[each][place.first_out_feature :][: place.shape[-2]] for each in place.names]
            expected = np.stack(parts) if place.stack else parts[0]
            np.testing.assert_allclose(tensors[name], expected, rtol=1e-6, atol=1e-7)
    assert {name for place in spec.tensors.values() for name in place.names} >= weights.keys()
    runner = Runner(spec, checkpoint, CONFIG)
    ids = [int(each) for each in np.random.default_rng(1).integers(0, VOCABULARY, 19)]
    found, expected = runner.logits(ids, (14, 3)), ReferenceModel(spec, tensors, np.float64).logits(ids)
    assert (np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max() <= 0.03
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cpu"))
    assert plan.weight_bytes == runner.capacity.weight_bytes
    runner.close()


@pytest.mark.parametrize("order", ["words", "bytes"])
def test_a_whole_model(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_whole_model(tmp_path, write_grouped_model(tmp_path, order, monkeypatch))


@pytest.mark.parametrize(
    "stored",
    [
        Stored("awq"), Stored("gptq", group=32), Stored("gptq", symmetric=True, group=0), Stored("packed", group=32),
        Stored("packed", symmetric=True, scale="bfloat16"), Stored("packed", bits=8, group=64, symmetric=True),
        Stored("unpacked", bits=8, symmetric=True, group=0), Stored("fp8"), Stored("float", group=0, rows=0),
        Stored("nvfp4"), Stored("gptq", bits=8), Stored("unpacked", bits=8, group=64),
    ],
    ids=str,
)  # fmt: skip
def test_a_whole_model_of_stored_tensors(stored: Stored, tmp_path: Path) -> None:
    check_whole_model(tmp_path, write_model(tmp_path, stored))


def test_a_whole_mixture_of_stored_tensors(tmp_path: Path) -> None:
    check_whole_model(tmp_path, write_model(tmp_path, Stored("fp8"), mixture=True))


def check(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    check_tensors(build_spec(checkpoint), checkpoint)


def test_strict_loading_of_all_tensors_of_a_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking, odd = {f"{DOWN}.scales": None}, {f"{DOWN}.g_idx": np.zeros(HIDDEN, np.int32)}
    left_over = {f"{DOWN}.input_scale": np.zeros(4, np.uint8), "mask": np.zeros(4, np.bool_)}
    narrow = {f"{DOWN}.qweight": np.zeros((WIDTH, 8), np.int32)}
    narrow |= {f"{DOWN}.{name}": np.zeros((4, 64), np.float16) for name in ("scales", "minima")}
    wrong_type = {f"{DOWN}.qweight": np.zeros((WIDTH, 16), np.uint8)}
    for changes, message in (
        (lacking, rf"tensor '{DOWN}\.scales': missing {DOWN}\.scales$"),
        (left_over, rf"tensor '{DOWN}\.input_scale': unexpected {DOWN}\.input_scale, mask$"),
        (odd, rf"tensor '{DOWN}\.g_idx': unexpected {DOWN}\.g_idx$"),
        (narrow, rf"tensor '{DOWN}\.weight': misshaped {DOWN}\.weight \(64, 256\) in place of \(128, 256\)$"),
        (wrong_type, rf"model\.safetensors: tensor '{DOWN}\.qweight': codes of type U8$"),
    ):
        write_grouped_model(tmp_path, "words", monkeypatch, **changes)
        with pytest.raises(CheckpointError, match=message):
            check(tmp_path)


def test_a_matrix_that_the_format_does_not_take_is_refused_by_file_tensor_and_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = np.zeros((VOCABULARY, HIDDEN), np.uint16)
    write_grouped_model(tmp_path, "bytes", monkeypatch, lm_head__weight=head)
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.safetensors: tensor 'lm_head\.weight': weights of type U16 are not supported$",
    ):
        check(tmp_path)


def test_methods_and_parameters_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_grouped_model(tmp_path, "words", monkeypatch)
    write_config(tmp_path, order="words", bits=3)
    with pytest.raises(UnsupportedModelError, match=r"key 'quantization_config\.bits': unsupported value 3$"):
        check(tmp_path)
    write_config(tmp_path, quant_method="hqq")
    with pytest.raises(
        UnsupportedModelError,
        match=r"quantised by 'hqq' .*in safetensors: float weights, awq, .*, fp8, gptq, grouped, modelopt, mxfp4;",
    ):
        check(tmp_path)
