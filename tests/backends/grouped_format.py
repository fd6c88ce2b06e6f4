"""A method of quantisation that `realizar` does not ship, added as one would be; and a tiny model that is stored so.

Its matrices have codes of four bits with a scale and a minimum per group, in one of two orders: `words`, with a matrix
in three tensors and none of its own name, or `bytes`, with codes under the matrix's name in a type without ggml id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from backends.grouped_source import GroupedSource, exact_weights, grouped_layout, grouped_source
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.matrix_format import MatrixFormat
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource
from realizar.quantization.tensors import MATRIX_FORMATS

GROUP, HIDDEN, WIDTH, HEAD, HEADS, VOCABULARY, LAYERS = 64, 128, 256, 32, 2, 48, 2
CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "max_position_embeddings": 64, "hidden_size": HIDDEN,
    "intermediate_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD,
    "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_SUFFIXES = {"words": (".qweight", ".scales", ".minima"), "bytes": (".weight", ".weight_scale", ".weight_minimum")}
_DTYPES = {"words": "I32", "bytes": "U8"}


class NibbleSource(MatrixSource):
    """A matrix in the order `bytes`: uint8 [out_features, in_features / 2], the earlier column in the low bits."""

    def __init__(self, codes: NDArray[np.uint8], scales: NDArray[Any], minima: NDArray[Any], name: str) -> None:
        in_features = 2 * codes.shape[1]
        layout = grouped_layout(in_features // scales.shape[1])
        super().__init__(layout, len(codes), in_features, Path("grouped.safetensors"), name)
        self._codes, self._scales, self._minima = codes, scales, minima

    def planes(self, start: int, stop: int) -> Planes:
        codes = np.stack([self._codes[start:stop] & 15, self._codes[start:stop] >> 4], axis=-1)
        scales, minima = (each[start:stop].astype(np.float32) for each in (self._scales, self._minima))
        return Planes(self.layout, codes.reshape(len(codes), -1), scales, minima)


class GroupedFormat(MatrixFormat):
    """The method `grouped`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        if config["bits"] != 4:
            raise UnsupportedModelError(f"{path}: key 'quantization_config.bits': unsupported value {config['bits']}")
        self._order: str = config["order"]

    def tensors(self, checkpoint: Checkpoint, name: str) -> Sequence[str]:
        names = [name.removesuffix(".weight") + suffix for suffix in _SUFFIXES[self._order]]
        stored = checkpoint.tensors.get(names[0])
        return names if stored is not None and stored.dtype in _DTYPES.values() else ()

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        codes, *others = (checkpoint.tensors[each] for each in self.tensors(checkpoint, name))
        if codes.dtype != _DTYPES[self._order]:
            raise CheckpointError(codes.path, f"tensor '{codes.name}'", f"codes of type {codes.dtype}")
        scales, minima = (each.data.view("<f2").reshape(each.shape) for each in others)
        if self._order == "words":
            return GroupedSource(codes.data.view("<u4").reshape(codes.shape), scales, minima, name)
        return NibbleSource(codes.data.reshape(codes.shape), scales, minima, name)


def write_grouped_model(
    folder: Path, order: str, monkeypatch: pytest.MonkeyPatch, **changes: NDArray[Any] | None
) -> dict[str, NDArray[np.float64]]:
    """Write a Llama whose layers' matrices are stored so; until the test ends, the method is known.

    In the order `words`, queries, keys and values are one matrix, and so are gate and up.

    Args:
        changes: tensors to add or replace, with `__` for a dot; None removes one.

    Returns:
        The weights of each matrix, float64, by the name that the checkpoint would have it under.
    """
    monkeypatch.setitem(MATRIX_FORMATS, "grouped", GroupedFormat)
    rng, weights = np.random.default_rng(5), {}
    tensors: dict[str, NDArray[Any]] = {
        "model.embed_tokens.weight": rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float16),
        "lm_head.weight": (rng.standard_normal((VOCABULARY, HIDDEN)) / 11).astype(np.float16),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{base}.{norm}.weight"] = rng.uniform(0.8, 1.2, HIDDEN).astype(np.float32)
        for place, (name, shape) in enumerate(_shapes(order).items()):
            source = grouped_source(*shape, GROUP, 100 * layer + place)
            weights[f"{base}.{name}.weight"] = exact_weights(source)
            for suffix, array in zip(_SUFFIXES[order], _arrays(source, order), strict=True):
                tensors[f"{base}.{name}{suffix}"] = array
    changed = {name.replace("__", "."): array for name, array in changes.items()}
    save_file(
        {name: array for name, array in {**tensors, **changed}.items() if array is not None},
        folder / "model.safetensors",
    )
    write_config(folder, order=order)
    return weights


def write_config(folder: Path, **method: Any) -> None:
    """Write `config.json`; `method` changes keys of its `quantization_config`."""
    config = {"quant_method": "grouped", "bits": 4, "group_size": GROUP, **method}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}), encoding="utf-8")


def _shapes(order: str) -> dict[str, tuple[int, int]]:
    """Matrices of a layer."""
    queries = HEADS * HEAD
    ends = {"self_attn.o_proj": (HIDDEN, queries), "mlp.down_proj": (HIDDEN, WIDTH)}
    if order == "words":
        return {"self_attn.qkv_proj": (queries + 2 * HEAD, HIDDEN), "mlp.gate_up_proj": (2 * WIDTH, HIDDEN), **ends}
    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": HEAD, "self_attn.v_proj": HEAD}
    inputs = {**attention, "mlp.gate_proj": WIDTH, "mlp.up_proj": WIDTH}
    return {**{name: (out_features, HIDDEN) for name, out_features in inputs.items()}, **ends}


def _arrays(source: GroupedSource, order: str) -> tuple[NDArray[Any], ...]:
    """The tensors of a matrix, as a file has them."""
    if order == "words":
        return source._words.view(np.int32), source._scales, source._minima
    codes = source.planes(0, source.out_features).codes
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return packed, np.ascontiguousarray(source._scales.T), np.ascontiguousarray(source._minima.T)
