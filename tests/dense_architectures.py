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

DENSE: dict[str, Case] = {
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
}
