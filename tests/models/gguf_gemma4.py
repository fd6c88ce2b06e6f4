"""Keys of a Gemma 4 GGUF file, whose layers differ in nearly every size, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def scale_name(hf_name: str) -> str | None:
    """The name of a router's or experts' scales in a file, which have no weight; None for other tensors."""
    _, _, index, *rest = hf_name.split(".")
    return f"blk.{index}.{_SCALES['.'.join(rest)]}" if ".".join(rest) in _SCALES else None


def add_gemma4_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Sizes, ropes and windows, and the divisors that keep most of a full layer's head from rotating."""
    layers, is_local = config.num_hidden_layers, [kind == "sliding_attention" for kind in config.layer_types]
    local, full = (config.per_layer_config[kind] for kind in ("sliding_attention", "full_attention"))
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = [local.num_key_value_heads if flag else full.num_key_value_heads for flag in is_local]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    owners = layers - config.num_kv_shared_layers
    doubled = 2 * config.intermediate_size if config.use_double_wide_mlp else config.intermediate_size
    writer.add_feed_forward_length([config.intermediate_size if index < owners else doubled for index in range(layers)])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(local.head_dim)
    writer.add_value_length_swa(local.head_dim)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_local)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(local.head_dim)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rotating = int(full.head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = np.full(full.head_dim // 2, 1e30, np.float32)
    divisors[:rotating] = 1
    writer.add_tensor("rope_freqs.weight", divisors)
