"""Hyper-parameters that are missing, absurd or unknown are refused by name, before any tensor is touched."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import CONFIG, FOLDER, GGUF_METADATA, GGUF_PATH, config_checkpoint, gguf_checkpoint
from realizar.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from realizar.models.registry import build_spec

ABSURD: list[tuple[str, str, Any]] = [
    ("block_count", "num_hidden_layers", 0),
    ("block_count", "num_hidden_layers", -1),
    ("block_count", "num_hidden_layers", 10**6),
    ("block_count", "num_hidden_layers", 2.0),
    ("block_count", "num_hidden_layers", True),
    ("block_count", "num_hidden_layers", "2"),
    ("embedding_length", "hidden_size", 0),
    ("embedding_length", "hidden_size", 2**40),
    ("feed_forward_length", "intermediate_size", 0),
    ("context_length", "max_position_embeddings", 0),
    ("vocab_size", "vocab_size", 0),
    ("vocab_size", "vocab_size", 2**60),
    ("attention.head_count", "num_attention_heads", 0),
    ("attention.head_count", "num_attention_heads", 6),
    ("attention.head_count", "num_attention_heads", 10**9),
    ("attention.head_count_kv", "num_key_value_heads", 0),
    ("attention.head_count_kv", "num_key_value_heads", 3),
    ("attention.head_count_kv", "num_key_value_heads", 8),
    ("attention.key_length", "head_dim", 0),
    ("attention.key_length", "head_dim", 7),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", 0.0),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", -1e-5),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", math.nan),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", math.inf),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", 2.0),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", "1e-5"),
    ("rope.freq_base", "rope_theta", 0.0),
    ("rope.freq_base", "rope_theta", math.nan),
    ("rope.freq_base", "rope_theta", "10000"),
]


@pytest.mark.parametrize(("gguf_key", "config_key", "value"), ABSURD)
def test_absurd_value_names_file_and_key(gguf_key: str, config_key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_spec(gguf_checkpoint({f"llama.{gguf_key}": value}))
    assert caught.value.where == f"key 'llama.{gguf_key}'"
    assert caught.value.path == GGUF_PATH
    with pytest.raises(CheckpointError) as caught:
        build_spec(config_checkpoint({config_key: value}))
    assert caught.value.where == f"key '{config_key}'"
    assert caught.value.path == FOLDER / "config.json"


REQUIRED_GGUF = [key for key in GGUF_METADATA if key.split(".", 1)[1] not in ("vocab_size",) and "rope" not in key]
REQUIRED_CONFIG = [key for key in CONFIG if key not in ("architectures", "hidden_act", "tie_word_embeddings")]


@pytest.mark.parametrize("key", [key for key in REQUIRED_GGUF if not key.endswith("head_count_kv")])
def test_missing_gguf_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match="missing") as caught:
        build_spec(gguf_checkpoint({key: None}))
    assert caught.value.where == f"key '{key}'"


@pytest.mark.parametrize("key", [key for key in REQUIRED_CONFIG if key not in ("num_key_value_heads", "model_type")])
def test_missing_config_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match="missing") as caught:
        build_spec(config_checkpoint({key: None}))
    assert caught.value.where == f"key '{key}'"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "spiral"),
        ("llama.rope.dimension_count", 2),
        ("llama.expert_shared_count", 8),
        ("llama.attention.causal", False),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.max_alibi_bias", 8.0),
        ("llama.attention.value_length", 8),
        ("llama.attention.head_count", [4, 2]),
        ("llama.attn_logit_softcapping", 30.0),
        ("llama.logit_scale", 0.5),
        ("llama.residual_scale", 0.5),
        ("llama.ssm.state_size", 16),
    ],
)
def test_gguf_value_without_a_meaning_here_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        build_spec(gguf_checkpoint({key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "tanh"),
        ("num_local_experts", 8),
        ("clip_qkv", 8.0),
        ("is_causal", False),
        ("rope_scaling", {"rope_type": "spiral", "factor": 2.0}),
        ("rope_scaling", {"type": "mrope", "mrope_section": [1, 1]}),
        ("rope_parameters", {"rope_type": "axial", "rope_theta": 1e4}),
    ],
)
def test_config_value_without_a_meaning_here_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        build_spec(config_checkpoint({key: value}))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rope_scaling", 8, "rope_scaling"),
        ("rope_scaling", {"rope_type": "linear"}, "rope_scaling.factor"),
        ("rope_scaling", {"rope_type": "linear", "factor": math.nan}, "rope_scaling.factor"),
        ("rope_scaling", {"rope_type": 3}, "rope_scaling.rope_type"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}, "rope_parameters.low_freq_factor"),
        (
            "rope_parameters",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "rope_parameters.high_freq_factor",
        ),
        ("rope_parameters", {"rope_type": "longrope", "factor": 4.0}, "rope_parameters.short_factor"),
        (
            "rope_parameters",
            {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 0.0]},
            "rope_parameters.short_factor",
        ),
        ("rope_parameters", {"full_attention": None, "other": {}}, "rope_parameters.full_attention"),
        ("attention_bias", 1, "attention_bias"),
        ("tie_word_embeddings", "no", "tie_word_embeddings"),
        ("partial_rotary_factor", 0.1, "partial_rotary_factor"),
    ],
)
def test_malformed_config_value_is_named(key: str, value: Any, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_spec(config_checkpoint({key: value}))
    assert named in caught.value.where


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("llama", "attention.scale"),
        ("llama", "embedding_scale"),
        ("llama", "rope.scaling.factor"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma4", "expert_count"),
        ("mistral3", "attention.temperature_scale"),
        ("olmo2", "attention.sliding_window"),
    ],
)
def test_an_array_in_place_of_a_number_is_refused_by_key(architecture: str, key: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"key '{architecture}\.{key}'"):
        build_spec(gguf_checkpoint({f"{architecture}.{key}": np.asarray([1, 2], np.int32)}, architecture))


def test_neutral_and_harmless_keys_are_taken() -> None:
    harmless = {
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.finetuned": False,
        "llama.rope.scaling.type": "none",
        "llama.attention.head_count": [4, 4],
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.logit_scale": 1.0,
        "tokenizer.ggml.model": "gpt2",
    }
    assert build_spec(gguf_checkpoint(harmless)).layers == build_spec(gguf_checkpoint()).layers


@pytest.mark.parametrize(
    ("name", "nearest"), [("qwen3-moe", "qwen3moe"), ("glm4-moe", "glm4moe"), ("gptoss", "gpt-oss"), ("rwkv7", None)]
)
def test_the_nearest_known_architecture_is_named(name: str, nearest: str | None) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build_spec(gguf_checkpoint(architecture=name))
    expected = "" if nearest is None else f", the nearest known one is '{nearest}'"
    assert f"unknown architecture '{name}'{expected} (known: " in str(caught.value)


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'perceiver'"):
        build_spec(gguf_checkpoint({"general.architecture": "perceiver"}))
    with pytest.raises(UnsupportedModelError, match="'perceiver'"):
        build_spec(config_checkpoint({"model_type": "perceiver"}))
    with pytest.raises(UnsupportedModelError, match="never run"):
        build_spec(config_checkpoint({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}))


def test_missing_architecture_is_an_error_of_the_file() -> None:
    with pytest.raises(CheckpointError, match=r"general\.architecture"):
        build_spec(gguf_checkpoint({"general.architecture": None}))
    with pytest.raises(CheckpointError, match="model_type"):
        build_spec(config_checkpoint({"model_type": None, "architectures": None}))


def test_class_name_stands_in_for_a_missing_model_type() -> None:
    assert build_spec(config_checkpoint({"model_type": None})).architecture == "llama"


@pytest.mark.parametrize("context_length", [0, -5, 65])
def test_context_longer_than_the_models_is_refused(context_length: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_spec(gguf_checkpoint(), context_length)
    assert caught.value.param == "context_length"


def test_context_length_is_the_configured_one_or_the_models() -> None:
    assert build_spec(gguf_checkpoint()).context_length == 64
    assert build_spec(gguf_checkpoint(), 32).context_length == 32


def test_vocabulary_size_comes_from_key_then_tokens_then_embedding() -> None:
    without = {"llama.vocab_size": None}
    assert build_spec(gguf_checkpoint({"tokenizer.ggml.tokens": ["a"] * 7})).vocab_size == 40
    assert build_spec(gguf_checkpoint({**without, "tokenizer.ggml.tokens": ["a"] * 7})).vocab_size == 7
    assert build_spec(gguf_checkpoint(without)).vocab_size == 40


def test_window_that_no_context_leaves_is_no_window() -> None:
    windowed = {"llama.attention.sliding_window": 48}
    assert build_spec(gguf_checkpoint(windowed)).layers[0].mixer.window == 48
    assert build_spec(gguf_checkpoint(windowed), 48).layers[0].mixer.window is None


def test_the_work_for_a_spec_grows_with_its_layers_and_no_faster() -> None:
    def calls(layers: int) -> int:
        checkpoint = gguf_checkpoint({"llama.block_count": layers})
        count = 0

        def note(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            build_spec(checkpoint)
        finally:
            sys.setprofile(None)
        return count

    calls(1)
    first, second, third = calls(40), calls(80), calls(120)
    assert first < 40 * 500
    assert third - second < 1.3 * (second - first), "squares would be 1.67"
