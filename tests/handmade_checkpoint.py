"""Checkpoints made in memory: a tiny model's metadata and zero-sized views for tensors, to be bent by tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType

GGUF_PATH = Path("tiny.gguf")
FOLDER = Path("tiny")
VOCABULARY, HIDDEN, WIDTH, HEADS, KV_HEADS, LAYERS = 40, 16, 24, 4, 2, 2

GGUF_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": VOCABULARY,
}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_KV_ROWS = HIDDEN // HEADS * KV_HEADS
_GGUF_LAYER: dict[str, tuple[int, ...]] = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (_KV_ROWS, HIDDEN),
    "attn_v": (_KV_ROWS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (WIDTH, HIDDEN),
    "ffn_up": (WIDTH, HIDDEN),
    "ffn_down": (HIDDEN, WIDTH),
}
_CONFIG_LAYER = dict(
    zip(
        (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ),
        _GGUF_LAYER.values(),
        strict=True,
    )
)


def stored(name: str, shape: tuple[int, ...], values: object = None) -> StoredTensor:
    """An F32 tensor; of no bytes unless `values` are given."""
    data = np.asarray([] if values is None else values, np.float32).view(np.uint8)
    return StoredTensor(name, GGMLType.F32, shape, data, GGUF_PATH, 0)


def gguf_checkpoint(
    metadata: dict[str, Any] | None = None, architecture: str = "llama", **shapes: tuple[int, ...] | None
) -> Checkpoint:
    """A tiny Llama as from a GGUF file.

    Args:
        metadata: keys to set, or to remove where the value is None.
        architecture: that the keys are renamed to (the tensors remain a Llama's).
        shapes: tensors to add or change by name, without `.weight` and with `__` for a dot; None removes.
    """
    tensors = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCABULARY, HIDDEN)}
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF_METADATA.items()}
    keys |= {"general.architecture": architecture}
    return Checkpoint(GGUF_PATH, "gguf", _changed(keys, metadata), _tensors(tensors, "blk.{}.", _GGUF_LAYER, shapes))


def config_checkpoint(config: dict[str, Any] | None = None, **shapes: tuple[int, ...] | None) -> Checkpoint:
    """The same as from a safetensors folder; `config` changes keys of `config.json`."""
    tensors = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    return Checkpoint(
        FOLDER,
        "safetensors",
        {"config": _changed(CONFIG, config)},
        _tensors(tensors, "model.layers.{}.", _CONFIG_LAYER, shapes),
    )


def _changed(values: dict[str, Any], changes: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in {**values, **(changes or {})}.items() if value is not None}


def _tensors(
    tensors: dict[str, tuple[int, ...]],
    prefix: str,
    layer: dict[str, tuple[int, ...]],
    changes: dict[str, tuple[int, ...] | None],
) -> dict[str, StoredTensor]:
    shapes: dict[str, tuple[int, ...] | None] = {f"{name}.weight": shape for name, shape in tensors.items()}
    for index in range(LAYERS):
        shapes |= {f"{prefix.format(index)}{name}.weight": shape for name, shape in layer.items()}
    shapes |= {f"{name.replace('__', '.')}.weight": shape for name, shape in changes.items()}
    return {name: stored(name, shape) for name, shape in shapes.items() if shape is not None}
