"""`generate_gguf`: random-weight models in the shapes of real ones, for benchmarks and tests. numpy.

Speed does not depend on the weights' values, so such a file stands in for a model that is too large to fetch. It has
no vocabulary (`tokenizer.ggml.model` is `no_vocab`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.hub.folders import user_cache
from realizar.models.generated.gemma4 import EMBEDDING_STD, gemma4_keys, gemma4_layer, gemma4_rope_divisors
from realizar.models.generated.hybrids import CONVOLUTIONS, QWEN, hybrid_keys, hybrid_layer
from realizar.models.generated.shapes import SHAPES, FileType, Shape
from realizar.quantization import random_blocks

_MIXTURE_EMBEDDING_STD = 10.0
"""Of a mixture's embedding: tokens stay unlike each other, whatever attention adds to all of them alike, and so choose
nearly as many experts as by chance."""
_FILE_TYPE_IDS: dict[FileType, int] = {"f16": 1, "q8_0": 7, "q4_k_m": 15, "bf16": 32, "mxfp4": 38}
_OF_SMALL_BLOCKS = {GGMLType.Q4_K: GGMLType.Q5_0, GGMLType.Q5_K: GGMLType.Q5_1, GGMLType.Q6_K: GGMLType.Q8_0}
_WHOLE_FILE: dict[FileType, GGMLType] = {"q8_0": GGMLType.Q8_0, "f16": GGMLType.F16, "bf16": GGMLType.BF16}

_HYBRIDS = (*QWEN, *CONVOLUTIONS)
_KEYS: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    },
    "gemma3": {"attention.sliding_window": 40},
}

_MOST = 0.45
"""A router without a bias has as many logits below zero as above, so that fewer than half of all tokens can choose an
expert by its weights alone."""


def generate_gguf(
    shape_name: str, path: Path, file_type: FileType | GGMLType, seed: int = 0, skew: float = 0.0
) -> None:
    """Write a random model to `path`. Tensors are made one by one, so that memory holds only the largest.

    Args:
        shape_name: a key of `SHAPES`.
        file_type: `q4_k_m` has llama.cpp's mix of Q4_K, Q5_K and Q6_K, with Q5_0, Q5_1 and Q8_0 where rows are no whole
            blocks, and `mxfp4` has experts of MXFP4 and Q8_0 beside them, as gpt-oss is published; otherwise all
            matrices are of one type. Norms, biases and routers are float32.
        seed: equal seeds give equal files.
        skew: exponent of the Zipf law by which tokens prefer some experts; 0 prefers none. See `shares`.

    Raises:
        ValueError: no such shape, or its out_features are not whole blocks of the type.
    """
    shape = SHAPES.get(shape_name)
    if shape is None:
        raise ValueError(f"{shape_name!r} is not a shape; the shapes are {', '.join(SHAPES)}")
    write_gguf(path, _metadata(shape, shape_name, file_type), list(_tensors(shape, file_type, seed, skew)))


def generated_header(shape_name: str) -> Checkpoint:
    """The file that `generated_model` writes, without its weights' bytes; tables that the spec reads are there."""
    shape, file_type = SHAPES[shape_name], file_type_of(shape_name)
    nothing = np.zeros(0, np.uint8)
    data = ((each, nothing if callable(each.data) else each.data) for each in _tensors(shape, file_type, 0))
    return _checkpoint(shape_name, file_type, data)


def generated_checkpoint(shape_name: str, file_type: FileType | GGMLType, embedding_std: float) -> Checkpoint:
    """The file that `generate_gguf` writes, in memory; the embedding's weights have that standard deviation."""
    tensors = _tensors(SHAPES[shape_name], file_type, 0, embedding_std=embedding_std)
    return _checkpoint(
        shape_name, file_type, ((each, each.data() if callable(each.data) else each.data) for each in tensors)
    )


