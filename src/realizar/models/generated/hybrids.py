"""Keys and layers of generated models with recurrent layers, as llama.cpp's converters write them. numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from realizar.checkpoint.gguf_writer import NewTensor
from realizar.models.generated.shapes import Shape

QWEN = ("qwen35", "qwen35moe")
CONVOLUTIONS = ("lfm2", "lfm2moe")
_HEAD, _PERIOD, _ROTATING = 128, 4, 64  # of a delta net; layers, of which the last is attention; of an attention head
_DELTA_LENGTH, _CONVOLUTION_LENGTH = 4, 3
_DECAY = -0.15  # a state keeps about nine tenths at each token

Make = Callable[..., NewTensor]


def hybrid_keys(shape: Shape) -> dict[str, Any]:
    """Keys beside those of every shape, without the architecture's name."""
    if shape.architecture in CONVOLUTIONS:
        is_attention = _attention_layers(shape)
        keys = {
            "attention.head_count_kv": [shape.num_kv_heads * flag for flag in is_attention],
            "shortconv.l_cache": _CONVOLUTION_LENGTH,
        }
        if shape.num_experts:
            keys |= {"leading_dense_block_count": shape.dense_layers, "expert_gating_func": 2}
        return keys
    keys = {
        "full_attention_interval": _PERIOD,
        "rope.dimension_count": _ROTATING,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": _DELTA_LENGTH,
        "ssm.state_size": _HEAD,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.value_heads * _HEAD,
    }
    return keys | ({"expert_shared_feed_forward_length": shape.expert_size} if shape.num_experts else {})


def hybrid_layer(
    shape: Shape, index: int, matrix: Make, vector: Make, router: Callable[[str], NewTensor], better: bool
) -> Iterator[NewTensor]:
    """The tensors of a layer; `better` gives V and down projections more bits. See `generate` for the rest."""
    prefix, hidden, is_qwen = f"blk.{index}.", shape.hidden_size, shape.architecture in QWEN
    yield vector(prefix + "attn_norm.weight", hidden, 1.0)
    if _attention_layers(shape)[index]:
        yield from _attention(shape, prefix, matrix, vector, better)
    elif is_qwen:
        yield from _delta_net(shape, prefix, matrix, vector)
    else:
        yield matrix(prefix + "shortconv.in_proj.weight", 3 * hidden, hidden)
        yield vector(prefix + "shortconv.conv.weight", _CONVOLUTION_LENGTH, 0.5, hidden)
        yield matrix(prefix + "shortconv.out_proj.weight", hidden, hidden)
    yield vector(prefix + ("post_attention_norm.weight" if is_qwen else "ffn_norm.weight"), hidden, 1.0)
    if shape.num_experts and index >= shape.dense_layers:
        yield from _experts(shape, prefix, matrix, vector, router, better)
        return
    yield matrix(prefix + "ffn_gate.weight", shape.feed_forward_size, hidden)
    yield matrix(prefix + "ffn_up.weight", shape.feed_forward_size, hidden)
    yield matrix(prefix + "ffn_down.weight", hidden, shape.feed_forward_size, six_bits=better)


def _attention(shape: Shape, prefix: str, matrix: Make, vector: Make, better: bool) -> Iterator[NewTensor]:
    """Queries of Qwen have the output gate beside them."""
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    yield matrix(prefix + "attn_q.weight", queries * (2 if shape.architecture in QWEN else 1), hidden)
    yield matrix(prefix + "attn_k.weight", keys, hidden)
    yield matrix(prefix + "attn_v.weight", keys, hidden, six_bits=better)
    yield vector(prefix + "attn_q_norm.weight", shape.head_size, 1.0)
    yield vector(prefix + "attn_k_norm.weight", shape.head_size, 1.0)
    yield matrix(prefix + "attn_output.weight", hidden, queries)


def _delta_net(shape: Shape, prefix: str, matrix: Make, vector: Make) -> Iterator[NewTensor]:
    hidden, keys, values = shape.hidden_size, shape.key_heads * _HEAD, shape.value_heads * _HEAD
    yield matrix(prefix + "attn_qkv.weight", 2 * keys + values, hidden, five_bits=True)
    yield matrix(prefix + "attn_gate.weight", values, hidden)
    yield vector(prefix + "ssm_conv1d.weight", _DELTA_LENGTH, 0.5, 2 * keys + values)
    yield vector(prefix + "ssm_dt.bias", shape.value_heads, 0.0)
    yield vector(prefix + "ssm_a", shape.value_heads, _DECAY)
    yield matrix(prefix + "ssm_beta.weight", shape.value_heads, hidden)
    yield matrix(prefix + "ssm_alpha.weight", shape.value_heads, hidden)
    yield vector(prefix + "ssm_norm.weight", _HEAD, 1.0)
    yield matrix(prefix + "ssm_out.weight", hidden, values)


def _experts(
    shape: Shape, prefix: str, matrix: Make, vector: Make, router: Callable[[str], NewTensor], better: bool
) -> Iterator[NewTensor]:
    """Qwen has an expert that all tokens share, LFM2 a bias of the choice."""
    count, wide, hidden = shape.num_experts, shape.expert_size, shape.hidden_size
    yield router(prefix + "ffn_gate_inp.weight")
    yield matrix(prefix + "ffn_gate_exps.weight", count, wide, hidden, of_experts=True)
    yield matrix(prefix + "ffn_up_exps.weight", count, wide, hidden, of_experts=True)
    yield matrix(prefix + "ffn_down_exps.weight", count, hidden, wide, six_bits=better, of_experts=True)
    if shape.architecture not in QWEN:
        yield vector(prefix + "exp_probs_b.bias", count, 0.0)
        return
    yield vector(prefix + "ffn_gate_inp_shexp.weight", hidden, 0.0)
    yield matrix(prefix + "ffn_gate_shexp.weight", wide, hidden)
    yield matrix(prefix + "ffn_up_shexp.weight", wide, hidden)
    yield matrix(prefix + "ffn_down_shexp.weight", hidden, wide, six_bits=better)


def _attention_layers(shape: Shape) -> list[bool]:
    if shape.architecture in QWEN:
        return [(index + 1) % _PERIOD == 0 for index in range(shape.num_layers)]
    return [index in shape.attention_layers for index in range(shape.num_layers)]
