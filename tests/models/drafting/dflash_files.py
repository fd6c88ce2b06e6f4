"""Files of small DFlash drafters beside a small Qwen3, in both forms, and the logits of a block.

Rotations are transformers', and attention has no mask. Needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from architecture_case import Form
from architectures import build_case
from models.drafting.eagle3_files import USUAL_KEYS, streams_of
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf

Array = NDArray[Any]
LAYERS = 3, 0
"""Of the model, whose streams a drafter reads."""
NUM_LAYERS, MASK_ID, BLOCK_SIZE = 2, 5, 6
_OUTER = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
_INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


class DFlashFile(NamedTuple):
    """A drafter's file or folder and its model's, ids, a block behind them, and the block's logits."""

    path: Path
    model_path: Path
    token_ids: list[int]
    block: list[int]
    logits: Array


def write_dflash(folder: Path, form: Form) -> DFlashFile:
    built = build_case("qwen3", folder, form)
    config = built.model.config
    tensors = _tensors(config)
    path = folder / ("drafter.gguf" if form == "gguf" else "drafter")
    if form == "gguf":
        _write_gguf(path, config, tensors)
    else:
        _write_folder(path, config, tensors)
    block = [built.token_ids[-1], *[MASK_ID] * 3]
    return DFlashFile(path, built.path, built.token_ids, block, _logits(built.model, tensors, built.token_ids, block))


def _tensors(config: Any) -> dict[str, Array]:
    """By their names in a folder, without `.weight`."""
    rng, hidden, size = np.random.default_rng(9), config.hidden_size, config.head_dim

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def norm(width: int) -> Array:
        return (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)

    found = {"fc": matrix(hidden, len(LAYERS) * hidden), "hidden_norm": norm(hidden), "norm": norm(hidden)}
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    for index in range(NUM_LAYERS):
        own = {name: norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        own |= {f"self_attn.{name}_norm": norm(size) for name in "qk"}
        rows = {"q": queries, "k": keys, "v": keys}
        own |= {f"self_attn.{name}_proj": matrix(count, hidden) for name, count in rows.items()}
        own |= {f"mlp.{name}_proj": matrix(config.intermediate_size, hidden) for name in ("gate", "up")}
        own |= {"self_attn.o_proj": matrix(hidden, queries), "mlp.down_proj": matrix(hidden, config.intermediate_size)}
        found |= {f"layers.{index}.{name}": values for name, values in own.items()}
    return found


def _write_folder(path: Path, config: Any, tensors: dict[str, Array]) -> None:
    from safetensors.numpy import save_file

    path.mkdir()
    save_file({f"{name}.weight": values for name, values in tensors.items()}, path / "model.safetensors")
    own = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim, "hidden_act": "silu",
        "num_hidden_layers": NUM_LAYERS, "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"], "max_position_embeddings": 16, "block_size": BLOCK_SIZE,
        "num_target_layers": config.num_hidden_layers, "layer_types": ["full_attention"] * NUM_LAYERS,
        "use_sliding_window": False, "tie_word_embeddings": False, **USUAL_KEYS,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(LAYERS)},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(own))


def _write_gguf(path: Path, config: Any, tensors: dict[str, Array]) -> None:
    def stored(name: str) -> str:
        if name in _OUTER:
            return _OUTER[name]
        _, index, inner = name.split(".", 2)
        return f"blk.{index}.{_INNER[inner]}"

    new = [
        NewTensor(f"{stored(name)}.weight", GGMLType.F32, values.shape, values.view(np.uint8))
        for name, values in tensors.items()
    ]
    own = {
        "block_count": NUM_LAYERS, "context_length": 16, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
        "target_layers": [each + 1 for each in LAYERS], "block_size": BLOCK_SIZE, "attention.causal": False,
    }  # fmt: skip
    keys = {"general.architecture": "dflash", "tokenizer.ggml.mask_token_id": MASK_ID}
    write_gguf(path, {**keys, **{f"dflash.{key}": value for key, value in own.items()}}, new)


def _logits(model: Any, tensors: dict[str, Array], token_ids: list[int], block: list[int]) -> Array:
    """The block comes in place of what would follow the tokens."""
    import torch
    from torch.nn import functional
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    config, count = model.config, len(token_ids)

    def given(name: str) -> Any:
        return torch.from_numpy(tensors[name])

    def normed(x: Any, name: str) -> Any:
        return functional.rms_norm(x, x.shape[-1:], given(name), config.rms_norm_eps)

    def heads(x: Any, name: str, norm: str | None = None) -> Any:
        split = functional.linear(x, given(name)).unflatten(-1, (-1, config.head_dim))
        return (split if norm is None else normed(split, norm)).transpose(1, 2)

    with torch.no_grad():
        streams = streams_of(model, torch.tensor([token_ids]))
        features = torch.cat([streams[layer] for layer in LAYERS], -1)
        states = normed(functional.linear(features, given("fc")), "hidden_norm")
        x = model.get_input_embeddings()(torch.tensor([block]))
        cosine, sine = model.model.rotary_emb(x, torch.arange(count + len(block))[None])
        for index in range(NUM_LAYERS):
            place = f"layers.{index}"
            inputs = normed(x, f"{place}.input_layernorm")
            whole = torch.cat([states, inputs], 1)
            query = heads(inputs, f"{place}.self_attn.q_proj", f"{place}.self_attn.q_norm")
            key = heads(whole, f"{place}.self_attn.k_proj", f"{place}.self_attn.k_norm")
            value = heads(whole, f"{place}.self_attn.v_proj")
            query, _ = apply_rotary_pos_emb(query, query, cosine[:, count:], sine[:, count:])
            key, _ = apply_rotary_pos_emb(key, key, cosine, sine)
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
            mixed = torch.softmax(query @ key.transpose(2, 3) * config.head_dim**-0.5, -1) @ value
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), given(f"{place}.self_attn.o_proj"))
            inner = normed(x, f"{place}.post_attention_layernorm")
            gate, up = (functional.linear(inner, given(f"{place}.mlp.{name}_proj")) for name in ("gate", "up"))
            x = x + functional.linear(functional.silu(gate) * up, given(f"{place}.mlp.down_proj"))
        logits: Array = model.lm_head(normed(x, "norm"))[0].numpy()
    return logits
