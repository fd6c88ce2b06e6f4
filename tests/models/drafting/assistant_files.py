"""Files of small assistants of Gemma 4's beside a small model, in both forms, and what transformers drafts with them.

Needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from architecture_case import Form
from architectures import build_case
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf

Array = NDArray[Any]
MODELS = "gemma4", "gemma4-e"
"""Rows of the table of architectures: 31B's kind, and E2B's, whose last layers have no keys of their own."""
HIDDEN, WINDOW = 32, 40
PLACES = 8, 41, 47, 600
"""Tokens that the model has read where an assistant drafts; more than a window, too."""
DRAFTS = 3
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
_INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q", "self_attn.q_norm": "attn_q_norm", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "layer_scalar": "layer_output_scale",
}  # fmt: skip
_OUTER = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection", "masked_embedding.centroids": "masked_embd_centroids",
    "masked_embedding.token_ordering": "masked_embd_ordering",
}  # fmt: skip


class Chain(NamedTuple):
    """Ids that an assistant reads one after another, and its logits, float32 [drafts, vocab_size]; NaN: not scored."""

    token_ids: list[int]
    logits: Array


class AssistantFile(NamedTuple):
    """An assistant's file or folder and its model's, ids, and the drafts behind so many of them."""

    path: Path
    model_path: Path
    token_ids: list[int]
    chains: dict[int, Chain]


def write_assistant(row: str, folder: Path, form: Form, *, clusters: bool = False) -> AssistantFile:
    """With `clusters` transformers scores the ids of few of them alone, of one id each."""
    folder.mkdir(exist_ok=True)
    built = build_case(row, folder, form)
    assistant = _make(built.model.config.get_text_config(), clusters=clusters)
    path = folder / ("drafter.gguf" if form == "gguf" else "drafter")
    if form == "gguf":
        _write_gguf(path, assistant)
    else:
        assistant.save_pretrained(path)
    chains = {place: _chain(built.model, assistant, built.token_ids, place) for place in PLACES}
    return AssistantFile(path, built.path, built.token_ids, chains)


def config_of(file: AssistantFile, **changed: Any) -> dict[str, Any]:
    """Of a folder, with other keys; those of `text_config` begin with `text_`."""
    config: dict[str, Any] = json.loads((file.path / "config.json").read_text())
    for key, value in changed.items():
        inner = config["text_config"] if key.startswith("text_") else config
        inner[key.removeprefix("text_")] = value
    return config


def _make(of_model: Any, *, clusters: bool) -> Any:
    import torch
    import transformers

    local, full = (of_model.per_layer_config[kind] for kind in ("sliding_attention", "full_attention"))
    text = transformers.Gemma4TextConfig(
        vocab_size=of_model.vocab_size, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=len(_KINDS),
        num_attention_heads=4, num_key_value_heads=local.num_key_value_heads, head_dim=local.head_dim,
        global_head_dim=full.head_dim, num_global_key_value_heads=full.num_key_value_heads,
        attention_k_eq_v=full.num_key_value_heads != local.num_key_value_heads, layer_types=list(_KINDS),
        sliding_window=WINDOW, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=0,
        max_position_embeddings=64, final_logit_softcapping=30.0,
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=of_model.hidden_size, use_ordered_embeddings=clusters,
        num_centroids=of_model.vocab_size, centroid_intermediate_top_k=40,
    )  # fmt: skip
    config._attn_implementation = "eager"
    assistant = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for path, parameter in assistant.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = 0.3 if path.endswith("q_norm.weight") else 1.0
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim >= 2 else centre + 0.2 * noise)
        for path, buffer in assistant.named_buffers():
            if path.endswith("layer_scalar"):
                buffer.copy_(0.75 + 0.2 * torch.randn(buffer.shape, generator=generator))
            if path.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
    return assistant


def _chain(model: Any, assistant: Any, token_ids: list[int], place: int) -> Chain:
    """Of the last of `place` + 1 tokens, of which the model has not read the last.

    A window is as long as behind a step of one token; behind a prompt transformers has a key more in it.
    """
    import torch

    last, logits = token_ids[place % len(token_ids)], []
    with torch.no_grad():
        out = model(
            torch.tensor([token_ids[:place]]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        shared = {
            kind: tuple(each[:, :, -WINDOW:] if kind == "sliding_attention" else each for each in both)
            for kind, both in out.shared_kv_states.items()
        }
        state, read = out.hidden_states[-1][:, -1:], [last]
        for _ in range(DRAFTS):
            embedded = model.get_input_embeddings()(torch.tensor([read[-1:]]))
            drafted = assistant(
                inputs_embeds=torch.cat([embedded, state], -1), position_ids=torch.tensor([[place]]),
                shared_kv_states=shared,
            )  # fmt: skip
            state, found = drafted.last_hidden_state, drafted.logits[0, 0].numpy().copy()
            read.append(int(found.argmax()))
            if assistant.config.use_ordered_embeddings:
                found[found == found.min()] = np.nan
            logits.append(found)
    return Chain(read[:-1], np.array(logits))


def _write_gguf(path: Path, assistant: Any) -> None:
    config, text = assistant.config, assistant.config.text_config
    local, full = (text.per_layer_config[kind] for kind in ("sliding_attention", "full_attention"))
    is_local = [kind == "sliding_attention" for kind in text.layer_types]
    kv_heads = [(local if flag else full).num_key_value_heads for flag in is_local]
    rope = text.rope_parameters
    own = {
        "block_count": len(is_local), "context_length": text.max_position_embeddings, "embedding_length": HIDDEN,
        "embedding_length_out": config.backbone_hidden_size, "nextn_predict_layers": len(is_local),
        "feed_forward_length": text.intermediate_size, "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": kv_heads, "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim, "attention.key_length_swa": local.head_dim,
        "attention.value_length_swa": local.head_dim, "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "attention.shared_kv_layers": len(is_local), "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": is_local, "embedding_length_per_layer_input": 0,
        "rope.freq_base": rope["full_attention"]["rope_theta"], "rope.dimension_count": full.head_dim,
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"], "rope.dimension_count_swa": local.head_dim,
        "vocab_size": text.vocab_size,
    }  # fmt: skip
    divisors = np.full(full.head_dim // 2, 1e30, np.float32)
    divisors[: int(full.head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)] = 1
    tensors = {"rope_freqs.weight": divisors}
    for name, tensor in assistant.state_dict().items():
        base = name.removesuffix(".weight")
        if base != "lm_head":
            _, _, index, inner = base.split(".", 3) if base.startswith("model.layers.") else ("", "", "", "")
            stored = f"blk.{index}.{_INNER[inner]}" if inner else _OUTER[base]
            suffix = "" if base.endswith("token_ordering") else ".weight"
            tensors[f"{stored}{suffix}"] = np.ascontiguousarray(tensor.numpy())
    kinds = {"float32": GGMLType.F32, "int64": GGMLType.I64}
    new = [NewTensor(name, kinds[each.dtype.name], each.shape, each.view(np.uint8)) for name, each in tensors.items()]
    metadata = {f"gemma4-assistant.{key}": value for key, value in own.items()}
    write_gguf(path, {"general.architecture": "gemma4-assistant", **metadata}, new)
