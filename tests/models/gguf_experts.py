"""Experts of transformers' models as llama.cpp's converter lays them out, and the keys that say how they are chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
MIXTURES = {"gpt_oss": "gpt-oss", "olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
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
        yield f"{hf_name}.weight" if hf_name.endswith(".sinks") else hf_name, values
        return
    base, suffix = f"{layer}.experts.", ".bias" if kind.endswith("_bias") else ".weight"
    if name == "gpt-oss" and suffix == ".weight":
        values = values.swapaxes(1, 2)
    if kind.startswith("down_proj"):
        yield f"{base}down_proj{suffix}", values
        return
    alternating = name == "gpt-oss"
    gate, up = (values[:, ::2], values[:, 1::2]) if alternating else np.split(values, 2, axis=1)
    yield f"{base}gate_proj{suffix}", gate
    yield f"{base}up_proj{suffix}", up


def add_experts(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    """The keys of a mixture; nothing where a model has none."""
    if name not in MIXTURES.values():
        return
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if name == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
