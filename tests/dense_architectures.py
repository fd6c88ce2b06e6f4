"""Rows of dense architectures with windows, scaled ropes or vision parts; see `architectures.py`.

Rows of 600 tokens are past every window, and past the original context of every scaled rope. Their first tokens are
those of a short sequence.
"""

from __future__ import annotations

from typing import Any

from architecture_case import Case

_LONG: dict[str, Any] = {"max_position_embeddings": 1024}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}

_PIXTRAL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 8,
}

QWEN3_VL: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
"""Rotary embedding and vision part of Qwen3-VL, dense or a mixture."""

GLM4V: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 64,
        "image_size": 16,
        "patch_size": 4,
    },
}
"""Rotary embedding and vision part of GLM-4.1V, and of GLM-4.5V with its mixture."""

DENSE: dict[str, Case] = {
    "arcee": Case("Arcee", {**_LONG, "head_dim": 24, "rope_parameters": _YARN}, num_tokens=600),
    "arcee-biases-tied": Case("Arcee", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo3": Case(
        "Olmo3",
        {
            **_LONG,
            "num_hidden_layers": 8,
            "sliding_window": 40,
            "rope_parameters": {
                "full_attention": {**_YARN, "attention_factor": 1.2079441541679836},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        num_tokens=600,
    ),
    "olmo3-listed": Case(
        "Olmo3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        forms=("safetensors",),
    ),
    "seed_oss": Case(
        "SeedOss", {**_LONG, "head_dim": 24, "attention_out_bias": True, "mlp_bias": True}, num_tokens=600
    ),
    "seed_oss-plain": Case(
        "SeedOss", {"head_dim": 32, "attention_bias": False, "tie_word_embeddings": True}, forms=("safetensors",)
    ),
    "exaone4": Case(
        "Exaone4",
        {
            **_LONG,
            "num_hidden_layers": 8,
            "sliding_window": 40,
            "sliding_window_pattern": 4,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            },
        },
        num_tokens=600,
    ),
    "exaone4-without-windows": Case(
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "ernie4_5": Case("Ernie4_5", {**_LONG, "head_dim": 24}, num_tokens=600),
    "ernie4_5-biases": Case(
        "Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}, forms=("safetensors",)
    ),
    "ministral3": Case(
        "Ministral3",
        {
            **_LONG,
            "head_dim": 24,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        num_tokens=600,
    ),
    "ministral3-short": Case(
        "Ministral3",
        {
            **_LONG,
            "head_dim": 24,
            "sliding_window": 8,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1},
        },
        context_length=64,
        forms=("safetensors",),
    ),
    "mistral3": Case(
        "Mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "vision_config": _PIXTRAL,
        },
    ),
    "mistral3-tied": Case(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True, "vision_config": _PIXTRAL},
        forms=("safetensors",),
    ),
    "qwen2vl": Case(
        "Qwen2VL",
        {
            **_LONG,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        },
        num_tokens=600,
    ),
    "qwen2.5vl": Case(
        "Qwen2_5_VL",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 4,
            },
        },
        forms=("safetensors",),
    ),
    "qwen3vl": Case(
        "Qwen3VL",
        {
            **_LONG,
            "head_dim": 32,
            "tie_word_embeddings": True,
            **QWEN3_VL,
        },
        num_tokens=600,
    ),
    "glm4": Case("Glm4", {**_LONG, "head_dim": 32, "attention_bias": True}, num_tokens=600),
    "glm4-plain": Case("Glm4", {"partial_rotary_factor": 0.25, "tie_word_embeddings": True}),
    "glm4v": Case("Glm4v", {**_LONG, **GLM4V}, num_tokens=600),
    "gemma4": Case(
        "Gemma4",
        {
            **_LONG,
            "num_hidden_layers": 7,
            "head_dim": 24,
            "global_head_dim": 48,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 40,
            "final_logit_softcapping": 3.0,
            "use_bidirectional_attention": "vision",
        },
        num_tokens=600,
    ),
    "gemma4-e": Case(
        "Gemma4",
        {
            **_LONG,
            "num_hidden_layers": 8,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 131,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        num_tokens=600,
    ),
}