def _checkpoint(
    shape_name: str, file_type: FileType | GGMLType, tensors: Iterable[tuple[NewTensor, NDArray[np.generic]]]
) -> Checkpoint:
    path = Path(f"{shape_name}-{file_type}.gguf")
    stored = {
        each.name: StoredTensor(each.name, each.ggml_type, each.shape, data.reshape(-1).view(np.uint8), path, 0)
        for each, data in tensors
    }
    return Checkpoint(path, "gguf", _metadata(SHAPES[shape_name], shape_name, file_type), stored)


def file_type_of(shape_name: str) -> FileType:
    """The type of the files that people run of a shape's model."""
    return "mxfp4" if SHAPES[shape_name].architecture == "gpt-oss" else "q4_k_m"


def generated_model(shape_name: str, log: Callable[[str], None], skew: float = 0.0) -> Path:
    """A file of a shape, kept in the user's cache between runs; `log` is called before one is written."""
    file_type, name = file_type_of(shape_name), f"{shape_name}-skew-{skew:g}" if skew else shape_name
    path = user_cache() / "bench" / f"{name}-{file_type}.gguf"
    if not path.is_file():
        log(f"writing {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_suffix(".partial")
        generate_gguf(shape_name, partial_path, file_type, skew=skew)
        partial_path.replace(path)
    return path


def _metadata(shape: Shape, name: str, file_type: FileType | GGMLType) -> dict[str, Any]:
    arch = shape.architecture
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"random {name}",
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "no_vocab",
        f"{arch}.block_count": shape.num_layers,
        f"{arch}.context_length": shape.context_length,
        f"{arch}.embedding_length": shape.hidden_size,
        f"{arch}.feed_forward_length": shape.feed_forward_size,
        f"{arch}.attention.head_count": shape.num_heads,
        f"{arch}.attention.head_count_kv": shape.num_kv_heads,
        f"{arch}.attention.key_length": shape.head_size,
        f"{arch}.attention.value_length": shape.head_size,
        f"{arch}.attention.layer_norm_rms_epsilon": shape.norm_eps,
        f"{arch}.rope.dimension_count": shape.head_size,
        f"{arch}.rope.freq_base": shape.rope_theta,
        f"{arch}.vocab_size": shape.vocab_size,
    }
    if shape.num_experts:
        metadata |= {f"{arch}.expert_count": shape.num_experts, f"{arch}.expert_used_count": shape.experts_per_token}
    if arch in ("qwen3moe", "gpt-oss", "qwen35moe", "lfm2moe"):
        metadata[f"{arch}.expert_feed_forward_length"] = shape.expert_size
    metadata |= {f"{arch}.{key}": value for key, value in _own_keys(shape).items()}
    if not isinstance(file_type, GGMLType):
        metadata["general.file_type"] = _FILE_TYPE_IDS[file_type]
    return metadata


def _own_keys(shape: Shape) -> Mapping[str, Any]:
    if shape.architecture in _HYBRIDS:
        return hybrid_keys(shape)
    if shape.architecture == "gemma4":
        return gemma4_keys(shape)
    return _KEYS.get(shape.architecture, {})


