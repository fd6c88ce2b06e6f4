"""gpt-oss: where its tensors lie in both formats, plain and of MXFP4, and what its keys say or are refused for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import HEADS, config_checkpoint, gguf_checkpoint, stored
from models.mxfp4_checkpoints import byte_tensor, with_mxfp4_experts
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from realizar.models.spec import Experts, ModelSpec
from reference_tensors import load_tensor, load_tensors

EXPERTS, WIDTH, HIDDEN = 3, 64, 32
GGUF: dict[str, Any] = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": WIDTH}
FOLDER: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": WIDTH}


def gguf(**keys: Any) -> Checkpoint:
    sizes = {"embedding_length": HIDDEN, "rope.dimension_count": 8, "attention.sliding_window": 8}
    changes = {f"gpt-oss.{key}": value for key, value in {**GGUF, **sizes, **keys}.items()}
    return gguf_checkpoint(changes, "gpt-oss")


def folder(**keys: Any) -> Checkpoint:
    sizes = {"hidden_size": HIDDEN, "head_dim": HIDDEN // HEADS, "sliding_window": 8, "rope_theta": 10000.0}
    return filled(config_checkpoint({"model_type": "gpt_oss", **FOLDER, **sizes, **keys}))


def filled(checkpoint: Checkpoint) -> Checkpoint:
    """With the tensors of a safetensors checkpoint of gpt-oss, of random values."""
    gate_up, down = (EXPERTS, HIDDEN, 2 * WIDTH), (EXPERTS, WIDTH, HIDDEN)
    head, layers = HIDDEN // HEADS, {}
    for index in range(2):
        base, attention = f"model.layers.{index}", f"model.layers.{index}.self_attn"
        layers |= {f"{base}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        layers |= {f"{attention}.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        layers |= {f"{attention}.{name}_proj.weight": (2 * head, HIDDEN) for name in "kv"}
        layers |= {f"{attention}.{name}_proj.bias": (HIDDEN,) for name in "qo"}
        layers |= {f"{attention}.{name}_proj.bias": (2 * head,) for name in "kv"}
        layers |= {f"{attention}.sinks": (HEADS,), f"{base}.mlp.router.weight": (EXPERTS, HIDDEN)}
        layers |= {f"{base}.mlp.router.bias": (EXPERTS,), f"{base}.mlp.experts.gate_up_proj": gate_up}
        layers |= {f"{base}.mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDTH)}
        layers |= {f"{base}.mlp.experts.down_proj": down, f"{base}.mlp.experts.down_proj_bias": (EXPERTS, HIDDEN)}
    whole = {"model.embed_tokens.weight": (40, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (40, HIDDEN)}
    rng = np.random.default_rng(3)
    tensors = {
        name: stored(name, shape, rng.standard_normal(shape).ravel()) for name, shape in (whole | layers).items()
    }
    return dataclasses.replace(checkpoint, tensors=tensors)


def mixture(spec: ModelSpec) -> Experts:
    part = spec.layers[0].feed_forward
    assert isinstance(part, Experts)
    return part


@pytest.mark.parametrize("kind", ["plain", "mxfp4"])
def test_stacks_are_experts_one_below_the_other(kind: str) -> None:
    """Experts that a folder holds transposed, or whose gate and up alternate, are no such stack."""
    checkpoint = folder()
    if kind == "mxfp4":
        checkpoint, _ = with_mxfp4_experts(checkpoint, np.random.default_rng(4))
    spec = build_spec(checkpoint)
    tensors, found = WeightTensors(spec, checkpoint), []
    for linear in mixture(spec).expert_linears():
        whole = tensors.stack(linear.weight)
        found.append(whole is not None)
        if whole is not None:
            experts = [tensors.expert(linear.weight, expert).dequantize() for expert in range(EXPERTS)]
            assert np.array_equal(whole.dequantize(), np.concatenate(experts))
    assert found == [False, False, kind == "mxfp4"]


def test_both_formats_describe_the_same_layers() -> None:
    in_gguf, in_folder = build_spec(gguf()), build_spec(folder())
    check_tensors(in_folder, folder())
    biased = [dataclasses.replace(layer, mixer=None) for layer in in_folder.layers]
    assert [dataclasses.replace(layer, mixer=None) for layer in in_gguf.layers] == biased
    assert [layer.mixer.window for layer in in_gguf.layers] == [8, None]
    assert [layer.mixer.window for layer in in_folder.layers] == [8, None]
    names = "self_attn.sinks", "post_attention_layernorm.weight", "mlp.gate.bias", "mlp.experts.up_proj.bias"
    assert [in_gguf.tensors[f"model.layers.1.{name}"].name for name in names] == [
        "blk.1.attn_sinks.weight", "blk.1.post_attention_norm.weight", "blk.1.ffn_gate_inp.bias",
        "blk.1.ffn_up_exps.bias",
    ]  # fmt: skip
    assert mixture(in_gguf).clamped


def test_gate_and_up_alternate_and_lie_transposed() -> None:
    checkpoint = folder()
    spec = build_spec(checkpoint)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = checkpoint.tensors[name].data.view(np.float32).reshape(EXPERTS, HIDDEN, 2 * WIDTH)
    biases = checkpoint.tensors[f"{name}_bias"].data.view(np.float32).reshape(EXPERTS, 2 * WIDTH)
    tensors = WeightTensors(spec, checkpoint)
    for part, first in (("gate", 0), ("up", 1)):
        key = f"model.layers.1.mlp.experts.{part}_proj"
        np.testing.assert_array_equal(
            load_tensor(spec.tensors[f"{key}.weight"], checkpoint)[2], whole[2, :, first::2].T
        )
        for expert in range(EXPERTS):
            source = tensors.expert(f"{key}.weight", expert)
            np.testing.assert_array_equal(source.dequantize(), whole[expert, :, first::2].T)
            assert source.raw is not None
            np.testing.assert_array_equal(source.raw.view(np.float32), whole[expert, :, first::2].T)
            source.prefetch()
            source.release(0, WIDTH)
        np.testing.assert_array_equal(tensors.expert_vectors(f"{key}.bias"), biases[:, first::2])


def test_experts_of_mxfp4() -> None:
    """The same numbers as OpenAI's code makes of codes and scales; the layout of the same weights in a GGUF file."""
    checkpoint, values = with_mxfp4_experts(folder(), np.random.default_rng(4))
    spec = build_spec(checkpoint)
    check_tensors(spec, checkpoint)
    tensors, whole = WeightTensors(spec, checkpoint), load_tensors(spec, checkpoint)
    for part, first, step in (("gate", 0, 2), ("up", 1, 2), ("down", 0, 1)):
        stored_name = f"model.layers.0.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj"
        name = f"model.layers.0.mlp.experts.{part}_proj.weight"
        for expert in range(EXPERTS):
            want = values[stored_name][expert, :, first::step].T
            source = tensors.expert(name, expert)
            assert source.layout.name == "MXFP4"
            np.testing.assert_array_equal(source.dequantize(), want)
            np.testing.assert_array_equal(source.planes(3, 9).dequantize(), want[3:9])
            assert source.raw is not None
            assert source.raw.shape == (len(want), want.shape[1] // 32 * 17)
            np.testing.assert_array_equal(source.slice_out_features(2, 5).dequantize(), want[2:5])
            np.testing.assert_array_equal(whole[name][expert], want)
            source.prefetch()
            source.release(0, source.out_features)


def test_a_scale_of_mxfp4_that_is_nan_is_named() -> None:
    checkpoint, _ = with_mxfp4_experts(folder(), np.random.default_rng(5))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    checkpoint.tensors[f"{name}_scales"].data.reshape(EXPERTS, 2 * WIDTH, 1)[1, 7] = 0xFF
    source = WeightTensors(build_spec(checkpoint), checkpoint).expert("model.layers.0.mlp.experts.up_proj.weight", 1)
    with pytest.raises(CheckpointError, match=r"gate_up_proj': the scale of group 0 of out_feature 135 is not finite"):
        source.check_finite(0, WIDTH)


@pytest.mark.parametrize(
    ("suffix", "shape", "message"),
    [
        ("_scales", (EXPERTS, 2 * WIDTH, 2), r"_scales'.* \(3, 128, 2\), and the codes are of \(3, 128, 1, 16\)"),
        ("_blocks", (EXPERTS, 2 * WIDTH, 1, 8), r"_blocks'.* not \[experts, out_features, groups, 16\]"),
        ("_blocks", (EXPERTS, 2 * WIDTH, 16), r"_blocks'.* not \[experts, out_features, groups, 16\]"),
        ("_blocks", None, "missing model.layers.0.mlp.experts.gate_up_proj_blocks"),
        ("_scales", None, "missing model.layers.0.mlp.experts.gate_up_proj_scales"),
        ("_bias", None, "missing model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("_bias", (EXPERTS, WIDTH), r"_bias \(3, 64\) in place of \(3, 128\)"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(suffix: str, shape: Any, message: str) -> None:
    checkpoint, _ = with_mxfp4_experts(folder(), np.random.default_rng(6))
    name = f"model.layers.0.mlp.experts.gate_up_proj{suffix}"
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key != name}
    if shape is not None:
        like = checkpoint.tensors[name]
        tensors[name] = (
            stored(name, shape) if suffix == "_bias" else byte_tensor(like, name, np.zeros(shape, np.uint8))
        )  # fmt: skip
    changed = dataclasses.replace(checkpoint, tensors=tensors)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(build_spec(changed), changed)


def test_codes_of_another_type_are_refused() -> None:
    checkpoint, _ = with_mxfp4_experts(folder(), np.random.default_rng(6))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    signed = dataclasses.replace(checkpoint.tensors[name], dtype="I8")
    changed = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: signed})
    with pytest.raises(CheckpointError, match=r"down_proj_scales': is of type I8, and codes of MXFP4 are of U8"):
        check_tensors(build_spec(changed), changed)


def test_a_vector_of_experts_that_is_nan_is_refused() -> None:
    for name in ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "self_attn.sinks", "mlp.router.bias"):
        checkpoint = folder()
        checkpoint.tensors[f"model.layers.1.{name}"].data.view(np.float32).reshape(-1)[-1] = np.nan
        with pytest.raises(CheckpointError, match=rf"{name}': number \d+ is not finite"):
            WeightTensors(build_spec(checkpoint), checkpoint).check_vectors()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 4}, "num_experts_per_tok.*4 is not within 1 to 3"),
        ({"num_local_experts": 0}, "num_local_experts.*0 is not within"),
        ({"experts_per_token": 1}, "experts_per_token.*num_experts_per_tok says 2"),
        ({"swiglu_limit": 5.0}, "swiglu_limit.*unsupported value 5.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha.*unsupported value 1.0"),
        ({"hidden_act": "relu"}, "hidden_act.*unsupported value 'relu'"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layer_types.*'chunked_attention'"),
        ({"quantization_config": {"quant_method": "mxfp4", "bits": 3}}, "quantization_config.bits.*unknown"),
    ],
)
def test_keys_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_spec(folder(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 0}, "expert_count.*0 is not within"),
        ({"expert_used_count": 4}, "expert_used_count.*4 is not within 1 to 3"),
        ({"expert_feed_forward_length": None}, "expert_feed_forward_length.*missing"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale.*unsupported value 2.5"),
        ({"rope.freq_base_swa": 10.0}, "rope.freq_base_swa.*unsupported value 10"),
    ],
)
def test_gguf_keys_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_spec(gguf(**keys))


