"""Files of small EAGLE-3 heads beside a small Llama, in the forms in which they are published, and their logits.

The layer's attention, feed-forward and norms are transformers', put together as the paper's code does. Needs torch and
transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from architectures import CASES, build_case, make_model
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf

Array = NDArray[Any]
HeadForm = Literal["sglang", "speculators", "gguf"]
FORMS: tuple[HeadForm, ...] = ("sglang", "speculators", "gguf")
LAYERS = 2, 0, 3
"""Of the model, whose streams a head reads."""
USUAL_KEYS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "code.Model"}, "bos_token_id": 1,
    "dtype": "bfloat16", "initializer_range": 0.02, "max_window_layers": 1, "rope_scaling": None,
    "sliding_window": None, "transformers_version": "4.57.1", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
"""That published configurations have, and that say nothing."""
_GGUF = {
    "input_layernorm": "blk.0.attn_norm", "hidden_norm": "blk.0.attn_norm_2",
    "post_attention_layernorm": "blk.0.ffn_norm",
    "self_attn.q_proj": "blk.0.attn_q", "self_attn.k_proj": "blk.0.attn_k", "self_attn.v_proj": "blk.0.attn_v",
    "self_attn.o_proj": "blk.0.attn_output", "mlp.gate_proj": "blk.0.ffn_gate", "mlp.up_proj": "blk.0.ffn_up",
    "mlp.down_proj": "blk.0.ffn_down", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "fc": "fc", "input_norm": "enc.output_norm",
}  # fmt: skip


@dataclass(frozen=True)
class HeadCase:
    """What a head has.

    Attributes:
        normed: the norm before `fc`, and a stream that begins with the normed state.
        whole: an embedding and all ids; else those of a part, and its model's embedding.
        names_layers: its configuration says which layers it reads.
    """

    normed: bool = False
    whole: bool = False
    names_layers: bool = True


class HeadFile(NamedTuple):
    """A head's file or folder and its model's, ids, and the logits after each, float32 [tokens, drafted ids]."""

    path: Path
    model_path: Path
    token_ids: list[int]
    ids: list[int]
    logits: Array


def write_head(case: HeadCase, folder: Path, form: HeadForm) -> HeadFile:
    built = build_case("llama", folder, "gguf" if form == "gguf" else "safetensors")
    config, rng = built.model.config, np.random.default_rng(6)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    drafted = sorted(rng.permutation(vocabulary)[:70].tolist())
    layers = LAYERS if case.names_layers else (1, config.num_hidden_layers // 2 - 1, config.num_hidden_layers - 4)

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, hidden // config.num_attention_heads
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"]
    tensors = {name: (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32) for name in norms}
    rows = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    tensors |= {f"self_attn.{name}_proj": matrix(count, 2 * hidden) for name, count in rows.items()}
    tensors |= {"self_attn.o_proj": matrix(hidden, heads * size), "fc": matrix(hidden, 3 * hidden)}
    tensors |= {f"mlp.{name}_proj": matrix(config.intermediate_size, hidden) for name in ("gate", "up")}
    tensors["mlp.down_proj"] = matrix(hidden, config.intermediate_size)
    tensors["lm_head"] = matrix(vocabulary if case.whole else len(drafted), hidden)
    if case.whole:
        tensors["embed_tokens"] = matrix(vocabulary, hidden)
    if case.normed:
        tensors["input_norm"] = (1 + 0.2 * rng.standard_normal(3 * hidden)).astype(np.float32)
    path = folder / ("head.gguf" if form == "gguf" else "head")
    ids = list(range(vocabulary)) if case.whole else drafted
    if form == "gguf":
        _write_gguf(case, path, config, tensors, None if case.whole else ids, layers)
    else:
        _write_folder(case, path, config, tensors, None if case.whole else ids, form)
    logits = _logits(case, built.model, tensors, built.token_ids, layers)
    return HeadFile(path, built.path, built.token_ids, ids, logits)


def _write_folder(
    case: HeadCase, path: Path, config: Any, tensors: dict[str, Array], ids: list[int] | None, form: HeadForm
) -> None:
    from safetensors.numpy import save_file

    path.mkdir()
    place = {"sglang": "midlayer.", "speculators": "layers.0."}[form]
    outside = "norm", "lm_head", "embed_tokens", "fc", "input_norm"
    stored = {f"{'' if name in outside else place}{name}.weight": values for name, values in tensors.items()}
    if ids is not None:
        stored["d2t"] = np.array(ids, np.int64) - np.arange(len(ids))
        stored["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    save_file(stored, path / "model.safetensors")
    layer = {
        "model_type": "llama", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": 1, "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"], "hidden_act": "silu", "max_position_embeddings": 16,
        "tie_word_embeddings": False, "pretraining_tp": 1, "mlp_bias": False, **USUAL_KEYS,
    }  # fmt: skip
    own: dict[str, Any] = {"draft_vocab_size": config.vocab_size if ids is None else len(ids)}
    own |= {"norm_before_residual": True, "norm_before_fc": True} if case.normed else {}
    if form == "sglang":
        own |= layer | {"architectures": ["LlamaForCausalLMEagle3"]}
        if case.names_layers:
            named = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(LAYERS)}
            own |= {"eagle_config": named}
    else:
        own |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "target_hidden_size": None}
        own |= {"speculators_version": "0.5.0", "has_no_defaults_at_init": False, "embed_requires_grad": False}
        own |= {"transformer_layer_config": layer, "speculators_config": {"algorithm": "eagle3"}}
        if case.names_layers:
            own["eagle_aux_hidden_state_layer_ids"] = [each + 1 for each in LAYERS]
    (path / "config.json").write_text(json.dumps(own))


def _write_gguf(
    case: HeadCase, path: Path, config: Any, tensors: dict[str, Array], ids: list[int] | None, layers: tuple[int, ...]
) -> None:
    from gguf_conversion import _permuted

    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    laid = {name: _permuted(values, heads[name]) if name in heads else values for name, values in tensors.items()}
    new = [
        NewTensor(f"{_GGUF[name]}.weight", GGMLType.F32, values.shape, np.ascontiguousarray(values).view(np.uint8))
        for name, values in laid.items()
    ]
    if ids is not None:
        new.append(NewTensor("d2t", GGMLType.I64, (len(ids),), np.array(ids, np.int64).view(np.uint8)))
    metadata = {
        "block_count": 1, "context_length": 16, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "target_layers": [each + 1 for each in layers], "target_hidden_size": config.hidden_size,
        "norm_before_residual": case.normed, "norm_before_fc": case.normed,
    }  # fmt: skip
    write_gguf(
        path, {"general.architecture": "eagle3", **{f"eagle3.{key}": value for key, value in metadata.items()}}, new
    )


def _logits(
    case: HeadCase, model: Any, tensors: dict[str, Array], token_ids: list[int], layers: tuple[int, ...]
) -> Array:
    """What the head computes after each token, from its model's streams by transformers."""
    import torch
    from torch.nn import functional

    def given(name: str) -> Any:
        return torch.from_numpy(tensors[name])

    def normed(x: Any, name: str) -> Any:
        return functional.rms_norm(x, x.shape[-1:], given(name), model.config.rms_norm_eps)

    with torch.no_grad():
        tokens = torch.tensor([token_ids])
        streams = streams_of(model, tokens)
        features = torch.cat([streams[layer] for layer in layers], -1)
        state = functional.linear(normed(features, "input_norm") if case.normed else features, given("fc"))
        state = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], 1)
        table = given("embed_tokens") if case.whole else model.get_input_embeddings().weight
        pair = torch.cat([normed(table[tokens], "input_layernorm"), normed(state, "hidden_norm")], -1)
        stream = normed(state, "hidden_norm") if case.normed else state
        layer = _layer(tensors)
        cosines = model.model.rotary_emb(stream, torch.arange(len(token_ids))[None])
        mask = torch.full((1, 1, len(token_ids), len(token_ids)), float("-inf")).triu(1)
        stream = stream + layer.self_attn(pair, position_embeddings=cosines, attention_mask=mask)[0]
        stream = stream + layer.mlp(normed(stream, "post_attention_layernorm"))
        logits: Array = functional.linear(normed(stream, "norm"), given("lm_head"))[0].numpy()
    return logits


def streams_of(model: Any, tokens: Any) -> list[Any]:
    """What each layer of transformers' model leaves; the last of its `hidden_states` is normed."""
    found: list[Any] = []

    def keep(_layer: Any, _inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _layer(tensors: dict[str, Array]) -> Any:
    """Transformers' layer with a head's matrices; Q, K and V read twice as much."""
    import torch

    row = "llama-eagle3"
    CASES[row] = replace(CASES["llama"], options={"num_hidden_layers": 1})
    try:
        layer = make_model(row).model.layers[0]
    finally:
        del CASES[row]
    for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
        for name in names:
            key = f"{'self_attn' if part is layer.self_attn else 'mlp'}.{name}_proj"
            matrix = torch.nn.Linear(tensors[key].shape[1], tensors[key].shape[0], bias=False)
            matrix.weight.data = torch.from_numpy(tensors[key])
            setattr(part, f"{name}_proj", matrix)
    return layer
