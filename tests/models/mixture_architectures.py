"""Rows of mixtures of experts; see `architectures.py`. The CPU runs all of them."""

from __future__ import annotations

from typing import Any

from architecture_case import Case
from dense_architectures import GLM4V, QWEN3_VL

_LONG: dict[str, Any] = {"max_position_embeddings": 640}

MIXTURES: dict[str, Case] = {
    "gemma4-moe": Case(
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
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
        num_tokens=600,
    ),
    "gpt-oss": Case(
        "GptOss",
        {
            "head_dim": 32,
            "num_hidden_layers": 5,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "max_position_embeddings": 640,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 32.0,
                "beta_fast": 2.0,
                "beta_slow": 0.5,
                "truncate": False,
                "original_max_position_embeddings": 20,
            },
        },
        num_tokens=600,
    ),
    "mixtral": Case("Mixtral", {**_LONG, "num_local_experts": 6, "sliding_window": 40}, num_tokens=600),
    "qwen2moe": Case(
        "Qwen2Moe",
        {
            **_LONG,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
        num_tokens=600,
    ),
    "qwen2moe-dense-layers": Case(
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
        },
        forms=("safetensors",),
    ),
    "granitemoe": Case(
        "GraniteMoe",
        {
            **_LONG,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
        },
        num_tokens=600,
    ),
    "granitemoe-shared": Case(
        "GraniteMoeShared",
        {**_LONG, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 80},
        num_tokens=600,
    ),
    "qwen3vlmoe": Case(
        "Qwen3VLMoe",
        {
            **_LONG,
            "head_dim": 32,
            "tie_word_embeddings": False,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            **QWEN3_VL,
        },
        num_tokens=600,
    ),
    "ernie4_5-moe": Case(
        "Ernie4_5_Moe",
        {
            **_LONG,
            "num_hidden_layers": 5,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        num_tokens=600,
    ),
    "ernie4_5-moe-interval": Case(
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 6,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
        forms=("safetensors",),
    ),
    "glm4moe": Case(
        "Glm4Moe",
        {
            **_LONG,
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
        num_tokens=600,
    ),
    "glm4moe-plain": Case(
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "partial_rotary_factor": 0.25,
        },
    ),
    "glm4vmoe": Case(
        "Glm4vMoe",
        {
            **_LONG,
            **GLM4V,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
        num_tokens=600,
    ),
    "minimax-m2": Case(
        "MiniMaxM2",
        {
            **_LONG,
            "head_dim": 32,
            "rotary_dim": 16,
            "partial_rotary_factor": 0.5,  # the same, by the only name that transformers knew before 5.18
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        num_tokens=600,
    ),
}
