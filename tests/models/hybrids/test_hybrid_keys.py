"""Files of models with gated delta nets: where their tensors lie, what their keys say, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import HEADS, HIDDEN, LAYERS, config_checkpoint, gguf_checkpoint, stored
from models.hybrids.hybrid_keys import CONFIGS, GGUF
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.mixers import GatedDeltaNet
from realizar.models.registry import build_spec
from realizar.models.spec import Attention, CacheGroup, ModelSpec

SIZE = HIDDEN // HEADS
LINEAR = "model.layers.0.linear_attn"


def gguf(name: str = "qwen35", **keys: Any) -> Checkpoint:
    """A file without a tensor of its own; `__` stands for a dot in keys."""
    changes = {f"{name}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return gguf_checkpoint({**GGUF[name], **changes}, name)


def folder(model_type: str = "qwen3_5_text", **keys: Any) -> Checkpoint:
    return config_checkpoint({"model_type": model_type, **CONFIGS[model_type], **keys})


def completed(checkpoint: Checkpoint) -> tuple[ModelSpec, Checkpoint]:
    """A spec and its checkpoint with all tensors, of random values; rates are below zero."""
    spec, rng = build_spec(checkpoint), np.random.default_rng(1)
    ends: dict[str, int] = {}
    for source in spec.tensors.values():
        ends[source.name] = max(ends.get(source.name, 0), source.last_out_feature)
    tensors = {}
    for source in spec.tensors.values():
        axis = source.out_feature_axis
        shape = source.stored_shape or (*source.shape[:axis], ends[source.name], *source.shape[axis + 1 :])
        for name in source.names:
            own = source.shape[1:] if source.stack else shape
            tensors[name] = stored(name, own, -np.abs(rng.standard_normal(own)))
    return spec, dataclasses.replace(checkpoint, tensors=tensors)


def changed(checkpoint: Checkpoint, **shapes: tuple[int, ...] | None) -> Checkpoint:
    """With a tensor of each shape in place of that of the name, `__` for dots; None takes it out."""
    tensors = dict(checkpoint.tensors)
    for name, shape in shapes.items():
        full = name.replace("__", ".")
        if shape is None:
            del tensors[full]
        else:
            tensors[full] = stored(full, shape, np.ones(shape))
    return dataclasses.replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize("bare", [gguf, folder])
def test_parts_of_both_formats(bare: Any) -> None:
    spec, checkpoint = completed(bare())
    check_tensors(spec, checkpoint)
    WeightTensors(spec, checkpoint).check_vectors()
    delta, attention = (layer.mixer for layer in spec.layers)
    assert isinstance(delta, GatedDeltaNet)
    assert isinstance(attention, Attention)
    is_gguf = checkpoint.format == "gguf"
    assert (delta.num_key_heads, delta.num_value_heads, delta.key_size, delta.value_size) == (2, 6, 8, 8)
    assert (delta.channels, delta.length, delta.tiled, delta.rate_is_log) == (80, 4, is_gguf, not is_gguf)
    assert (delta.norm.weight_offset, spec.final_norm.weight_offset) == (0.0, 0.0 if is_gguf else 1.0)
    places = {name: spec.tensors[f"{LINEAR}.{name}"] for name in ("in_proj_v.weight", "A_log", "dt_bias")}
    assert places["in_proj_v.weight"].first_out_feature == 32
    assert [place.name for place in places.values()] == (
        ["blk.0.attn_qkv.weight", "blk.0.ssm_a", "blk.0.ssm_dt.bias"]
        if is_gguf
        else [f"{LINEAR}.in_proj_qkv.weight", f"{LINEAR}.A_log", f"{LINEAR}.dt_bias"]
    )
    assert attention.gate is not None
    gate = spec.tensors[attention.gate.weight]
    assert (gate.first_out_feature, gate.step, gate.run, gate.last_out_feature) == (SIZE, 2 * SIZE, SIZE, 2 * HIDDEN)
    assert spec.state_layers() == (0,)
    assert spec.cache_groups() == (CacheGroup(None, (1,)),)


def test_parts_of_each_key_head_that_follow_each_other() -> None:
    """Qwen3-Next from Hugging Face, and old GGUF files of it; new ones have q, k and v apart from z."""
    for checkpoint in (folder("qwen3_next"), gguf("qwen3next")):
        spec = build_spec(checkpoint)
        v, decay = spec.tensors[f"{LINEAR}.in_proj_v.weight"], spec.tensors[f"{LINEAR}.in_proj_a.weight"]
        assert (v.first_out_feature, v.step, v.run, v.last_out_feature) == (16, 64, 24, 104)
        assert v.out_features().tolist() == [*range(16, 40), *range(80, 104)]
        assert (decay.first_out_feature, decay.step, decay.run) == (3, 6, 3)
        assert not spec.layers[0].mixer.tiled  # type: ignore[union-attr]
    apart = build_spec(changed(gguf("qwen3next"), blk__0__attn_qkv__weight=(80, HIDDEN)))
    assert apart.tensors[f"{LINEAR}.in_proj_v.weight"].first_out_feature == 32
    assert apart.tensors[f"{LINEAR}.in_proj_z.weight"].name == "blk.0.attn_gate.weight"


def test_which_layers_are_attention() -> None:
    def kinds(checkpoint: Checkpoint) -> list[bool]:
        return [isinstance(layer.mixer, Attention) for layer in build_spec(checkpoint).layers]

    every_third = [False, False, True] * 2
    assert kinds(gguf(block_count=6, attention__recurrent_layers=None, full_attention_interval=3)) == every_third
    assert kinds(folder(num_hidden_layers=6, layer_types=None, full_attention_interval=3)) == every_third
    assert kinds(folder(num_hidden_layers=4, layer_types=None)) == [False, False, False, True]
    both = gguf(block_count=3, attention__recurrent_layers=[True, False, False], nextn_predict_layers=1)
    assert kinds(both) == [False, True]


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next"])
def test_blocks_behind_the_layers_are_known_and_not_run(name: str) -> None:
    spec, checkpoint = completed(gguf(name))
    more = changed(
        checkpoint, blk__2__nextn__eh_proj__weight=(HIDDEN, 2 * HIDDEN), blk__2__attn_q__weight=(2 * HIDDEN, HIDDEN)
    )
    with pytest.raises(CheckpointError, match=r"unexpected blk\.2\.nextn\.eh_proj\.weight, blk\.2\.attn_q\.weight$"):
        check_tensors(spec, more)
    keys = {f"{name}.block_count": LAYERS + 1, f"{name}.nextn_predict_layers": 1}
    with_block = dataclasses.replace(more, metadata={**more.metadata, **keys})
    spec_with_block = build_spec(with_block)
    assert spec_with_block.layers == spec.layers
    check_tensors(spec_with_block, with_block)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_tensors_of_other_parts_are_known(model_type: str) -> None:
    spec, checkpoint = completed(folder(model_type, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False))
    more = changed(checkpoint, mtp__fc__weight=(HIDDEN, 2 * HIDDEN), mtp__layers__0__input_layernorm__weight=(HIDDEN,))
    check_tensors(build_spec(more), more)
    if model_type != "qwen3_next":
        seeing = changed(more, model__visual__patch_embed__proj__weight=(4, 4))
        check_tensors(build_spec(seeing), seeing)
    assert spec.layers == build_spec(more).layers


def test_the_text_model_of_a_larger_configuration() -> None:
    inner = {**config_checkpoint().metadata["config"], **CONFIGS["qwen3_5_text"], "model_type": "qwen3_5_text"}
    whole = Checkpoint(
        folder().path, "safetensors", {"config": {"model_type": "qwen3_5", "text_config": inner, "vision_config": {}}},
        {name.replace("model.", "model.language_model.", 1): each for name, each in folder().tensors.items()},
    )  # fmt: skip
    assert build_spec(whole).layers == build_spec(folder()).layers
    assert build_spec(whole).tensors[f"{LINEAR}.A_log"].name == "model.language_model.layers.0.linear_attn.A_log"


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (gguf(ssm__time_step_rank=5, ssm__inner_size=40), r"rank': the 2 key heads do not divide the 5 value heads$"),
        (folder(linear_num_value_heads=5), r"heads': the 2 key heads do not divide the 5 value heads$"),
        (gguf(ssm__inner_size=50), r"^tiny\.gguf: key 'qwen35\.ssm\.inner_size': 6 value heads do not divide 50 val"),
        (gguf(ssm__group_count=0), r"key 'qwen35\.ssm\.group_count': 0 is not within 1 to"),
        (gguf(ssm__conv_kernel=1), r"key 'qwen35\.ssm\.conv_kernel': 1 is not within 2 to 64$"),
        (gguf(ssm__state_size=None), r"key 'qwen35\.ssm\.state_size': missing$"),
        (gguf(attention__recurrent_layers=[True]), r"recurrent_layers': expected a list of 2, one per layer$"),
        (folder(layer_types=["linear_attention"] * 3), r"'layer_types': expected a list of 2, one per layer$"),
        (gguf(nextn_predict_layers=2), r"nextn_predict_layers': 2 of 2 layers$"),
    ],
)  # fmt: skip
def test_keys_that_no_model_can_have(checkpoint: Checkpoint, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_spec(checkpoint)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attn_output_gate": False}, "key 'attn_output_gate': unsupported value False"),
        ({"output_gate_type": "sigmoid"}, "key 'output_gate_type': unsupported value 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "key 'mamba_ssm_dtype': unsupported value 'bfloat16'"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "'layer_types': unsupported value 'sliding_at"),
        ({"linear_something": 3}, "key 'linear_something': unsupported value 3"),
    ],
)
def test_keys_that_are_not_supported(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build_spec(folder(**keys))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk__0__ssm_a": None}, r"tensor 'blk\.0\.ssm_a': missing blk\.0\.ssm_a$"),
        ({"blk__0__ssm_dt__bias": None}, r"tensor 'blk\.0\.ssm_dt\.bias': missing blk\.0\.ssm_dt\.bias$"),
        ({"blk__0__attn_gate__weight": None}, r"missing blk\.0\.attn_gate\.weight$"),
        ({"blk__0__ssm_conv1d__weight": (72, 4)}, r"blk\.0\.ssm_conv1d\.weight \(72, 4\) in place of \(80, 4\)$"),
        ({"blk__0__ssm_conv1d__weight": (80, 3)}, r"blk\.0\.ssm_conv1d\.weight \(80, 3\) in place of \(80, 4\)$"),
        ({"blk__0__ssm_a": (2,)}, r"misshaped blk\.0\.ssm_a \(2,\) in place of \(6,\)$"),
        ({"blk__1__attn_q__weight": (HIDDEN, HIDDEN)}, r"attn_q\.weight \(16, 16\) in place of \(32, 16\)$"),
        ({"blk__0__ssm_norm__weight": (16,)}, r"misshaped blk\.0\.ssm_norm\.weight \(16,\) in place of \(8,\)$"),
        ({"blk__0__ssm_d": (6,)}, r"unexpected blk\.0\.ssm_d$"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_of_another_shape(change: dict[str, tuple[int, ...] | None], message: str) -> None:
    spec, checkpoint = completed(gguf())
    with pytest.raises(CheckpointError, match=rf"^tiny\.gguf: {message}" if message[0] == "t" else message):
        check_tensors(spec, changed(checkpoint, **change))


@pytest.mark.parametrize(
    ("checkpoint", "name", "value", "message"),
    [
        (gguf(), "blk.0.ssm_a", np.nan, "number 3 is not finite"),
        (gguf(), "blk.0.ssm_a", 0.5, "number 3 is 0.5, by which no state decays"),
        (folder(), f"{LINEAR}.A_log", 120, "number 3 is 120, by which no state decays"),
        (folder(), f"{LINEAR}.A_log", np.inf, "number 3 is not finite"),
        (gguf(), "blk.0.ssm_dt.bias", np.inf, "number 3 is not finite"),
        (folder(), f"{LINEAR}.dt_bias", np.nan, "number 3 is not finite"),
        (gguf(), "blk.0.ssm_conv1d.weight", np.nan, "number 3 is not finite"),
    ],
)
def test_numbers_that_would_spoil_a_state(checkpoint: Checkpoint, name: str, value: float, message: str) -> None:
    spec, whole = completed(checkpoint)
    whole.tensors[name].data.view(np.float32)[..., 3] = value
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': {message}$"):
        WeightTensors(spec, whole).check_vectors()
