"""Models with matrices that a checkpoint stores as several tensors, from the file to logits; and their refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.grouped_format import HIDDEN, VOCABULARY, WIDTH, write_config, write_grouped_model
from cpu_runs import Runner
from quantization.stored_checkpoints import Stored, join_experts, random_matrix, write_model, write_model_opt_file
from quantization.test_stored_tensors import MICROSCALED
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
        Stored("gptq", group=32, ordered=True),
        Stored("packed", symmetric=True, scale="bfloat16"), Stored("packed", bits=8, group=64, symmetric=True),
        Stored("unpacked", bits=8, symmetric=True, group=0), Stored("fp8"), Stored("float", group=0, rows=0),
        Stored("nvfp4"), Stored("gptq", bits=8), Stored("unpacked", bits=8, group=64), *MICROSCALED[3:5],
    ],
    ids=str,
)  # fmt: skip
def test_a_whole_model_of_stored_tensors(stored: Stored, tmp_path: Path) -> None:
    check_whole_model(tmp_path, write_model(tmp_path, stored))


def test_columns_in_an_order_of_their_own_take_as_many_bytes(tmp_path: Path) -> None:
    found = []
    for ordered in (False, True):
        write_model(tmp_path, Stored("gptq", group=32, ordered=ordered))
        checkpoint = open_checkpoint(tmp_path)
        spec = build_spec(checkpoint)
        found.append(plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cpu")).weight_bytes)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("stored", "changes"), [(Stored("gptq", group=32), {"lm_head": True}), (Stored("fp8"), {})], ids=str
)
def test_a_head_of_stored_tensors(stored: Stored, changes: dict[str, Any], tmp_path: Path) -> None:
    made, weights = random_matrix(stored, VOCABULARY, HIDDEN, np.random.default_rng(3))
    head = {f"lm_head{suffix}": array for suffix, array in made.items()}
    others = write_model(tmp_path, stored, more=head, lacking={"lm_head.weight"} - head.keys(), **changes)
    check_whole_model(tmp_path, {**others, "lm_head.weight": weights})


def test_a_whole_mixture_of_stored_tensors(tmp_path: Path) -> None:
    check_whole_model(tmp_path, write_model(tmp_path, Stored("fp8"), mixture=True))


def test_experts_that_are_stored_as_one_tensor(tmp_path: Path) -> None:
    apart, joined = tmp_path / "apart", tmp_path / "joined"
    apart.mkdir()
    joined.mkdir()
    write_model(apart, Stored("fp8"), mixture=True)
    join_experts(apart, joined)
    found, expected, logits = {}, {}, []
    for folder, read in ((apart, expected), (joined, found)):
        checkpoint = open_checkpoint(folder)
        spec = build_spec(checkpoint)
        check_tensors(spec, checkpoint)
        read.update(load_tensors(spec, checkpoint))
        runner = Runner(spec, checkpoint, CONFIG)
        logits.append(runner.logits(list(range(19)), (14, 5)))
        runner.close()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    np.testing.assert_array_equal(*logits)


MIXED = {
    "self_attn.q_proj": Stored("modelopt", bits=8, group=0, rows=0), "mlp.down_proj": Stored("modelopt", bits=8),
    "self_attn.o_proj": MICROSCALED[5], "self_attn.v_proj": Stored("modelopt", bits=8, group=0, rows=1),
}  # fmt: skip
"""Of a model whose other matrices are in NVFP4, in ModelOpt's forms."""


def quantized_layers(**changes: str) -> dict[str, dict[str, str]]:
    """The algorithm of each module of a model that is stored so; that of a whole MLP, but for one of its matrices."""
    names = {"self_attn.k_proj": "NVFP4", "mlp": "W4A16_NVFP4"} | {name: each.algorithm for name, each in MIXED.items()}
    layers = {f"model.layers.{layer}.{name}": each for layer in (0, 1) for name, each in names.items()}
    return {name: {"quant_algo": each} for name, each in {**layers, **changes}.items()}


def write_mixed(folder: Path, *, alone: bool = False, **changes: str) -> Mapping[str, NDArray[np.float64]]:
    method = {"quant_algo": "MIXED_PRECISION", "quantized_layers": quantized_layers(**changes)}
    weights = write_model(folder, Stored("modelopt"), others=MIXED, **method)
    if alone:
        write_model_opt_file(folder, **method)
    return weights


@pytest.mark.parametrize("alone", [False, True])
def test_a_whole_model_that_modelopt_stored_in_mixed_precision(alone: bool, tmp_path: Path) -> None:
    check_whole_model(tmp_path, write_mixed(tmp_path, alone=alone))


