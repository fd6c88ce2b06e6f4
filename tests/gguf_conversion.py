"""Converts a transformers model to an F32 GGUF file, as llama.cpp's converter lays it out.

Names of tensors and keys come from the PyPI package `gguf`, not from what they test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from models.gguf_experts import MIXTURES, add_experts, with_split_experts
from models.gguf_gemma4 import add_gemma4_keys, scale_name
from models.hybrids.gguf_hybrids import HYBRIDS, NAMES, add_hybrid_keys, converted_parts

Array = NDArray[np.float32]

_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "olmo3": "olmo2"} | {
    "ministral3": "mistral3",
    "glm4v": "glm4",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "smolvlm": "llama",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    **MIXTURES,
    **HYBRIDS,
}
PERMUTED = (
    "llama",
    "arcee",
    "granite",
    "granitemoe",
    "smollm3",
    "mistral3",
)  # the architectures whose rows of Q and K the converter reorders
INTERLEAVED = (
    *("ernie4_5", "ernie4_5-moe", "ernie4_5_moe"),
    *("glm4", "glm4v"),
)  # those whose pairs are neighbours before it too


def convert_to_gguf(
    model: Any, path: Path, blocks: Mapping[str, tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]] | None = None
) -> None:
    """Write a transformers model of one of the tested architectures to `path`, all tensors F32.

    Args:
        blocks: by name in the file, what is written in place of a tensor: its type and its rows [..., bytes].
    """
    name = _ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    config = model.config.get_text_config()
    writer = gguf.GGUFWriter(path, name)
    if name == "gemma4":
        add_gemma4_keys(writer, config)
    else:
        _add_sizes(writer, config, name)
        _add_rope(writer, config, name)
        _add_window(writer, config, name)
    _add_multipliers(writer, config, name)
    for stored, values in converted_tensors(model, model.state_dict()).items():
        if blocks and stored in blocks:
            ggml_type, rows = blocks[stored]
            writer.add_tensor(stored, rows, raw_dtype=ggml_type)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted_tensors(model: Any, tensors: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors of `model.state_dict()`, or others of the same shapes, as a GGUF file has them and names them."""
    name = _ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    config = model.config.get_text_config()
    architecture = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    converted: dict[str, Array] = {}
    for hf_name, tensor in with_split_experts(_text_tensors(tensors), name).items():
        if hf_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        scales = scale_name(hf_name) if name == "gemma4" else None
        parts = [(hf_name, tensor)] if name not in NAMES else converted_parts(hf_name, tensor, config, name)
        for part_name, part in parts:
            stored = scales or names.get_name(part_name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part_name
            converted[stored] = _converted(part_name, part, config, name)
    return converted


def _text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a model, or of its text part, under the names of a text model."""
    others = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
    others += ("model.vision_model.", "model.connector.", "model.embed_vision.")
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(others)}
    return {
        re.sub(r"^model\.(language|text)_model\.", "model.", name)
        + (".weight" if name.endswith("layer_scalar") else ""): tensor
        for name, tensor in own.items()
    }


def _converted(hf_name: str, values: Array, config: Any, name: str) -> Array:
    if name in PERMUTED and ".q_proj." in hf_name:
        return _permuted(values, config.num_attention_heads)
    if name in PERMUTED and ".k_proj." in hf_name:
        return _permuted(values, config.num_key_value_heads)
    if name == "glm4" and "mrope_section" in config.rope_parameters and "self_attn" in hf_name:
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(hf_name.split(".")[-2][0])
        return values if heads is None else _parted(values, heads, config.rope_parameters["partial_rotary_factor"])
    if hf_name.endswith(".conv.conv.weight"):
        return np.ascontiguousarray(values[:, 0])
    if name in ("gemma2", "gemma3") and hf_name.endswith("norm.weight"):
        return values + np.float32(1)
    return np.ascontiguousarray(values)


def _permuted(values: Array, heads: int) -> Array:
    """Rows of each head so that halves become neighbours."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _parted(values: Array, heads: int, share: float) -> Array:
    """Rows of each head so that neighbours become halves, of the share of them that is rotated."""
    rows = values.reshape(heads, len(values) // heads, -1)
    rotated = rows[:, : int(rows.shape[1] * share)]
    parted = np.concatenate([rotated[:, ::2], rotated[:, 1::2], rows[:, rotated.shape[1] :]], axis=1)
    return np.ascontiguousarray(parted.reshape(values.shape))


def _add_sizes(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if name in ("lfm2", "lfm2moe"):
        writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
        writer.add_feed_forward_length(_lfm2_feed_forward_length(config))
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        if name != "qwen35moe":
            writer.add_feed_forward_length(config.intermediate_size)
    if name in NAMES:
        add_hybrid_keys(writer, config, name)
    add_experts(writer, config, name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")  # llama.cpp reads the file too
    if name == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps if name.startswith("lfm2") else config.rms_norm_eps)
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _lfm2_feed_forward_length(config: Any) -> int:
    length = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        length = int(config.block_ffn_dim_multiplier * int(2 * length / 3))
        length = config.block_multiple_of * math.ceil(length / config.block_multiple_of)
    return int(length)


def _add_rope(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    everywhere = config.rope_parameters
    rope = everywhere.get("full_attention", everywhere)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_size * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "beta_slow" in rope:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if name == "mistral3":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, size))
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        writer.add_tensor("rope_factors_long.weight", np.asarray(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.asarray(rope["short_factor"], np.float32))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if name in ("qwen3vl", "qwen3vlmoe"):
        writer.add_num_deepstack_layers(2)
    if name == "olmo2" and "sliding_attention" in everywhere:
        writer.add_rope_freq_base_swa(everywhere["sliding_attention"]["rope_theta"])
    if name == "gemma3" and everywhere["sliding_attention"]["rope_theta"] != 10000.0:
        writer.add_rope_freq_base_swa(everywhere["sliding_attention"]["rope_theta"])


def _llama3_divisors(rope: dict[str, Any], size: int) -> Array:
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for index in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / size)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)


def _add_window(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    window = getattr(config, "sliding_window", None)
    if window is None:
        if name == "phi3":
            writer.add_sliding_window(0)
        return
    if name != "mistral3":
        writer.add_sliding_window(window)
    if name in ("qwen2", "qwen3", "olmo2", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _add_multipliers(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    if name in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