def _tensors(
    shape: Shape, file_type: FileType | GGMLType, seed: int, skew: float = 0.0, *, embedding_std: float | None = None
) -> Iterator[NewTensor]:
    def matrix(
        name: str, *sizes: int, five_bits: bool = False, six_bits: bool = False, of_experts: bool = False,
        std: float | None = None,
    ) -> NewTensor:  # fmt: skip
        *outer, cols = sizes
        ggml_type = _matrix_type(file_type, five_bits, six_bits, of_experts)
        if file_type == "q4_k_m" and cols % ggml_type.block_size:
            ggml_type = _OF_SMALL_BLOCKS[ggml_type]
        if cols % ggml_type.block_size:
            raise ValueError(f"out_features of {cols} weights are not whole {ggml_type.name} blocks")
        make = partial(_random_matrix, ggml_type, math.prod(outer), cols, _state(seed, name), std or cols**-0.5)
        return NewTensor(name, ggml_type, sizes, make)

    def vector(name: str, size: int, mean: float, *outer: int) -> NewTensor:
        shape, count = (*outer, size), math.prod(outer) * size
        return NewTensor(name, GGMLType.F32, shape, partial(_random_vector, count, mean, _state(seed, name)))

    def router(name: str) -> NewTensor:
        make = partial(
            router_weights, shape.num_experts, shape.experts_per_token, hidden, skew, _state(seed, name)
        )  # fmt: skip
        return NewTensor(name, GGMLType.F32, (shape.num_experts, hidden), make)

    hidden = shape.hidden_size
    if embedding_std is None and shape.num_experts:
        embedding_std = EMBEDDING_STD if shape.architecture == "gemma4" else _MIXTURE_EMBEDDING_STD
    if shape.architecture == "gemma4":
        yield gemma4_rope_divisors(shape)
    yield matrix("token_embd.weight", shape.vocab_size, hidden, six_bits=shape.tied, std=embedding_std)
    for index in range(shape.num_layers):
        if shape.architecture == "gemma4":
            better = _gets_more_bits(index, shape.num_layers)
            yield from gemma4_layer(shape, index, matrix, vector, router, better)
        elif shape.architecture in _HYBRIDS:
            better = _gets_more_bits(index, shape.num_layers)
            yield from hybrid_layer(shape, index, matrix, vector, router, better)
        else:
            yield from _layer(shape, index, matrix, vector, router)
    yield vector("token_embd_norm.weight" if shape.architecture in CONVOLUTIONS else "output_norm.weight", hidden, 1.0)
    if not shape.tied:
        yield matrix("output.weight", shape.vocab_size, hidden, six_bits=True)


def _layer(
    shape: Shape,
    index: int,
    matrix: Callable[..., NewTensor],
    vector: Callable[..., NewTensor],
    router: Callable[[str], NewTensor],
) -> Iterator[NewTensor]:
    prefix = f"blk.{index}."
    hidden, wide = shape.hidden_size, shape.feed_forward_size
    query_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    better = _gets_more_bits(index, shape.num_layers)
    yield vector(prefix + "attn_norm.weight", hidden, 1.0)
    yield matrix(prefix + "attn_q.weight", query_size, hidden)
    yield matrix(prefix + "attn_k.weight", kv_size, hidden)
    yield matrix(prefix + "attn_v.weight", kv_size, hidden, six_bits=better)
    is_gpt_oss = shape.architecture == "gpt-oss"
    if shape.architecture == "qwen2" or is_gpt_oss:
        yield vector(prefix + "attn_q.bias", query_size, 0.0)
        yield vector(prefix + "attn_k.bias", kv_size, 0.0)
        yield vector(prefix + "attn_v.bias", kv_size, 0.0)
    if shape.architecture in ("qwen3", "qwen3moe", "olmoe", "gemma3"):
        per_head = shape.architecture != "olmoe"
        yield vector(prefix + "attn_q_norm.weight", shape.head_size if per_head else query_size, 1.0)
        yield vector(prefix + "attn_k_norm.weight", shape.head_size if per_head else kv_size, 1.0)
    yield matrix(prefix + "attn_output.weight", hidden, query_size)
    if is_gpt_oss:
        yield vector(prefix + "attn_output.bias", hidden, 0.0)
        yield vector(prefix + "attn_sinks.weight", shape.num_heads, 1.0)
    if shape.architecture == "gemma3":
        yield vector(prefix + "post_attention_norm.weight", hidden, 1.0)
        yield vector(prefix + "post_ffw_norm.weight", hidden, 1.0)
    yield vector(prefix + ("post_attention_norm.weight" if is_gpt_oss else "ffn_norm.weight"), hidden, 1.0)
    if shape.num_experts:
        count, wide = shape.num_experts, shape.expert_size
        yield router(prefix + "ffn_gate_inp.weight")
        yield matrix(prefix + "ffn_gate_exps.weight", count, wide, hidden, of_experts=True)
        yield matrix(prefix + "ffn_up_exps.weight", count, wide, hidden, of_experts=True)
        yield matrix(prefix + "ffn_down_exps.weight", count, hidden, wide, six_bits=better, of_experts=True)
        if is_gpt_oss:
            yield vector(prefix + "ffn_gate_inp.bias", count, 0.0)
            yield vector(prefix + "ffn_gate_exps.bias", wide, 0.0, count)
            yield vector(prefix + "ffn_up_exps.bias", wide, 0.0, count)
            yield vector(prefix + "ffn_down_exps.bias", hidden, 0.0, count)
        return
    yield matrix(prefix + "ffn_gate.weight", wide, hidden)
    yield matrix(prefix + "ffn_up.weight", wide, hidden)
    yield matrix(prefix + "ffn_down.weight", hidden, wide, six_bits=better)