def test_floats_behind_quantised_gates_wait_for_no_other_thread(tmp_path: Path) -> None:
    """Two threads go on with what they computed themselves: they give the bits of one, of tokens shared unevenly."""
    write_mixed(tmp_path)
    checkpoint, logits = open_checkpoint(tmp_path), []
    for threads in (1, 2):
        runner = Runner(build_spec(checkpoint), checkpoint, replace(CONFIG, threads=threads, max_step_tokens=64))
        logits.append(runner.logits([7 * each % VOCABULARY for each in range(50)], (50,)))
        runner.close()
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({DOWN: "NVFP4"}, rf"tensor '{DOWN}\.weight': is of type F8_E4M3, and config\.json names NVFP4 for it$"),
        ({"lm_head": "FP8"}, r"tensor 'lm_head\.weight': is of type F16, and config\.json names FP8 for it$"),
    ],
)
def test_modules_that_are_stored_in_another_algorithm_are_refused(
    changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    write_mixed(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        check(tmp_path)


def test_a_whole_model_of_several_groups_of_compressed_tensors(tmp_path: Path) -> None:
    stored, down = Stored("packed", group=32), Stored("packed", bits=8, symmetric=True)
    others = {
        "self_attn.q_proj": Stored("float", group=0, rows=1),
        "mlp.gate_proj": Stored("nvfp4"),
        "mlp.down_proj": down,
    }
    groups = [each.config["config_groups"]["group_0"] for each in (stored, *others.values())]
    method = {
        "format": "mixed-precision",
        "config_groups": {f"group_{place}": each for place, each in enumerate(groups)},
    }
    check_whole_model(tmp_path, write_model(tmp_path, stored, others=others, **method))


@pytest.mark.parametrize(
    ("stored", "changes", "suffixes"),
    [
        (Stored("awq"), {}, ["qweight", "qzeros", "scales"]),
        (Stored("gptq"), {"desc_act": True}, ["qweight", "qzeros", "scales", "g_idx"]),
        (Stored("packed"), {}, ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]),
        (Stored("packed", symmetric=True), {}, ["weight_packed", "weight_scale", "weight_shape"]),
        (Stored("unpacked", bits=8), {}, ["weight", "weight_scale", "weight_zero_point"]),
        (Stored("fp8"), {}, ["weight", "weight_scale_inv"]),
        (Stored("float", group=0, rows=1), {}, ["weight", "weight_scale"]),
        (Stored("nvfp4"), {}, ["weight_packed", "weight_scale", "weight_global_scale"]),
        (Stored("mxfp4"), {}, ["weight_packed", "weight_scale"]),
        (Stored("modelopt"), {}, ["weight", "weight_scale", "weight_scale_2"]),
    ],
    ids=str,
)
def test_no_tensor_of_a_matrix_is_forgotten(
    stored: Stored, changes: dict[str, Any], suffixes: list[str], tmp_path: Path
) -> None:
    for suffix in suffixes:
        write_model(tmp_path, stored, lacking=(f"{DOWN}.{suffix}",), **changes)
        with pytest.raises(CheckpointError, match=rf"tensor '{DOWN}\.\w+': missing {DOWN}\.{suffix}"):
            check(tmp_path)


@pytest.mark.parametrize(
    ("key", "listed", "reason"),
    [
        ("ignore", ["lm_head", DOWN], rf"names '{DOWN}', which is stored quantised$"),
        ("ignore", ["model.layers.1.mlp"], rf"names '{DOWN}', which is stored quantised$"),
        ("exclude_modules", ["model.layers.1.mlp.d*"], rf"names '{DOWN}', which is stored quantised$"),
        ("ignore", ["transformer.h.0.attn", "wte"], "names nothing of this checkpoint: 'transformer.h.0.attn'$"),
        ("ignore", "lm_head", "is no list of texts$"),
    ],
)
def test_lists_of_modules_that_the_tensors_contradict_are_refused(
    key: str, listed: Any, reason: str, tmp_path: Path
) -> None:
    write_model(tmp_path, Stored("modelopt"), **{key: listed})
    with pytest.raises(CheckpointError, match=rf"config\.json: key 'quantization_config\.{key}': {reason}"):
        check(tmp_path)


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
        match=r"quantised by 'hqq' .*in safetensors: float weights, auto-round, .*, grouped, modelopt, mxfp4, mxfp8;",
    ):
        check(tmp_path)
