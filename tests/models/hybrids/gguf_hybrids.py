"""Tensors and keys of models with gated delta nets as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
HYBRIDS = {
    "qwen3_5_text": "qwen35",
    "qwen3_5": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_moe": "qwen35moe",
} | {"qwen3_next": "qwen3next"}
"""GGUF architecture of each `model_type`."""
NAMES = frozenset(HYBRIDS.values())


def converted_parts(hf_name: str, values: Array, config: Any, name: str) -> Iterator[tuple[str, Array]]:
    """The tensors that one of a model becomes, under names that the table of names knows."""
    if hf_name.endswith("norm.weight") and not hf_name.endswith("linear_attn.norm.weight"):
        yield hf_name, values + np.float32(1)
    elif "linear_attn." not in hf_name:
        yield hf_name, values
    elif hf_name.endswith("in_proj_qkvz.weight"):
        yield from _apart(hf_name, values, config)
    else:
        renamed = hf_name.replace(".dt_bias", ".dt_proj.bias")
        if hf_name.endswith("A_log"):
            values = -np.exp(values)
        if "conv1d" in hf_name:
            values = values[:, 0]
        yield renamed, _tiled(hf_name, values, config) if name != "qwen3next" else values


def _apart(hf_name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """q, k and v of all heads one below the other, and z, of a matrix that has them by key head."""
    own = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    by_head = values.reshape(config.linear_num_key_heads, -1, values.shape[-1])
    bounds = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, own])
    q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in np.split(by_head, bounds, axis=1))
    yield hf_name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate([q, k, v])
    yield hf_name.replace("in_proj_qkvz", "in_proj_z"), z


def _tiled(hf_name: str, values: Array, config: Any) -> Array:
    """Value heads in the order in which each reads the next key head."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if ".in_proj_qkv." in hf_name or ".conv1d." in hf_name:
        return np.concatenate([values[:keys], _reordered(values[keys:], config)])
    if ".out_proj." in hf_name:
        return np.ascontiguousarray(_reordered(values.T, config).T)
    return values if hf_name.endswith("linear_attn.norm.weight") else _reordered(values, config)


def _reordered(values: Array, config: Any) -> Array:
    heads = config.linear_num_key_heads
    grouped = values.reshape(heads, config.linear_num_value_heads // heads, -1, *values.shape[1:])
    return np.ascontiguousarray(grouped.swapaxes(0, 1).reshape(values.shape))


def add_hybrid_keys(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    """The keys of recurrent layers, of which layers they are, and of the rope's axes."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{name}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)
    if name != "qwen3next" and "mrope_section" not in config.rope_parameters:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if name != "qwen35":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
