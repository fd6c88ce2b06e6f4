"""Files of small models with a next-token block, in the forms in which they are published, and what the block computes.

A block is one layer of its family between a matrix that reads two vectors, and a head: transformers' model of one layer
computes it from what that matrix gives. Needs torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from architecture_case import Form
from architectures import CASES, build_case, make_model
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint

Array = NDArray[np.float32]
FAMILIES = {"qwen35": True, "qwen35moe": True, "qwen3next": True, "glm4moe": False}
"""Rows of the table of architectures, and whether the norms of their folders are stored around zero."""
_ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
_QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
_GGUF = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "shared_head_norm"}


class NextTokenFile(NamedTuple):
    """A file or folder, and the block's logits after each of some tokens, float32 [tokens, vocab_size]."""

    path: Path
    token_ids: list[int]
    logits: Array


def write_file(name: str, folder: Path, form: Form, *, alone: bool = False) -> NextTokenFile:
    """The model of a row with a block; `alone` is the block's own GGUF file, with embedding and head."""
    folder.mkdir(exist_ok=True)
    built = build_case(name, folder, form)
    with _as_block(name) as row:
        block = make_model(row)
    own = _own_tensors(name, built.model.config.get_text_config().hidden_size)
    expected = _logits(built.model, block, own, built.token_ids, zero_centred=FAMILIES[name])
    if form == "gguf":
        _extend_gguf(name, built.path, block, own, alone=alone)
    else:
        _extend_folder(name, built.path, block, own)
    return NextTokenFile(built.path, built.token_ids, expected)


@contextmanager
def _as_block(name: str) -> Iterator[str]:
    """A row of the table whose one layer is the block's."""
    case, row = CASES[name], f"{name}-block"
    options = {**case.options, **_ONE_LAYER}
    options |= {"first_k_dense_replace": 0} if name == "glm4moe" else {"layer_types": ["full_attention"]}
    CASES[row] = replace(case, options=options)
    try:
        yield row
    finally:
        del CASES[row]


def _own_tensors(name: str, hidden: int) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    centre = 0.0 if FAMILIES[name] else 1.0
    norms = ("enorm", "hnorm", "shared_head.norm")
    own = {each: (centre + 0.2 * rng.standard_normal(hidden)).astype(np.float32) for each in norms}
    projection = rng.standard_normal((hidden, 2 * hidden)).astype(np.float32) / np.float32((2 * hidden) ** 0.5)
    return {**own, "eh_proj": projection}


def _logits(model: Any, block: Any, own: dict[str, Array], ids: list[int], *, zero_centred: bool) -> Array:
    import torch

    def normed(values: Array, weight: Array) -> Array:
        root = np.sqrt((values * values).mean(-1, keepdims=True) + block.config.get_text_config().rms_norm_eps)
        return values / root * (weight + 1 if zero_centred else weight)

    with torch.no_grad():
        tokens = torch.tensor([ids])
        states = model.base_model(tokens, use_cache=False).last_hidden_state[0].numpy()
        before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])
        embedded = model.get_input_embeddings()(tokens)[0].numpy()
        both = np.concatenate([normed(embedded, own["enorm"]), normed(before, own["hnorm"])], axis=1)
        block.base_model.norm.weight.copy_(torch.from_numpy(own["shared_head.norm"]))
        block.lm_head.weight.copy_(model.lm_head.weight)
        given = torch.from_numpy((both @ own["eh_proj"].T).astype(np.float32))[None]
        logits: Array = block(inputs_embeds=given, use_cache=False).logits[0].numpy()
    return logits


def _extend_folder(name: str, path: Path, block: Any, own: dict[str, Array]) -> None:
    from safetensors.numpy import load_file, save_file

    block.save_pretrained(path / "block")
    layer = load_file(path / "block" / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    place = f"model.layers.{text['num_hidden_layers']}."
    apart = name != "glm4moe"
    added = {f"mtp.{_QWEN[each]}.weight" if apart else f"{place}{each}.weight": values for each, values in own.items()}
    first = "model.layers.0."
    added |= {
        f"{'mtp.layers.0.' if apart else place}{each.removeprefix(first)}": values
        for each, values in layer.items()
        if each.startswith(first)
    }
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, **added}, path / "model.safetensors", metadata={"format": "pt"})
    if name != "qwen3next":  # whose configurations say nothing
        text["mtp_num_hidden_layers" if apart else "num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))


def _extend_gguf(name: str, path: Path, block: Any, own: dict[str, Array], *, alone: bool) -> None:
    from gguf_conversion import converted_tensors

    checkpoint = open_checkpoint(path)
    index = checkpoint.metadata[f"{name}.block_count"]
    offset = 1 if FAMILIES[name] else 0
    added = {
        f"blk.{index}.nextn.{_GGUF[each]}.weight": values + np.float32(offset) if values.ndim == 1 else values
        for each, values in own.items()
    }
    layer = converted_tensors(block, block.state_dict())
    added |= {each.replace("blk.0.", f"blk.{index}."): values for each, values in layer.items() if "blk.0." in each}
    metadata = {**checkpoint.metadata, f"{name}.block_count": index + 1, f"{name}.nextn_predict_layers": 1}
    tensors = [
        NewTensor(each, tensor.ggml_type, tensor.shape, np.array(tensor.data))
        for each, tensor in checkpoint.tensors.items()
        if not (alone and each.startswith("blk."))
    ]
    tensors += [
        NewTensor(each, GGMLType.F32, values.shape, np.ascontiguousarray(values, np.float32).view(np.uint8))
        for each, values in added.items()
    ]
    write_gguf(path.with_suffix(".new"), metadata, tensors)
    path.with_suffix(".new").replace(path)
