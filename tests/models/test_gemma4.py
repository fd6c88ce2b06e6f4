"""Gemma 4 reads the sizes of its layers from every form, and what no backend runs is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import CONFIG, HIDDEN, config_checkpoint, gguf_checkpoint, stored
from realizar.backends.cpu.supported import SUPPORTED as CPU
from realizar.backends.program import (
    AttentionBlock,
    FeedForwardBlock,
    InputGateBlock,
    SharedAttentionBlock,
    build_program,
)
from realizar.backends.supported import Feature
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.mixers import SharedAttention
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec

ROPES: dict[str, Any] = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
SIZES = {key: value for key, value in CONFIG.items() if key not in ("model_type", "architectures", "hidden_act")}
SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": ROPES,
    "sliding_window": 8,
}
DENSE = {**SMALL, "attention_k_eq_v": True, "global_head_dim": 16, "num_global_key_value_heads": 1}
EDGE = {
    **SMALL,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": CONFIG["vocab_size"],
}
# Beside these, as the published configurations of E2B and 31B have them.
PUBLISHED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "expert_intermediate_size": None,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma4_text",
    "num_experts": None,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "top_k_experts": None,
}


def _config(**keys: Any) -> ModelSpec:
    return build_spec(config_checkpoint({"model_type": "gemma4_text", **keys}))


def _gguf(**keys: Any) -> ModelSpec:
    named = {f"gemma4.{key.replace('__', '.')}": value for key, value in keys.items()}
    return build_spec(gguf_checkpoint(named, "gemma4"))


def _shapes(spec: ModelSpec) -> list[tuple[int, int, int | None]]:
    return [(m.head_size, m.num_kv_heads, m.window) for _, m in spec.all_attentions()]


@pytest.mark.parametrize("keys", [DENSE, {**EDGE, "num_global_key_value_heads": None}])
def test_published_configurations_load(keys: dict[str, Any]) -> None:
    bidirectional = "vision" if keys.get("attention_k_eq_v") else None
    text = {**SIZES, **PUBLISHED, **keys, "use_bidirectional_attention": bidirectional}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": {"a": 1}, "audio_config": {"a": 1}}
    spec = build_spec(dataclasses.replace(config_checkpoint(), metadata={"config": config}))
    assert spec.logit_soft_cap == 30.0
    assert spec.embedding_scale == HIDDEN**0.5
    assert spec.tied


def test_full_layers_have_heads_of_their_own_and_k_makes_v_there() -> None:
    spec = _config(**DENSE)
    assert _shapes(spec) == [(8, 2, 8), (16, 1, None)] * 3
    by_layer = {str(index): {"head_dim": 16, "num_key_value_heads": 1} for index in (1, 3, 5)}
    assert _config(**SMALL, attention_k_eq_v=True, per_layer_config=by_layer).layers == spec.layers
    local, full = (spec.attentions()[index][1] for index in (0, 1))
    assert (local.v == local.k, full.v == full.k) == (False, True)
    assert local.scale == full.scale == 1.0
    assert local.v_norm_eps == full.v_norm_eps == 1e-5
    assert full.rope is not None
    assert full.rope.size == 16
    assert full.rope.inverse_frequencies == pytest.approx((1.0, 1e6 ** (-2 / 16), *[0.0] * 6))
    assert [group.layers for group in spec.cache_groups()] == [(0, 2, 4), (1, 3, 5)]


def test_a_configuration_without_ropes_has_those_of_the_family() -> None:
    without = {key: value for key, value in DENSE.items() if key != "rope_parameters"}
    assert _config(**without).layers == _config(**DENSE).layers == _config(**without, rope_parameters=None).layers


def test_a_proportional_rope_rotates_any_share_of_a_head() -> None:
    ropes = {**ROPES, "full_attention": {**ROPES["full_attention"], "partial_rotary_factor": 0.2}}  # 3.2 of 16
    full = _config(**{**DENSE, "rope_parameters": ropes}).attentions()[1][1]
    assert full.rope is not None
    assert full.rope.inverse_frequencies == (1.0, *[0.0] * 7)


def test_only_full_layers_of_a_gguf_file_may_have_no_v() -> None:
    keys = {f"gemma4.attention.{key}": 4 for key in ("key_length", "key_length_swa")}
    keys["gemma4.attention.sliding_window_pattern"] = [True, False]
    for absent, k_is_v in (([1], [False, True]), ([], [False, False]), ([0], [False, False]), ([0, 1], [False, True])):
        shapes = {f"blk__{index}__attn_v": None for index in absent}
        spec = build_spec(gguf_checkpoint(keys, "gemma4", **shapes))
        assert [m.v == m.k for _, m in spec.attentions()] == k_is_v


def test_last_layers_take_keys_of_the_last_layer_of_their_kind() -> None:
    spec = _config(**EDGE)
    shared = [m for _, m in spec.all_attentions() if isinstance(m, SharedAttention)]
    assert [m.source for m in shared] == [1, 2, 1]
    assert [layer.feed_forward.up.out_features for layer in spec.layers] == [24] * 3 + [48] * 3
    assert [group.layers for group in spec.cache_groups()] == [(0, 2), (1,)]
    assert spec.layer_inputs is not None
    assert spec.tensors[spec.layer_inputs.table].shape == (CONFIG["vocab_size"], 24)
    kinds = [AttentionBlock, FeedForwardBlock, InputGateBlock] * 3
    kinds += [SharedAttentionBlock, FeedForwardBlock, InputGateBlock] * 3
    program = build_program(spec)
    assert [type(block) for block in program.blocks] == kinds
    assert program.layer_inputs == spec.layer_inputs
    scaled = [block.join.output_scale is not None for block in program.blocks]
    assert scaled == [False, False, True] * 6
    assert not any(block.join.folds_next_norm for block in program.blocks)


def test_a_gguf_file_says_the_same() -> None:
    spec = _gguf(
        block_count=6,
        attention__head_count_kv=[2, 1] * 3,
        attention__key_length=16,
        attention__value_length=16,
        attention__key_length_swa=8,
        attention__value_length_swa=8,
        attention__shared_kv_layers=2,
        attention__sliding_window=8,
        attention__sliding_window_pattern=np.asarray([True, False] * 3),
        embedding_length_per_layer_input=4,
        feed_forward_length=[24, 24, 24, 24, 48, 48],
        rope__dimension_count=16,
        rope__dimension_count_swa=8,
        rope__freq_base=1e6,
        rope__freq_base_swa=1e4,
    )
    assert _shapes(spec) == [(8, 2, 8), (16, 1, None)] * 3
    assert [layer.feed_forward.up.out_features for layer in spec.layers] == [24] * 4 + [48] * 2
    names = {"per_layer_token_embd.weight", "per_layer_model_proj.weight", "per_layer_proj_norm.weight"}
    names |= {"blk.0.inp_gate.weight", "blk.0.proj.weight", "blk.0.post_norm.weight", "blk.5.post_ffw_norm.weight"}
    stored_names = {source.name for source in spec.tensors.values()}
    assert names <= stored_names
    assert "blk.4.attn_k.weight" not in stored_names
    assert "blk.0.layer_output_scale.weight" not in stored_names  # it may be left out


def test_keys_of_layers_that_take_anothers_are_known_and_not_needed() -> None:
    config = config_checkpoint({"model_type": "gemma4_text", **EDGE})
    spec = build_spec(config)
    shapes = {source.name: source.shape for source in spec.tensors.values()}
    shapes |= {"model.layers.5.self_attn.k_proj.weight": (32, HIDDEN), "model.layers.4.self_attn.k_norm.weight": (8,)}
    tensors = {name: stored(name, shape) for name, shape in shapes.items()}
    checkpoint = dataclasses.replace(config, tensors=tensors)
    check_tensors(build_spec(checkpoint), checkpoint)
    own = {**tensors, "model.layers.1.self_attn.k_proj.bias": stored("model.layers.1.self_attn.k_proj.bias", (32,))}
    biased = dataclasses.replace(config, tensors=own)
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.1\.self_attn\.k_proj\.bias"):
        check_tensors(build_spec(biased), biased)


@pytest.mark.parametrize(
    ("keys", "error", "match"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "use_bidirectional_attention.*'all'"),
        ({"num_kv_shared_layers": 6}, CheckpointError, "num_kv_shared_layers.*6 of 6 layers"),
        ({"num_kv_shared_layers": 5}, CheckpointError, "num_kv_shared_layers.*5 of 6 layers"),
        (
            {"num_key_value_heads": 2, "num_global_key_value_heads": 3, "attention_k_eq_v": True},
            CheckpointError,
            "3 KV",
        ),
        ({"global_head_dim": 15}, CheckpointError, "size 15"),
        ({"vocab_size_per_layer_input": 7, "hidden_size_per_layer_input": 4}, UnsupportedModelError, "value 7"),
        ({"per_layer_config": {"1": {"heads": 2}}}, UnsupportedModelError, "per_layer_config.*heads"),
        ({"per_layer_config": {"1": 3}}, CheckpointError, "expected an object for layer 1"),
        ({"layer_types": ["full_attention"] * 5}, CheckpointError, "layer_types"),
    ],
)
def test_wrong_or_unknown_sizes_are_refused_by_name(keys: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        _config(**{**SMALL, **keys})


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"attention__head_count_kv": [2, 1, 2]}, "head_count_kv.*expected a list of 2"),
        ({"attention__head_count_kv": [2, 0]}, "head_count_kv.*0 is not within"),
        ({"feed_forward_length": [24, True]}, "feed_forward_length.*expected a whole number, found True"),
        ({"attention__shared_kv_layers": 2}, "shared_kv_layers.*2 of 2 layers"),
        ({"rope__dimension_count_swa": 3}, "dimension_count_swa.*odd"),
    ],
)
def test_wrong_sizes_of_a_gguf_file_are_refused_by_name(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        _gguf(**keys)


@pytest.mark.parametrize(
    ("keys", "feature", "reason"),
    [
        (DENSE, Feature.VALUE_NORM, "norms of values"),
        (DENSE, Feature.OUTPUT_SCALE, "factors of their outputs"),
        (EDGE, Feature.INPUT_GATE, "inputs of their own"),
    ],
)
def test_a_backend_refuses_by_name_what_it_lacks(keys: dict[str, Any], feature: Feature, reason: str) -> None:
    spec = _config(**keys)
    CPU.check(spec)
    lacking = dataclasses.replace(CPU, features=CPU.features - {feature})
    with pytest.raises(UnsupportedModelError, match=f"gemma4_text: layers 0, 1, 2, 3, 4, 5 have {reason}"):
        lacking.check(spec)


def test_a_backend_refuses_layers_with_keys_of_others() -> None:
    lacking = dataclasses.replace(CPU, mixers=CPU.mixers - {SharedAttention})
    with pytest.raises(UnsupportedModelError, match="layers 3, 4, 5 have attention over the keys and values of an"):
        lacking.check(_config(**EDGE))
