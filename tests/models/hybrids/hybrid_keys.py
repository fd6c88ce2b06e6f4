"""Keys that models of gated delta nets have beside the sizes of every model, for checkpoints made by hand."""

from __future__ import annotations

from typing import Any

from handmade_checkpoint import HEADS, HIDDEN, LAYERS

_SIZES = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 48,
}
_ATTENTION: dict[str, Any] = {
    "attention.key_length": HIDDEN // HEADS,
    "attention.recurrent_layers": [True] + [False] * (LAYERS - 1),
}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
_CONFIG: dict[str, Any] = {
    "head_dim": HIDDEN // HEADS,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
}
_CONFIG_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

GGUF: dict[str, dict[str, Any]] = {
    name: {f"{name}.{key}": value for key, value in {**_SIZES, **_ATTENTION, **own}.items()}
    for name, own in (("qwen35", {}), ("qwen35moe", _EXPERTS), ("qwen3next", _EXPERTS))
}
"""By architecture."""
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": _CONFIG,
    "qwen3_5_text": _CONFIG,
    "qwen3_5_moe": {**_CONFIG, **_CONFIG_EXPERTS},
    "qwen3_5_moe_text": {**_CONFIG, **_CONFIG_EXPERTS},
    "qwen3_next": {**_CONFIG, **_CONFIG_EXPERTS},
}
"""By `model_type`."""