def test_yarn_is_not_rounded_in_a_gguf_file_either() -> None:
    """OpenAI's code does not round, nor do configurations with `truncate` false; llama.cpp does."""
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 900}
    values = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 900}
    exact, rounded = ({**values, "truncate": each} for each in (False, True))
    in_gguf = build_spec(gguf(**scaling)).layers[0].mixer.rope
    assert in_gguf == build_spec(folder(rope_scaling=exact)).layers[0].mixer.rope
    assert in_gguf != build_spec(folder(rope_scaling=rounded)).layers[0].mixer.rope


BIASES = ("mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "self_attn.sinks")


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_biases_and_sinks_that_are_not_finite_are_refused(name: str, value: float) -> None:
    checkpoint = folder()
    spec = build_spec(checkpoint)
    values = checkpoint.tensors[f"model.layers.1.{name}"].data.view(np.float32)
    values[-1] = value
    reason = rf"tensor 'model\.layers\.1\.{name}': number {len(values) - 1} is not finite"
    with pytest.raises(CheckpointError, match=reason):
        WeightTensors(spec, checkpoint).check_vectors()


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("change", ["missing", "longer", "of no expert"])
def test_misshaped_biases_and_sinks_are_refused(name: str, change: str) -> None:
    checkpoint, full = folder(), f"model.layers.1.{name}"
    tensors = dict(checkpoint.tensors)
    whole = tensors.pop(full)
    if change != "missing":
        *first, last = whole.shape
        tensors[full] = dataclasses.replace(whole, shape=(*first, last + 1) if change == "longer" else (0, *first))
    damaged = dataclasses.replace(checkpoint, tensors=tensors)
    reason = "missing" if change == "missing" else "misshaped"
    with pytest.raises(CheckpointError, match=rf"^tiny: tensor '{full}': {reason} {full}"):
        check_tensors(build_spec(damaged), damaged)
