"""The `quantization_config` of a model: a method that nothing reads is refused by name, an empty one is no method."""

from __future__ import annotations

from typing import Any

import pytest

from handmade_checkpoint import config_checkpoint, gguf_checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.registry import build_spec
from realizar.quantization.tensors import asks_for_fp8, cache_scheme, matrix_format


@pytest.mark.parametrize("method", ["hqq", "bitsandbytes", "quark"])
@pytest.mark.parametrize("is_inner", [False, True])
def test_methods_that_nothing_reads_are_refused_by_name(method: str, is_inner: bool) -> None:
    """Before anything else of the model is read, in a multi-modal model's text too."""
    config: dict[str, Any] = {"quantization_config": {"quant_method": method, "bits": 4}}
    message = (
        rf"^tiny.config\.json: key 'quantization_config\.quant_method': weights quantised by '{method}' are not"
        r" supported \(supported in safetensors: float weights, auto-round, awq, compressed-tensors, fp8, gptq,"
        r" modelopt, mxfp4, mxfp8; quantised models run from GGUF files\)$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        build_spec(config_checkpoint({"text_config": config} if is_inner else config))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ([4], "quantization_config"),
        ({"bits": 4}, r"quantization_config\.quant_method"),
        ({"quant_method": 4}, "quant_method"),
    ],
)
def test_malformed_configurations_are_named(config: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        build_spec(config_checkpoint({"quantization_config": config}))


def test_empty_configurations_are_none() -> None:
    for config in ({}, None, False):
        checkpoint = config_checkpoint({"quantization_config": config})
        assert matrix_format(checkpoint) is None
        build_spec(checkpoint)
    assert matrix_format(gguf_checkpoint()) is None


def test_each_checkpoint_has_a_format_of_its_own() -> None:
    mxfp4, fp8 = (config_checkpoint({"quantization_config": {"quant_method": method}}) for method in ("mxfp4", "fp8"))
    assert matrix_format(mxfp4) is matrix_format(mxfp4)
    assert type(matrix_format(mxfp4)) is not type(matrix_format(fp8))


def _floats(inputs: Any, bits: int = 8) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": bits, "strategy": "channel" if bits == 8 else "tensor_group"}
    group = {"weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def _with_group(config: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    (group,) = other["config_groups"].values()
    return {**config, "config_groups": {**config["config_groups"], "group_1": group}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "fp8", "dequantize": True}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        (_floats({"type": "float", "num_bits": 8, "dynamic": True}), True),
        (_floats(None), False),
        (_with_group(_floats({"type": "float", "num_bits": 8, "dynamic": True}), _floats(None)), False),
        (_floats({"type": "float", "num_bits": 4}, bits=4), False),
        ({"quant_method": "mxfp4"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_checkpoints_that_ask_for_activations_in_fp8(config: dict[str, Any], expected: bool) -> None:
    assert asks_for_fp8(config_checkpoint({"quantization_config": config})) is expected


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}}, "FP8"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}, "FP8"),
        (
            {"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "attn_head"}},
            "float of 8 bits by attn_head",
        ),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8, "strategy": "tensor"}}, "int of 8 bits by tensor"),
        ({"kv_cache_scheme": "static"}, "FP8"),
        ({"kv_cache_quant_algo": "FP8"}, "FP8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_keys_and_values_were_meant_to_be_kept_in(scheme: dict[str, Any], expected: str | None) -> None:
    method = "fp8" if scheme.get("kv_cache_scheme") == "static" else "modelopt"
    config = {"quant_method": method, "quant_algo": "FP8"} if method == "modelopt" else {"quant_method": method}
    assert cache_scheme(config_checkpoint({"quantization_config": config | scheme})) == expected
