"""Keys and layers of a generated Gemma 4 of the mixed kind, as llama.cpp's converter writes them. numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor
from realizar.models.generated.shapes import Shape

EMBEDDING_STD = 1.0
"""Embeddings are multiplied by the root of their size, and each branch adds one unit: tokens stay unlike each other."""
_PERIOD = 6  # the last layer of each six is full
_WINDOW, _LOCAL_BASE, _LOGIT_CAP, _ROTATING_SHARE = 1024, 1e4, 30.0, 0.25
_QUERY_NORM = 0.25  # stands for the scale of attention
_UNROTATED = 1e30


def gemma4_keys(shape: Shape) -> dict[str, Any]:
    """Keys beside those of every shape, without the architecture's name. Full layers have KV heads of their own."""
    is_local = _windowed_layers(shape)
    return {
        "attention.head_count_kv": [shape.num_kv_heads if flag else shape.full_kv_heads for flag in is_local],
        "attention.key_length": shape.full_head_size,
        "attention.value_length": shape.full_head_size,
        "attention.key_length_swa": shape.head_size,
        "attention.value_length_swa": shape.head_size,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": _WINDOW,
        "attention.sliding_window_pattern": is_local,
        "embedding_length_per_layer_input": 0,
        "expert_feed_forward_length": shape.expert_size,
        "final_logit_softcapping": _LOGIT_CAP,
        "rope.dimension_count": shape.full_head_size,
        "rope.dimension_count_swa": shape.head_size,
        "rope.freq_base_swa": _LOCAL_BASE,
    }


def gemma4_rope_divisors(shape: Shape) -> NewTensor:
    """The tensor that keeps most of a full layer's head from rotating."""
    divisors = np.full(shape.full_head_size // 2, _UNROTATED, np.float32)
    divisors[: int(shape.full_head_size * _ROTATING_SHARE / 2)] = 1
    return NewTensor("rope_freqs.weight", GGMLType.F32, divisors.shape, divisors)


def gemma4_layer(
    shape: Shape,
    index: int,
    matrix: Callable[..., NewTensor],
    vector: Callable[..., NewTensor],
    router: Callable[[str], NewTensor],
    better: bool,
) -> Iterator[NewTensor]:
    """The tensors of a layer; `better` gives V and down projections more bits. See `generate` for the rest."""
    prefix, hidden = f"blk.{index}.", shape.hidden_size
    yield vector(prefix + "attn_norm.weight", hidden, 1.0)
    yield from _attention(shape, index, matrix, vector, better)
    yield vector(prefix + "post_attention_norm.weight", hidden, 1.0)
    yield vector(prefix + "ffn_norm.weight", hidden, 1.0)
    yield matrix(prefix + "ffn_gate.weight", shape.feed_forward_size, hidden)
    yield matrix(prefix + "ffn_up.weight", shape.feed_forward_size, hidden)
    yield matrix(prefix + "ffn_down.weight", hidden, shape.feed_forward_size, six_bits=better)
    for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2", "post_ffw_norm"):
        yield vector(f"{prefix}{name}.weight", hidden, 1.0)
    count, wide = shape.num_experts, shape.expert_size
    yield router(prefix + "ffn_gate_inp.weight")
    # Takes back the root of the width, by which the router's norm is divided.
    yield vector(prefix + "ffn_gate_inp.scale", hidden, hidden**0.5)
    yield matrix(prefix + "ffn_gate_up_exps.weight", count, 2 * wide, hidden, of_experts=True)
    yield matrix(prefix + "ffn_down_exps.weight", count, hidden, wide, six_bits=better, of_experts=True)
    yield vector(prefix + "ffn_down_exps.scale", count, 1.0)
    yield vector(prefix + "layer_output_scale.weight", 1, 1.0)


def _attention(
    shape: Shape, index: int, matrix: Callable[..., NewTensor], vector: Callable[..., NewTensor], better: bool
) -> Iterator[NewTensor]:
    """K makes V in full layers."""
    prefix, hidden, is_local = f"blk.{index}.", shape.hidden_size, _windowed_layers(shape)[index]
    size = shape.head_size if is_local else shape.full_head_size
    keys = size * (shape.num_kv_heads if is_local else shape.full_kv_heads)
    yield matrix(prefix + "attn_q.weight", shape.num_heads * size, hidden)
    yield matrix(prefix + "attn_k.weight", keys, hidden)
    if is_local:
        yield matrix(prefix + "attn_v.weight", keys, hidden, six_bits=better)
    yield vector(prefix + "attn_q_norm.weight", size, _QUERY_NORM)
    yield vector(prefix + "attn_k_norm.weight", size, 1.0)
    yield matrix(prefix + "attn_output.weight", hidden, shape.num_heads * size)


def _windowed_layers(shape: Shape) -> list[bool]:
    return [(index + 1) % _PERIOD != 0 and index + 1 != shape.num_layers for index in range(shape.num_layers)]
