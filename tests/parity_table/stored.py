"""Checkpoints whose matrices safetensors hold as a method stores them, and transformers' model of what they say.

The matrices are random in their codes, as those of quantised GGUF files are (`checkpoints.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quantization.stored_checkpoints import Stored, random_matrix, write_checkpoint

Method = Literal[
    "AWQ", "GPTQ", "GPTQ in act-order", "GPTQ of 8 bits", "W4A16", "W4A16 with zeros", "W8A8", "FP8 by block",
    "FP8 by channel", "FP8 by tensor", "MXFP8", "MXFP4 of compressed-tensors", "NVFP4", "NVFP4 of ModelOpt",
    "mixed by ModelOpt",
]  # fmt: skip

_BY_TENSOR = Stored("modelopt", bits=8, group=0, rows=0, scale="float32")
METHODS: dict[Method, Stored] = {
    "AWQ": Stored("awq"),
    "GPTQ": Stored("gptq", symmetric=True),
    "GPTQ in act-order": Stored("gptq", group=32, ordered=True),
    "GPTQ of 8 bits": Stored("gptq", bits=8, group=32),
    "W4A16": Stored("packed", symmetric=True, scale="bfloat16"),
    "W4A16 with zeros": Stored("packed", group=32),
    "W8A8": Stored("unpacked", bits=8, group=0, symmetric=True),
    "FP8 by block": Stored("fp8", scale="float32"),
    "FP8 by channel": Stored("float", group=0, rows=1),
    "FP8 by tensor": _BY_TENSOR,
    "MXFP8": Stored("mxfp8", group=32, rows=1, scale="uint8"),
    "MXFP4 of compressed-tensors": Stored("mxfp4"),
    "NVFP4": Stored("nvfp4"),
    "NVFP4 of ModelOpt": Stored("modelopt"),
    "mixed by ModelOpt": Stored("modelopt"),
}
"""Those of most matrices; `MIXED` are the others of `mixed by ModelOpt`."""
MIXED = {
    "q_proj": _BY_TENSOR, "o_proj": Stored("modelopt", bits=8, group=32, rows=1, scale="uint8"),
    "down_proj": Stored("modelopt", bits=8),
}  # fmt: skip
MODELS: dict[str, tuple[Method, ...]] = {
    "llama": tuple(METHODS),
    "qwen3moe": ("AWQ", "W4A16", "FP8 by block", "NVFP4 of ModelOpt"),
    "qwen35-vision": ("FP8 by block", "NVFP4"),
}
"""The rows of `CASES` that have them: a dense model, one of experts, and a hybrid whose folder has a tower as it is."""

_STORED = re.compile(r".*\blayers\.\d+\..*(?:_proj|in_proj_qkv|in_proj_z)\.weight")


def write_stored(model: Any, method: Method, path: Path) -> Any:
    """Write a model to `path`, its matrices replaced; returns transformers' model of the weights that this means."""
    plain = path.with_name(f"{path.name}-plain")
    model.save_pretrained(plain)
    store_folder(plain, method, path)
    return type(model).from_pretrained(plain, attn_implementation="eager").float().eval()


def store_folder(plain: Path, method: Method, path: Path) -> None:
    """Write a folder of floats to `path`, its matrices replaced, and to `plain` the weights that this means."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(plain / "model.safetensors")
    tensors: dict[str, Any] = {}
    layers: dict[str, Mapping[str, str]] = {}
    rng = np.random.default_rng(13)
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if not _STORED.fullmatch(name) or "visual" in name:
            tensors[name] = values
            continue
        stored = METHODS[method]
        if method == "mixed by ModelOpt":
            stored = MIXED.get(module.rpartition(".")[2], stored)
            layers[module] = {"quant_algo": stored.algorithm}
        made, exact = random_matrix(stored, *values.shape, rng)
        tensors |= {f"{module}{suffix}": array for suffix, array in made.items()}
        weights[name] = exact.astype(np.float32)
    config = METHODS[method].config
    if layers:
        config |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    path.mkdir()
    write_checkpoint(path, tensors, config, json.loads((plain / "config.json").read_text(encoding="utf-8")))
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
