"""The checkpoints that the table compares: an architecture's model in every form, with transformers' model beside it.

A quantised file has random blocks for its matrices, and transformers' model gets what they say in float32, so that no
loss of a quantiser is part of a figure. `stored.py` has those that safetensors hold.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from architectures import CASES, BuiltCase, make_model
from gguf_conversion import convert_to_gguf, converted_tensors
from parity_table.stored import METHODS, MODELS, Method, write_stored
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import dequantize
from realizar.quantization.random_blocks import random_blocks

Weights = Literal["F32 safetensors", "F32 GGUF", "Q8_0 GGUF", "Q4_K_M GGUF", "MXFP4 GGUF"] | Method

_NEVER_QUANTISED = ("_norm.weight", "ffn_gate_inp.weight", "shortconv.conv.weight", "rope_freqs.weight")
_FALLBACK = {GGMLType.Q4_K: GGMLType.Q5_0, GGMLType.Q6_K: GGMLType.Q8_0}


def forms_of(name: str) -> list[Weights]:
    """The forms of a row of `CASES`."""
    case = CASES[name]
    forms: list[Weights] = []
    if "safetensors" in case.forms:
        forms.append("F32 safetensors")
    if "gguf" in case.forms:
        four_bits: Weights = "MXFP4 GGUF" if case.family == "GptOss" else "Q4_K_M GGUF"
        forms += ["F32 GGUF", "Q8_0 GGUF", four_bits]
    return [*forms, *MODELS.get(name, ())]


def build(name: str, weights: Weights, folder: Path, num_tokens: int) -> BuiltCase:
    """Write the checkpoint below `folder`; the tokens are random."""
    model = make_model(name, wide=True)
    path = folder / f"{name}-{weights.replace(' ', '-')}"
    if weights == "F32 safetensors":
        model.save_pretrained(path)
    elif weights in METHODS:
        model = write_stored(model, weights, path)
    else:
        path = path.with_suffix(".gguf")
        model, blocks = _quantised(model, weights)
        convert_to_gguf(model, path, blocks)
    token_ids = np.random.default_rng(7).integers(0, model.config.get_text_config().vocab_size, num_tokens).tolist()
    return BuiltCase(path, model, token_ids, CASES[name].context_length)


def _quantised(
    model: Any, weights: Weights
) -> tuple[Any, dict[str, tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]]]:
    """A copy of the model with what the blocks say, and the blocks by name in the file."""
    import torch

    model = copy.deepcopy(model)
    blocks: dict[str, tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]] = {}
    if weights == "F32 GGUF":
        return model, blocks
    # Every element's number, sent through the conversion, tells where in the model the file's elements come from.
    tensors, numbers, first = model.state_dict(), {}, 0
    for name, tensor in tensors.items():
        numbers[name] = torch.arange(first, first + tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
        first += tensor.numel()
    values = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    rng = np.random.default_rng(13)
    with np.errstate(over="ignore"):  # of an exponential's, of a number; no such tensor is quantised
        converted = converted_tensors(model, numbers)
    for stored, places in converted.items():
        ggml_type = _type_of(stored, places.shape, weights, model.config)
        if ggml_type is None:
            continue
        cols = places.shape[-1]
        out_features = places.size // cols
        deviation = 1.0 if stored == "token_embd.weight" else 1 / math.sqrt(cols)
        data = random_blocks(ggml_type, out_features, cols, rng, deviation)
        blocks[stored] = (gguf.GGMLQuantizationType(int(ggml_type)), data.reshape(*places.shape[:-1], -1))
        floats = dequantize(ggml_type, data, out_features, cols)
        values[torch.from_numpy(places.reshape(-1).astype(np.int64))] = torch.from_numpy(floats.reshape(-1))
    _write_back(model, tensors, values)
    return model, blocks


def _write_back(model: Any, tensors: dict[str, Any], values: Any) -> None:
    first = 0
    for name, tensor in tensors.items():
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings  # one memory with the embedding
        if not tied:
            tensor.copy_(values[first : first + tensor.numel()].reshape(tensor.shape))
        first += tensor.numel()


def _type_of(stored: str, shape: tuple[int, ...], weights: Weights, config: Any) -> GGMLType | None:
    """A tensor's type as llama.cpp's quantiser chooses it; None leaves it in float32."""
    if len(shape) < 2 or stored.endswith((*_NEVER_QUANTISED, ".bias")):
        return None
    wanted = _four_bits(stored, config) if weights == "Q4_K_M GGUF" else GGMLType.Q8_0
    if weights == "MXFP4 GGUF" and "_exps" in stored:
        wanted = GGMLType.MXFP4
    if shape[-1] % wanted.block_size:
        wanted = _FALLBACK.get(wanted, GGMLType.F16)
    return wanted if shape[-1] % wanted.block_size == 0 else GGMLType.F16


def _four_bits(stored: str, config: Any) -> GGMLType:
    layers = config.get_text_config().num_hidden_layers
    if stored == "output.weight" or (stored == "token_embd.weight" and config.tie_word_embeddings):
        return GGMLType.Q6_K
    if any(part in stored for part in ("attn_v.", "ffn_down.", "ffn_down_exps.")):
        layer = int(stored.split(".")[1])
        if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2:
            return GGMLType.Q6_K
    return GGMLType.Q4_K
