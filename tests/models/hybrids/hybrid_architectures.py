"""Rows of models whose layers are mostly recurrent; see `architectures.py`."""

from __future__ import annotations

from typing import Any

from architecture_case import Case
from dense_architectures import QWEN3_VL

_LONG: dict[str, Any] = {"max_position_embeddings": 1024, "num_hidden_layers": 6}
_LISTED = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_AXES: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}

HYBRIDS: dict[str, Case] = {
    "qwen35": Case(
        "Qwen3_5", {**_LONG, **_DELTA, **_AXES, "layer_types": [*_LISTED, "linear_attention"]},
        num_tokens=600,
    ),
    "qwen35-two": Case(
        "Qwen3_5",
        {**_DELTA, "num_hidden_layers": 8, "linear_num_value_heads": 4, "tie_word_embeddings": True},

    ),
    "qwen35-uneven": Case(
        "Qwen3_5",
        {**_DELTA, "linear_key_head_dim": 8, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3,
         "attention_bias": True, "full_attention_interval": 2},
        forms=("safetensors",),
    ),
    "qwen35-vision": Case(
        "Qwen3_5",
        {**_DELTA, **_AXES, "vision_config": {**QWEN3_VL["vision_config"], "deepstack_visual_indexes": []}},

    ),
    "qwen35moe": Case(
        "Qwen3_5Moe",
        {**_LONG, **_DELTA, **_AXES, **_EXPERTS, "layer_types": [*_LISTED, "linear_attention"],
         "linear_num_value_heads": 4},
        num_tokens=600,
    ),
    "qwen3next": Case(
        "Qwen3Next", {**_LONG, **_DELTA, **_EXPERTS, "num_hidden_layers": 8}, num_tokens=600
    ),
    "qwen3next-dense-layers": Case(
        "Qwen3Next",
        {**_DELTA, **_EXPERTS, "linear_num_value_heads": 4, "decoder_sparse_step": 2, "norm_topk_prob": False},
        forms=("safetensors",),
    ),
    "lfm2moe": Case(
        "Lfm2Moe",
        {"max_position_embeddings": 1024, "num_hidden_layers": 6, "num_dense_layers": 2, "num_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 48,
         "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]},
        num_tokens=600,
    ),
    "lfm2moe-plain": Case(
        "Lfm2Moe",
        {"num_dense_layers": 0, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "routed_scaling_factor": 1.5, "conv_bias": True, "use_expert_bias": False, "norm_topk_prob": False,
         "tie_word_embeddings": False, "layer_types": ["conv", "full_attention", "conv", "conv"]},
        forms=("safetensors",),
    ),
}  # fmt: skip
