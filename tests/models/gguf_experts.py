"""Experts of transformers' models as llama.cpp's converter lays them out, and the keys that say how they are chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
MIXTURES = {
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "glm4v_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_moe": "qwen3vlmoe",
}
"""GGUF architecture of each `model_type` with experts."""


def with_split_experts(tensors: Mapping[str, Any], name: str) -> dict[str, Array]:
    """Tensors by name; experts' gate and up, which transformers 5 holds as one tensor, apart."""
    split: dict[str, Array] = {}
    for hf_name, tensor in tensors.items():
        split |= dict(_parts(hf_name, tensor.detach().numpy(), name))
    return split


def _parts(hf_name: str, values: Array, name: str) -> Iterator[tuple[str, Array]]:
    layer, is_expert, kind = hf_name.partition(".experts.")
    if not is_expert:
        yield from _of_all_tokens(hf_name, values)
        return
    base = f"{layer.replace('block_sparse_moe', 'mlp').replace('feed_forward', 'mlp')}.experts."
    suffix = ".bias" if kind.endswith("_bias") else ".weight"
    if name == "gemma4":  # gate and up stay one tensor
        yield f"{hf_name}.weight", values
        return
    if name == "gpt-oss" and suffix == ".weight":
        values = values.swapaxes(1, 2)
    if kind.startswith("down_proj"):
        yield f"{base}down_proj{suffix}", values
        return
    alternating = name == "gpt-oss"
    gate, up = (values[:, ::2], values[:, 1::2]) if alternating else np.split(values, 2, axis=1)
    yield f"{base}gate_proj{suffix}", gate
    yield f"{base}up_proj{suffix}", up


def _of_all_tokens(hf_name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Sinks, routers, their biases, and shared experts."""
    layer = ".".join(hf_name.split(".")[:3])
    if hf_name.endswith(".sinks"):
        yield f"{hf_name}.weight", values
    elif hf_name.endswith("e_score_correction_bias"):
        yield f"{layer}.mlp.gate.e_score_correction.bias", values.reshape(-1)
    elif hf_name.endswith("feed_forward.expert_bias"):
        yield f"{layer}.feed_forward.expert_bias.bias", values
    elif hf_name.endswith("shared_expert_gate.weight"):
        yield hf_name, values[0]
    elif hf_name.endswith("block_sparse_moe.router.weight"):
        yield f"{layer}.mlp.gate.weight", values
    elif hf_name.endswith("shared_mlp.input_linear.weight"):
        for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
            yield f"{layer}.mlp.shared_expert.{part}_proj.weight", half
    elif hf_name.endswith("shared_mlp.output_linear.weight"):
        yield f"{layer}.mlp.shared_expert.down_proj.weight", values
    else:
        yield hf_name, values


def add_experts(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    """The keys of a mixture; nothing where a model has none."""
    model_type = config.model_type.removesuffix("_text")
    if model_type not in MIXTURES:
        return
    if model_type in ("granitemoe", "granitemoeshared", "glm4_moe", "glm4v_moe"):
        writer.add_expert_count(config.num_local_experts)
    else:
        writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if name not in ("llama", "olmoe", "granitemoe"):
        writer.add_expert_feed_forward_length(width)
    if model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if name == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if name == "ernie4_5-moe":
        _add_ernie(writer, config)
    if name == "glm4moe":
        _add_glm(writer, config)
    if name == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if name in ("minimax-m2", "lfm2moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_ernie(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    width = config.moe_intermediate_size * config.moe_num_shared_experts
    writer.add_expert_shared_feed_forward_length(width)


def _add_glm(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