def _gets_more_bits(layer: int, num_layers: int) -> bool:
    """True if Q4_K_M stores V and down of a layer in Q6_K: in the first and last eighth and every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _matrix_type(file_type: FileType | GGMLType, five_bits: bool, six_bits: bool, of_experts: bool) -> GGMLType:
    if isinstance(file_type, GGMLType):
        return file_type
    if file_type == "mxfp4":
        return GGMLType.MXFP4 if of_experts else GGMLType.Q8_0
    if file_type == "q4_k_m":
        return GGMLType.Q6_K if six_bits else GGMLType.Q5_K if five_bits else GGMLType.Q4_K
    return _WHOLE_FILE[file_type]


def _state(seed: int, name: str) -> list[int]:
    """A tensor's own seed, by its name: its bytes do not depend on the tensors before it."""
    return [seed, zlib.crc32(name.encode())]


def _random_matrix(
    ggml_type: GGMLType, out_features: int, cols: int, state: list[int], std: float
) -> NDArray[np.uint8]:
    """Random weights; a standard deviation of cols ** -0.5 keeps the size of a vector that they multiply."""
    return random_blocks(ggml_type, out_features, cols, np.random.default_rng(state), std, centred=True)


def _random_vector(size: int, mean: float, state: list[int]) -> NDArray[np.float32]:
    values = np.random.default_rng(state).standard_normal(size, dtype=np.float32)
    return np.float32(mean) + np.float32(0.02) * values


def shares(experts: int, per_token: int, skew: float) -> NDArray[np.float64]:
    """The share of tokens that each expert is for, the first the most: float64 [experts], whose sum is `per_token`.

    Proportional to `(1 + index) ** -skew`, but no share is above 0.45, and what is cut is for the others.
    """
    law = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    cut = np.zeros(experts, bool)
    while True:
        wanted = np.where(cut, _MOST, 0.0)
        wanted[~cut] = (per_token - wanted.sum()) * law[~cut] / law[~cut].sum()
        if not (wanted[~cut] > _MOST).any():
            return wanted
        cut |= wanted > _MOST


def router_weights(experts: int, per_token: int, hidden: int, skew: float, state: list[int]) -> NDArray[np.float32]:
    """float32 [experts, hidden]. With a skew, an expert's logits spread as far as its share of tokens asks for.

    A token chooses the experts whose logits are above some threshold. Logits of normed tokens are normal, so an expert
    is above a threshold of 1 in a share p of tokens if their standard deviation is 1 / (quantile of 1 - p). Where more
    than 0.45 of all experts are for a token, there is no room to prefer any, and none is preferred.
    """
    rng = np.random.default_rng(state)
    weights = rng.standard_normal((experts, hidden), dtype=np.float32) * np.float32(hidden**-0.5)
    if skew and per_token < _MOST * experts:
        normal = NormalDist()
        scales = [1 / normal.inv_cdf(1 - share) for share in shares(experts, per_token, skew)]
        weights *= rng.permutation(np.array(scales, np.float32))[:, None]
    return weights
