"""Loading is strict both ways: a key that nobody reads is refused by name unless it is known to change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from handmade_checkpoint import HEADS, HIDDEN, config_checkpoint, gguf_checkpoint
from models.published_mixtures import PUBLISHED_MIXTURES
from realizar.errors import UnsupportedModelError
from realizar.models.registry import build_spec

HALF = HIDDEN // HEADS // 2

# Keys as the published files have them, beside the sizes that every file has.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.2": (
        "llama",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 4,
            "initializer_range": 0.02,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0",
            "use_cache": True,
        },
    ),
    "smollm2": (
        "llama",
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "pad_token_id": 2,
            "transformers.js_config": {"dtype": "q4"},
            "_attn_implementation_autoset": True,
            "unsloth_fixed": True,
        },
    ),
    "llama 1": (
        "llama",
        {"max_sequence_length": 2048, "_name_or_path": "x", "tokenizer_class": "X"},
    ),
    "mistral": ("mistral", {"sliding_window": 32, "attention_dropout": 0.0, "head_dim": None}),
    "qwen2.5": (
        "qwen2",
        {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False},
    ),
    "qwen3": (
        "qwen3",
        {
            "attention_bias": False,
            "max_window_layers": 28,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "gemma 2": (
        "gemma2",
        {
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 32,
            "sliding_window_size": 32,
        },
    ),
    "gemma 3": (
        "gemma3_text",
        {
            "_sliding_window_pattern": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "rope_scaling": None,
            "use_bidirectional_attention": False,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "phi 3": (
        "phi3",
        {
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"long_factor": [1.0] * HALF, "short_factor": [2.0] * HALF, "type": "su"},
            "sliding_window": 2047,
        },
    ),
    "phi 4 mini": (
        "phi3",
        {
            "attention_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "partial_rotary_factor": 0.5,
            "sliding_window": 262144,
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "mlp_bias": False,
        },
    ),
    "olmo 2": ("olmo2", {"attention_bias": False, "attention_dropout": 0.0, "pad_token_id": 100277}),
    "glm 4 9b 0414": (
        "glm4",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 4,
            "pad_token_id": 151329,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
    ),
    "starcoder2": (
        "starcoder2",
        {
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "embedding_dropout": 0.1,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-05,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "residual_dropout": 0.1,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "sliding_window": 32,
            "use_bias": True,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "block_auto_adjust_ff_dim": True,
            "block_dim": HIDDEN,
            "block_ff_dim": 24,
            "block_ffn_dim_multiplier": 1.0,
            "block_mlp_init_scale": 1.0,
            "block_multiple_of": 256,
            "block_norm_eps": 1e-05,
            "block_out_init_scale": 1.0,
            "block_use_swiglu": True,
            "block_use_xavier_init": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": HIDDEN,
            "conv_dim_out": HIDDEN,
            "conv_use_xavier_init": True,
            "full_attn_idxs": [1],
            "intermediate_size": None,
            "norm_eps": 1e-05,
            "num_heads": HEADS,
            "rms_norm_eps": None,
            "rope_theta": 1000000.0,
            "theta": 1000000.0,
            "tie_embedding": True,
            "tie_word_embeddings": None,
            "use_pos_enc": True,
        },
    ),
    "smollm3": (
        "smollm3",
        {
            "attention_bias": False,
            "layer_types": ["full_attention"] * 2,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1],
            "pretraining_tp": 2,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
    **PUBLISHED_MIXTURES,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load(name: str) -> None:
    model_type, keys = PUBLISHED[name]
    build_spec(config_checkpoint({"model_type": model_type, **keys}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_interleaved", True),
        ("residual_multiplier", 0.5),
        ("final_logit_softcapping", 30.0),
        ("use_bidirectional_attention", True),
        ("full_attn_mod", 2),
        ("mlp_type", "gated"),
        ("num_nextn_predict_layers", 1),
        ("layer_scale", [1.0, 2.0]),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "skew": 3.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "default", "skew": 3.0}}),
    ],
)
def test_an_unknown_key_of_a_configuration_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: key '{key}[a-z_.]*': unsupported value"):
        build_spec(config_checkpoint({key: value}))


@pytest.mark.parametrize("value", [None, False, 0, "", "none", [], {}])
def test_an_unknown_key_that_says_nothing_is_taken(value: Any) -> None:
    expected = build_spec(config_checkpoint()).layers
    assert build_spec(config_checkpoint({"anything": value, "other_multiplier": 1.0})).layers == expected


@pytest.mark.parametrize("key", ["anything", "swiglu_clamp_exp", "attention.new", "nextn_predict_layers"])
def test_an_unknown_key_of_a_gguf_file_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"key 'llama\.{key}': unsupported value 2"):
        build_spec(gguf_checkpoint({f"llama.{key}": 2}))
    build_spec(gguf_checkpoint({f"llama.{key}": 0, "general.anything": 2, "mistral.x": 2}))


def test_gemma3s_pattern_has_two_names() -> None:
    spec = build_spec(
        config_checkpoint({"model_type": "gemma3_text", "_sliding_window_pattern": 2, "sliding_window": 8})
    )
    assert [layer.mixer.window for layer in spec.layers] == [8, None]
