"""Canonical (Hugging Face) tensor names and their GGUF names. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"

_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    # In a layer:
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_up_proj": "ffn_up_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
    # In a next-token block:
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
GGUF_POST_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
"""GGUF's name of a norm where that follows attention instead of preceding the feed-forward, and in some other files."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_UNNEEDED_GGUF = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_UNNEEDED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?|(.+\.)?rotary_emb\.inv_freq|.+\.masked_bias")


def stored_name(canonical: str, names: Mapping[str, str], *, is_gguf: bool) -> str:
    """A checkpoint's name of a canonical tensor.

    `names` are other than the usual ones: by canonical name without `.weight`, and in a layer without
    `model.layers.0.` and `blk.0.` too.
    """
    layer = _LAYER.fullmatch(canonical)
    base, _, kind = canonical.rpartition(".") if layer is None else (layer[2], "", layer[3])
    name = names.get(base) or (_GGUF[base] if is_gguf else base)
    place = "" if layer is None else f"{'blk' if is_gguf else 'model.layers'}.{layer[1]}."
    return f"{place}{name}.{kind}"


def is_unneeded(name: str) -> bool:
    """True for known checkpoint tensors that are not loaded: tables that are computed, or read into the spec."""
    return name in _UNNEEDED_GGUF or _UNNEEDED.fullmatch(name) is not None
