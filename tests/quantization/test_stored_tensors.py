"""Integers and floats of eight bits in safetensors checkpoints: their weights, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quantization.stored_checkpoints import (
    Stored,
    random_matrix,
    write_checkpoint,
    write_model,
    write_model_opt_file,
)
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from realizar.quantization.source import MatrixSource
from realizar.quantization.tensors import expert_source, stored_names, tensor_layout, tensor_shape, tensor_source

MICROSCALED = [
    Stored("mxfp8", group=32, rows=1, scale="uint8"), Stored("fp8", group=32, rows=1, scale="e8m0"),
    Stored("fp8", scale="e8m0"), Stored("float", group=32, rows=1, scale="uint8"), Stored("mxfp4"),
    Stored("modelopt", bits=8, group=32, rows=1, scale="uint8"),
]  # fmt: skip
FORMS = [
    Stored("awq"), Stored("awq", group=32), Stored("awq", group=0, scale="bfloat16"),
    Stored("gptq"), Stored("gptq", symmetric=True), Stored("gptq", bits=8, group=32, symmetric=True, scale="float32"),
    Stored("gptq_v2", group=64), Stored("gptq_v2", bits=8, symmetric=True, group=0),
    Stored("packed", group=32), Stored("packed", symmetric=True, scale="bfloat16"),
    Stored("packed", bits=8, group=0, symmetric=True),
    Stored("packed", scale="float32"), Stored("unpacked", bits=8, group=64, scale="float32"),
    Stored("awq", group=32, scale="float32"), Stored("gptq", bits=8, group=0, scale="float32"),
    Stored("gptq", bits=8, group=32), Stored("gptq_v2", bits=8), Stored("packed", bits=8), Stored("unpacked", bits=8),
    Stored("unpacked", bits=8, symmetric=True, group=0), Stored("unpacked", bits=8, group=64, symmetric=True),
    Stored("fp8", scale="float32"), Stored("fp8", scale="bfloat16"), Stored("fp8", group=0, rows=0),
    Stored("float", group=0, rows=1, scale="bfloat16"), Stored("float", group=0, rows=0, scale="float32"),
    Stored("float", scale="float32"), Stored("float", group=0, rows=1), Stored("nvfp4"),
    Stored("nvfp4", scale="float32"), Stored("modelopt"), Stored("modelopt", scale="float32"),
    Stored("modelopt", bits=8, group=0, rows=0, scale="float32"), Stored("modelopt", bits=8, scale="float32"),
    Stored("modelopt", bits=8, group=0, rows=1, scale="bfloat16"), *MICROSCALED,
    Stored("gptq", ordered=True), Stored("gptq_v2", bits=8, group=32, symmetric=True, ordered=True),
    Stored("packed", ordered=True), Stored("packed", bits=8, symmetric=True, scale="bfloat16", ordered=True),
    Stored("unpacked", bits=8, group=64, ordered=True),
]  # fmt: skip
_E4M3 = np.dtype("V1")
NAME = "model.layers.1.mlp.down_proj"


def opened(folder: Path, stored: Stored, tensors: dict[str, NDArray[Any]]) -> Checkpoint:
    write_checkpoint(folder, {f"{NAME}{suffix}": array for suffix, array in tensors.items()}, stored.config)
    return open_checkpoint(folder)


@pytest.mark.parametrize("stored", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(64, 256), (24, 384)], ids=str)
def test_weights(stored: Stored, shape: tuple[int, int], tmp_path: Path) -> None:
    """Rounded once, whole and in runs that begin and end within a word; of NVFP4 with a factor of its own twice.

    In act-order they are halves.
    """
    tensors, weights = random_matrix(stored, *shape, np.random.default_rng(3))
    checkpoint, name = opened(tmp_path, stored, tensors), f"{NAME}.weight"
    assert set(stored_names(checkpoint, name)) == set(checkpoint.tensors)
    assert tensor_shape(checkpoint, name) == shape
    source = tensor_source(checkpoint, name)
    assert source.layout == tensor_layout(checkpoint, name)
    assert (source.raw is None) == (stored.method != "mxfp4" and not stored.ordered)
    twice = stored.scale == "float32" and stored.is_nvfp4
    most = 2**-23 * np.abs(weights).max() if twice else 0.0
    same = partial(np.testing.assert_allclose, rtol=0, atol=most)
    same(source.dequantize(), weights.astype(np.float32))
    same(source.read(3, 21), weights[3:21].astype(np.float32))
    unit = source.layout.block_size
    part = source.slice_out_features(5, 23).slice_columns(unit, 2 * unit)
    same(part.dequantize(), weights[5:23, unit : 2 * unit].astype(np.float32))
    heads = source.every(2, 8, 3)
    same(heads.read(1, 8), weights.reshape(-1, 8, shape[1])[:, 2:5].reshape(-1, shape[1])[1:8].astype(np.float32))
    apart = source.column_runs([(0, unit), (shape[1] - unit, shape[1])])
    same(apart.dequantize(), np.delete(weights, np.s_[unit : shape[1] - unit], axis=1).astype(np.float32))
    assert source.find_not_finite(0, shape[0]) is None
    check_ordered(source, weights, ordered=stored.ordered)
    source.prefetch()
    source.release(0, shape[0])


def check_ordered(source: MatrixSource, weights: NDArray[np.float64], *, ordered: bool) -> None:
    """What is in act-order alone is there with its columns sorted too, packed and not rounded to halves."""
    assert (source.ordered is not None) == ordered
    if source.ordered is not None:
        by_group, order = source.ordered
        assert (by_group.layout.has_integers, source.layout.float_type) == (True, "f16")
        found = by_group.dequantize()
        np.testing.assert_array_equal(found.astype(np.float16), weights[:, order].astype(np.float16))
        np.testing.assert_array_equal(by_group.planes(3, 21).dequantize(), found[3:21])
        assert by_group.find_not_finite(0, len(weights)) is None


@pytest.mark.parametrize("rows", [128, 0])
def test_a_stack_of_matrices(rows: int, tmp_path: Path) -> None:
    """Of out_features that are no whole number of blocks, with scales by blocks or one a matrix."""
    stored, rng = Stored("fp8", group=rows, rows=rows, scale="float32"), np.random.default_rng(3)
    tensors, weights = zip(*(random_matrix(stored, 72, 256, rng) for _ in range(3)), strict=True)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    codes, scales = (np.stack([each[suffix] for each in tensors]) for suffix in (".weight", ".weight_scale_inv"))
    write_checkpoint(tmp_path, {name: codes, f"{name}_scale_inv": scales}, stored.config)
    checkpoint = open_checkpoint(tmp_path)
    assert tensor_shape(checkpoint, name) == (3, 72, 256)
    for expert, expected in enumerate(weights):
        found = expert_source(checkpoint, name, expert)
        np.testing.assert_array_equal(found.read(5, 70), expected[5:70].astype(np.float32))


@pytest.mark.parametrize(("value", "reason"), [(np.nan, "is not finite"), (0, "is 0, and its numbers are not")])
@pytest.mark.parametrize("method", ["awq", "gptq", "packed", "unpacked", "float"])
def test_scales_that_are_not_finite_or_zero_are_refused(method: str, value: float, reason: str, tmp_path: Path) -> None:
    stored = Stored(method, bits=8, symmetric=True) if method == "unpacked" else Stored(method)
    if stored.is_float:
        stored = Stored(method, group=0, rows=1)
    tensors, _ = random_matrix(stored, 16, 256, np.random.default_rng(1))
    scales = tensors[".weight_scale" if ".weight_scale" in tensors else ".scales"]
    (scales if scales.shape[0] == 16 else scales.T)[9, 0] = value
    source = tensor_source(opened(tmp_path, stored, tensors), f"{NAME}.weight")
    source.check_finite(0, 9)
    with pytest.raises(CheckpointError, match=rf"tensor '{NAME}\.weight': a scale of out_feature 9 {reason}$"):
        source.check_finite(8, 16)


def test_a_scale_of_zero_goes_with_numbers_that_are_zero(tmp_path: Path) -> None:
    stored = Stored("unpacked", bits=8, symmetric=True)
    tensors, _ = random_matrix(stored, 16, 256, np.random.default_rng(1))
    tensors[".weight_scale"][9, 0], tensors[".weight"][9, :128] = 0, 0
    tensor_source(opened(tmp_path, stored, tensors), f"{NAME}.weight").check_finite(0, 16)


@pytest.mark.parametrize(
    ("stored", "suffix", "array", "message"),
    [
        (Stored("awq"), ".qweight", np.zeros((256, 8), np.float32), "is of type F32, and not I32"),
        (Stored("awq"), ".qzeros", np.zeros((2, 4), np.int32), r"has the shape \(2, 4\), and not \(2, 8\)"),
        (Stored("awq"), ".scales", np.zeros((2, 60), np.float16), r"has the shape \(2, 60\), and not \(2, 64\)"),
        (Stored("awq"), ".scales", np.zeros((2, 64), np.int32), "is of type I32, and not of floats"),
        (Stored("awq"), ".scales", np.zeros(128, np.float16), r"has the shape \(128,\), and is not a matrix"),
        (Stored("gptq"), ".scales", np.zeros((3, 64), np.float16), r"has the shape \(2, 8\), and not \(3, 8\)"),
        (Stored("gptq"), ".qzeros", np.zeros((2, 6), np.int32), "has 6 words for 64 out_features, of 3 bits each"),
        (Stored("gptq"), ".g_idx", np.zeros(255, np.int32), r"has the shape \(255,\), and not \(256,\)"),
        (Stored("gptq"), ".g_idx", np.full(256, 2, np.int32), "has the groups 2 to 2, of 2"),
        (Stored("gptq"), ".g_idx", np.full(256, -1, np.int32), "has the groups -1 to -1, of 2"),
        (Stored("packed"), ".weight_packed", np.zeros((64, 32), np.uint32), "is of type U32, and not I32"),
        (Stored("packed"), ".weight_shape", np.zeros(3, np.int64), r"has the shape \(3,\), and not \(2,\)"),
        (Stored("packed"), ".weight_shape", np.array([64, 250]), r"says \[64, 250\], and the codes are of \[64, 256\]"),
        (Stored("packed", symmetric=True), ".weight_scale", np.zeros((64, 3), np.float16), "3 groups of 256 columns"),
        (Stored("packed"), ".weight_scale", np.zeros((63, 2), np.float16), r"has the shape \(63, 2\), and not"),
        (Stored("packed"), ".weight_zero_point", np.zeros((64, 2), np.int32), r"\(64, 2\), and not \(8, 2\)"),
        (Stored("unpacked", bits=8), ".weight", np.zeros((64, 256), np.uint8), "is of type U8, and not I8"),
        (Stored("unpacked", bits=8), ".weight_zero_point", np.zeros((64, 2), np.int32), "of type I32, and not I8"),
        (Stored("float"), ".weight", np.zeros((64, 256), np.int8), "is of type I8, and no group .* is of int"),
        (Stored("unpacked", bits=8), ".weight", np.zeros((64, 256), _E4M3), "F8_E4M3, and no group .* is of float"),
        (Stored("fp8"), ".weight", np.zeros((64, 256), np.uint8), "is of type U8, and not F8_E4M3"),
        (Stored("fp8"), ".weight_scale_inv", np.zeros((1, 3), np.float32), r"\(1, 3\), and the weights \(64, 256\)"),
        (Stored("fp8"), ".weight_scale_inv", np.zeros((1, 2), np.uint8), "is of type U8, and not of floats"),
        (Stored("nvfp4"), ".weight_packed", np.zeros((64, 128), np.int8), "is of type I8, and not U8"),
        (
            Stored("nvfp4"),
            ".weight_packed",
            np.zeros((64, 36), np.uint8),
            "has 72 columns, which are not a multiple of 16",
        ),
        (Stored("nvfp4"), ".weight_scale", np.zeros((64, 16), np.uint8), "is of type U8, and not F8_E4M3"),
        (Stored("nvfp4"), ".weight_global_scale", np.zeros(1, np.float32), "is 0.0, and not a finite number above 0"),
        (Stored("nvfp4"), ".weight_global_scale", np.ones(2, np.float32), r"shape \(2,\), and not one number of F32"),
        (
            Stored("modelopt"),
            ".weight_scale_2",
            np.array(np.nan, np.float32),
            "is nan, and not a finite number above 0",
        ),
        (Stored("modelopt"), ".weight_scale", np.zeros((64, 9), _E4M3), r"\(64, 9\), and not \(64, 16\)"),
        (Stored("float"), ".weight_scale", np.zeros((32, 1), np.float16), r"\(32, 1\), and the weights \(64, 256\)"),
        (MICROSCALED[0], ".weight_scale_inv", np.zeros((64, 4), np.uint8), r"\(64, 4\), and the weights \(64, 256\)"),
        (MICROSCALED[0], ".weight_scale_inv", np.zeros((64, 8), np.float32), r"\(64, 8\), and the weights \(64, 256\)"),
        (MICROSCALED[4], ".weight_scale", np.zeros((64, 4), np.uint8), r"has the shape \(64, 4\), and not \(64, 8\)"),
        (
            MICROSCALED[4],
            ".weight_packed",
            np.zeros((64, 8), np.uint8),
            "has 16 columns, which are not a multiple of 32",
        ),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(
    stored: Stored, suffix: str, array: NDArray[Any], message: str, tmp_path: Path
) -> None:
    tensors, _ = random_matrix(stored, 64, 256, np.random.default_rng(1))
    named = rf"model\.safetensors: tensor '{NAME}\.\w+'.* {message}"
    with pytest.raises(CheckpointError, match=named):
        tensor_source(opened(tmp_path, stored, {**tensors, suffix: array}), f"{NAME}.weight").dequantize()


@pytest.mark.parametrize(
    ("stored", "value", "reason"),
    [
        (Stored("fp8", group=0, rows=1, scale="float32"), 0, "a scale of out_feature 9 is 0, and its numbers are not"),
        (MICROSCALED[0], 255, "a scale of out_feature 9 is not finite"),
        (Stored("nvfp4"), 127, "a scale of out_feature 9 is not finite"),
        (MICROSCALED[4], 255, "the scale of group 0 of out_feature 9 is not finite"),
    ],
    ids=str,
)
def test_scales_that_no_weight_has_are_refused(stored: Stored, value: int, reason: str, tmp_path: Path) -> None:
    tensors, _ = random_matrix(stored, 16, 256, np.random.default_rng(1))
    scales = next(each for name, each in tensors.items() if "scale" in name)
    (scales.view(np.uint8) if scales.itemsize == 1 else scales)[9, 0] = value
    source = tensor_source(opened(tmp_path, stored, tensors), f"{NAME}.weight")
    source.check_finite(0, 9)
    with pytest.raises(CheckpointError, match=rf"tensor '{NAME}\.weight': {reason}$"):
        source.check_finite(8, 16)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors, _ = random_matrix(Stored("fp8"), 16, 256, np.random.default_rng(1))
    tensors[".weight"].view(np.uint8)[9, 3] = 0xFF
    source = tensor_source(opened(tmp_path, Stored("fp8"), tensors), f"{NAME}.weight")
    source.check_finite(0, 9)
    for part in (source, source.slice_columns(0, 128), source.every(1, 2)):
        with pytest.raises(CheckpointError, match=rf"'{NAME}\.weight': a number of out_feature . is not finite"):
            part.check_finite(4, part.out_features)


@pytest.mark.parametrize(("method", "scale"), [("fp8", "weight_scale_inv"), ("float", "weight_scale")])
def test_scales_of_floats_are_not_forgotten(method: str, scale: str, tmp_path: Path) -> None:
    tensors, _ = random_matrix(Stored(method), 16, 256, np.random.default_rng(1))
    del tensors[f".{scale}"]
    checkpoint = opened(tmp_path, Stored(method), tensors)
    assert stored_names(checkpoint, f"{NAME}.weight") == (f"{NAME}.weight", f"{NAME}.{scale}")


@pytest.mark.parametrize("method", ["float", "nvfp4"])
@pytest.mark.parametrize("name", ["weight_zero_point", "weight_g_idx"])
def test_what_floats_do_not_have_is_not_passed_over(method: str, name: str, tmp_path: Path) -> None:
    write_model(tmp_path, Stored(method), more={f"{NAME}.{name}": np.zeros(256, np.int32)})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"unexpected {NAME}\.{name}"):
        check_tensors(build_spec(checkpoint), checkpoint)


def test_columns_of_floats_are_a_multiple_of_a_group(tmp_path: Path) -> None:
    tensors, _ = random_matrix(Stored("fp8"), 16, 144, np.random.default_rng(1))
    with pytest.raises(UnsupportedModelError, match="has 144 columns, which are not a multiple of 32"):
        tensor_source(opened(tmp_path, Stored("fp8"), tensors), f"{NAME}.weight")


def test_columns_of_groups_that_are_not_alike_are_halves_alone(tmp_path: Path) -> None:
    stored = Stored("gptq", ordered=True)
    tensors, _ = random_matrix(stored, 64, 256, np.random.default_rng(1))
    tensors[".g_idx"][0] ^= 1
    assert tensor_source(opened(tmp_path, stored, tensors), f"{NAME}.weight").ordered is None


@pytest.mark.parametrize("value", [np.nan, 0])
def test_scales_of_columns_in_an_order_of_their_own_are_finite_and_not_zero(value: float, tmp_path: Path) -> None:
    stored = Stored("gptq", ordered=True)
    tensors, _ = random_matrix(stored, 64, 256, np.random.default_rng(1))
    tensors[".scales"][1, 9] = value
    source = tensor_source(opened(tmp_path, stored, tensors), f"{NAME}.weight")
    if value:
        found = source.slice_out_features(8, 12).find_not_finite(0, 4)
        assert "not finite" in str(found)
        return
    with pytest.raises(CheckpointError, match=r"scales': a scale of out_feature 9 is 0, and its numbers are not"):
        source.slice_out_features(8, 12).dequantize()


def test_groups_of_few_columns_are_refused(tmp_path: Path) -> None:
    tensors, _ = random_matrix(Stored("awq", group=16), 64, 256, np.random.default_rng(1))
    with pytest.raises(
        UnsupportedModelError, match=r"scales' has a scale for 16 columns, and not for a multiple of 32"
    ):
        tensor_source(opened(tmp_path, Stored("awq", group=16), tensors), f"{NAME}.weight")


def test_zeros_beside_the_middle_are_refused_where_the_file_says_that_there_are_none(tmp_path: Path) -> None:
    tensors, _ = random_matrix(Stored("gptq"), 64, 256, np.random.default_rng(1))
    source = tensor_source(opened(tmp_path, Stored("gptq", symmetric=True), tensors), f"{NAME}.weight")
    with pytest.raises(CheckpointError, match=r"qzeros': has other zeros than 8, and `sym` is true"):
        source.dequantize()


@pytest.mark.parametrize(
    ("stored", "changes", "message"),
    [
        (Stored("awq"), {"bits": 8}, r"quantization_config\.bits': unsupported value 8"),
        (Stored("awq"), {"version": "gemv"}, r"version': unsupported value 'gemv'"),
        (Stored("awq"), {"zero_point": False}, r"zero_point': unsupported value False"),
        (Stored("awq"), {"rotation": True}, r"rotation': unknown"),
        (Stored("gptq"), {"bits": 3}, r"bits': unsupported value 3"),
        (Stored("gptq"), {"checkpoint_format": "marlin"}, r"checkpoint_format': unsupported value 'marlin'"),
        (Stored("gptq"), {"is_marlin_format": True}, r"is_marlin_format': unsupported value True"),
        (Stored("gptq"), {"data_type": "mx_fp"}, r"data_type': unsupported value 'mx_fp'"),
        (
            Stored("gptq"),
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
            r"packing_format': unsupported value 'auto_round:auto_awq'",
        ),
        (Stored("gptq"), {"pack_dtype": "int16"}, r"pack_dtype': unsupported value 'int16'"),
        (Stored("packed"), {"format": "marlin-24"}, "of 'marlin-24'; weights of float-quantized"),
        (
            Stored("modelopt"),
            {"quant_algo": "NVFP4_SVD"},
            "quant_algo': NVFP4_SVD: inputs with scales of their own are",
        ),
        (Stored("modelopt"), {"quant_algo": "W8A16"}, "quant_algo': unsupported value 'W8A16'$"),
        (Stored("modelopt"), {"quant_algo": "MIXED_PRECISION"}, r"quantized_layers': missing, or no object of objects"),
        (
            Stored("modelopt"),
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {NAME: {"quant_algo": "W4A16_AWQ"}}},
            rf"quantized_layers': W4A16_AWQ for '{NAME}': inputs with scales of their own are not read$",
        ),
        (
            Stored("modelopt"),
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {NAME: {"quant_algo": None}}},
            rf"quantized_layers': unsupported value None for '{NAME}'$",
        ),
        (Stored("fp8"), {"fmt": "e5m2"}, r"fmt': unsupported value 'e5m2'"),
        (Stored("fp8"), {"weight_block_size": [1, 64]}, r"weight_block_size': unsupported value \[1, 64\]"),
        (Stored("fp8"), {"scale_fmt": "ue5m3"}, r"scale_fmt': unsupported value 'ue5m3'"),
        (Stored("fp8"), {"expert_dtype": "fp4"}, r"expert_dtype': unsupported value 'fp4'"),
        (Stored("fp8"), {"store_dtype": "e4m3"}, r"store_dtype': unknown"),
        (Stored("packed"), {"sparsity_config": {"format": "dense"}}, r"sparsity_config': unsupported value"),
        (Stored("packed", bits=8), {"config_groups": {}}, r"config_groups': missing, or no object of objects"),
        (Stored("packed"), {"config_groups": {"a": {}}}, r"config_groups\.a\.weights': missing"),
        (
            Stored("packed"),
            {"config_groups": {"a": {"weights": {"type": ["float"], "num_bits": 8, "strategy": "group"}}}},
            r"config_groups': a has weights of type \['float'\], 8 bits",
        ),
        (
            Stored("packed"),
            {
                "config_groups": {
                    "a": {
                        "weights": {
                            "type": "float",
                            "num_bits": 8,
                            "strategy": "block",
                            "block_structure": [96, 128],
                        }
                    }
                }
            },
            r"config_groups': a has blocks of \[96, 128\], and those of 128 by 128 are read",
        ),
        (
            Stored("packed"),
            {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "attn_head"}}}},
            r"config_groups': a has weights of type float, 8 bits and strategy attn_head: integers by group or",
        ),
        (
            Stored("packed"),
            {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "group"}}}},
            r"config_groups': a has floats by None columns, and those by 32 are read",
        ),
    ],
)
def test_parameters_are_refused_by_name(stored: Stored, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors, _ = random_matrix(stored, 64, 256, np.random.default_rng(1))
    named = {f"{NAME}{suffix}": array for suffix, array in tensors.items()}
    write_checkpoint(tmp_path, named, {**stored.config, **changes})
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        build_spec(open_checkpoint(tmp_path))


def test_auto_round_packs_as_gptq_does(tmp_path: Path) -> None:
    config = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int", "iters": 0,
        "autoround_version": "0.14.2", "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
    }  # fmt: skip
    weights = write_model(tmp_path, Stored("gptq", symmetric=True), **config)
    checkpoint, name = open_checkpoint(tmp_path), f"{NAME}.weight"
    check_tensors(build_spec(checkpoint), checkpoint)
    np.testing.assert_array_equal(tensor_source(checkpoint, name).dequantize(), weights[name].astype(np.float32))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("stored", [Stored("modelopt"), Stored("modelopt", bits=8, group=0, rows=0)], ids=str)
def test_a_file_of_modelopt_names_the_method(stored: Stored, alone: bool, tmp_path: Path) -> None:
    weights = write_model(tmp_path, stored)
    write_model_opt_file(tmp_path, quant_algo=stored.algorithm, alone=alone)
    checkpoint, name = open_checkpoint(tmp_path), f"{NAME}.weight"
    check_tensors(build_spec(checkpoint), checkpoint)
    found = tensor_source(checkpoint, name).dequantize()
    np.testing.assert_allclose(found, weights[name].astype(np.float32), rtol=2**-11)


@pytest.mark.parametrize(
    ("algorithm", "alone", "message"),
    [
        ("W4A16_AWQ", True, r"hf_quant_config\.json: key 'quantization\.quant_algo': W4A16_AWQ: inputs with scales of"),
        (None, True, r"hf_quant_config\.json: key 'quantization\.quant_algo': unsupported value None$"),
        (
            "FP8",
            False,
            r"config\.json: key 'quantization_config': names 'modelopt' 'NVFP4', and hf_quant_config\.json .* 'FP8'$",
        ),
    ],
)
def test_a_file_of_modelopt_that_does_not_fit_is_refused(
    algorithm: str | None, alone: bool, message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, Stored("modelopt"))
    write_model_opt_file(tmp_path, quant_algo=algorithm, alone=alone)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        build_spec(open_checkpoint(tmp_path))


def test_a_file_of_modelopt_without_its_object_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, Stored("modelopt"))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": ["NVFP4"]}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: key 'quantization': missing, or not an object"):
        build_spec(open_checkpoint(tmp_path))


def test_scales_of_a_cache_in_fp8_are_known_and_not_read(tmp_path: Path) -> None:
    stored, scale = Stored("float", group=0, rows=1), np.ones(1, np.float32)
    attention = "model.layers.1.self_attn"
    places = (
        f"{attention}.k_scale",
        f"{attention}.v_scale",
        f"{attention}.k_proj.k_scale",
        f"{attention}.v_proj.v_scale",
    )
    write_model(tmp_path, stored, more=dict.fromkeys(places, scale), kv_cache_scheme={"num_bits": 8, "type": "float"})
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(build_spec(checkpoint), checkpoint)
    assert tensor_shape(checkpoint, f"{attention}.k_proj.weight") == (64, 128)
    write_model(tmp_path, stored, more={f"{attention}.o_proj.k_scale": scale})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.1\.self_attn\.o_proj\.k_scale"):
        check_tensors(build_spec(checkpoint), checkpoint)


@pytest.mark.parametrize("stored", FORMS, ids=str)
def test_a_whole_model_is_read_strictly(stored: Stored, tmp_path: Path) -> None:
    write_model(tmp_path, stored)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(build_spec(checkpoint), checkpoint)
