"""`generate_gguf`: random-weight models in the shapes of real ones, for benchmarks and tests. numpy.

Speed does not depend on the weights' values, so such a file stands in for a model that is too large to fetch. It has
no vocabulary (`tokenizer.ggml.model` is `no_vocab`). Keys and tensors are as llama.cpp's converters write them.
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
from realizar.models.generated.shapes import SHAPES, FileType, Shape
from realizar.quantization.random_blocks import random_blocks

_MIXTURE_EMBEDDING_STD = 10.0
"""Of a mixture's embedding: tokens stay unlike each other, whatever attention adds to all of them alike, and so choose
nearly as many experts as by chance."""
_FILE_TYPE_IDS: dict[FileType, int] = {"f16": 1, "q8_0": 7, "q4_k_m": 15, "bf16": 32, "mxfp4": 38}
_OF_SMALL_BLOCKS = {GGMLType.Q4_K: GGMLType.Q5_0, GGMLType.Q5_K: GGMLType.Q5_1, GGMLType.Q6_K: GGMLType.Q8_0}
_WHOLE_FILE: dict[FileType, GGMLType] = {"q8_0": GGMLType.Q8_0, "f16": GGMLType.F16, "bf16": GGMLType.BF16}

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
_QWEN = ("qwen35", "qwen35moe")
_CONVOLUTIONS = ("lfm2", "lfm2moe")
_HYBRIDS = (*_QWEN, *_CONVOLUTIONS)
_DELTA_HEAD = 128
_HYBRID_PERIOD = 4  # layers, of which the last is attention
_HYBRID_ROTATING = 64  # of an attention head
_DELTA_LENGTH, _CONVOLUTION_LENGTH = 4, 3
_DECAY = -0.15  # a state keeps about nine tenths at each token
_GEMMA4_EMBEDDING_STD = 1.0
"""Embeddings are multiplied by the root of their size, and each branch adds one unit: tokens stay unlike each other."""
_GEMMA4_PERIOD = 6  # the last layer of each six is full
_GEMMA4_WINDOW, _GEMMA4_LOCAL_BASE, _GEMMA4_LOGIT_CAP, _GEMMA4_ROTATING_SHARE = 1024, 1e4, 30.0, 0.25
_GEMMA4_QUERY_NORM = 0.25  # stands for the scale of attention
_UNROTATED = 1e30


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
    """The file that `generated_model` writes, whose weights are zeros that take no memory; tables that the spec reads
    are there.
    """
    shape, file_type = SHAPES[shape_name], file_type_of(shape_name)
    zero = np.zeros(1, np.uint8)
    data = (
        (each, np.broadcast_to(zero, each.size_bytes) if callable(each.data) else each.data)
        for each in _tensors(shape, file_type, 0)
    )
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
        f"{arch}.block_count": shape.num_layers + shape.drafts,
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
        return _hybrid_keys(shape)
    if shape.architecture == "gemma4":
        return _gemma4_keys(shape)
    return _KEYS.get(shape.architecture, {})


class _Maker:
    """Makes the tensors of a shape, by their names in the layer of that index, or in the model where it is None."""

    def __init__(
        self, shape: Shape, file_type: FileType | GGMLType, seed: int, skew: float, index: int | None = None
    ) -> None:
        self.shape, self._file_type, self._seed, self._skew = shape, file_type, seed, skew
        self.index, self._prefix = index or 0, "" if index is None else f"blk.{index}."
        self.better = index is not None and _gets_more_bits(index, shape.num_layers)  # V and down

    def matrix(
        self, name: str, *sizes: int, five_bits: bool = False, six_bits: bool = False, of_experts: bool = False,
        std: float | None = None,
    ) -> NewTensor:  # fmt: skip
        name, (*outer, cols) = f"{self._prefix}{name}.weight", sizes
        ggml_type = _matrix_type(self._file_type, five_bits, six_bits, of_experts)
        if self._file_type == "q4_k_m" and cols % ggml_type.block_size:
            ggml_type = _OF_SMALL_BLOCKS[ggml_type]
        if cols % ggml_type.block_size:
            raise ValueError(f"out_features of {cols} weights are not whole {ggml_type.name} blocks")
        make = partial(_random_matrix, ggml_type, math.prod(outer), cols, self._state(name), std or cols**-0.5)
        return NewTensor(name, ggml_type, sizes, make)

    def vector(self, name: str, size: int, mean: float, *outer: int) -> NewTensor:
        name, count = self._prefix + name, math.prod(outer) * size
        return NewTensor(name, GGMLType.F32, (*outer, size), partial(_random_vector, count, mean, self._state(name)))

    def norm(self, name: str, size: int | None = None) -> NewTensor:
        """Over the hidden size where `size` is None."""
        return self.vector(f"{name}.weight", self.shape.hidden_size if size is None else size, 1.0)

    def router(self) -> NewTensor:
        shape, name = self.shape, f"{self._prefix}ffn_gate_inp.weight"
        sizes, state = (shape.num_experts, shape.hidden_size), self._state(name)
        make = partial(router_weights, sizes[0], shape.experts_per_token, sizes[1], self._skew, state)
        return NewTensor(name, GGMLType.F32, sizes, make)

    def _state(self, name: str) -> list[int]:
        """A tensor's own seed, by its name: its bytes do not depend on the tensors before it."""
        return [self._seed, zlib.crc32(name.encode())]


def _tensors(
    shape: Shape, file_type: FileType | GGMLType, seed: int, skew: float = 0.0, *, embedding_std: float | None = None
) -> Iterator[NewTensor]:
    is_gemma4, whole = shape.architecture == "gemma4", _Maker(shape, file_type, seed, skew)
    if embedding_std is None and shape.num_experts:
        embedding_std = _GEMMA4_EMBEDDING_STD if is_gemma4 else _MIXTURE_EMBEDDING_STD
    if is_gemma4:
        yield _gemma4_rope_divisors(shape)
    yield whole.matrix("token_embd", shape.vocab_size, shape.hidden_size, six_bits=shape.tied, std=embedding_std)
    layer = _gemma4_layer if is_gemma4 else _hybrid_layer if shape.architecture in _HYBRIDS else _layer
    for index in range(shape.num_layers + shape.drafts):
        yield from layer(_Maker(shape, file_type, seed, skew, index))
    yield whole.norm("token_embd_norm" if shape.architecture in _CONVOLUTIONS else "output_norm")
    if not shape.tied:
        yield whole.matrix("output", shape.vocab_size, shape.hidden_size, six_bits=True)


def _layer(make: _Maker) -> Iterator[NewTensor]:
    shape, hidden, architecture = make.shape, make.shape.hidden_size, make.shape.architecture
    is_gpt_oss = architecture == "gpt-oss"
    yield make.norm("attn_norm")
    yield from _attention(make)
    if is_gpt_oss:
        yield make.vector("attn_output.bias", hidden, 0.0)
        yield make.vector("attn_sinks.weight", shape.num_heads, 1.0)
    if architecture == "gemma3":
        yield make.norm("post_attention_norm")
        yield make.norm("post_ffw_norm")
    yield make.norm("post_attention_norm" if is_gpt_oss else "ffn_norm")
    yield from _experts(make) if shape.num_experts else _dense(make)
    if is_gpt_oss:
        yield make.vector("ffn_gate_inp.bias", shape.num_experts, 0.0)
        for part, size in (("gate", shape.expert_size), ("up", shape.expert_size), ("down", hidden)):
            yield make.vector(f"ffn_{part}_exps.bias", size, 0.0, shape.num_experts)


def _attention(make: _Maker) -> Iterator[NewTensor]:
    """Queries of Qwen's hybrids have the output gate beside them."""
    shape, hidden, architecture = make.shape, make.shape.hidden_size, make.shape.architecture
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    yield make.matrix("attn_q", queries * (2 if architecture in _QWEN else 1), hidden)
    yield make.matrix("attn_k", keys, hidden)
    yield make.matrix("attn_v", keys, hidden, six_bits=make.better)
    if architecture in ("qwen2", "gpt-oss"):
        for part, size in (("q", queries), ("k", keys), ("v", keys)):
            yield make.vector(f"attn_{part}.bias", size, 0.0)
    elif architecture != "llama":
        per_head = architecture != "olmoe"
        yield make.norm("attn_q_norm", shape.head_size if per_head else queries)
        yield make.norm("attn_k_norm", shape.head_size if per_head else keys)
    yield make.matrix("attn_output", hidden, queries)


def _dense(make: _Maker) -> Iterator[NewTensor]:
    hidden, wide = make.shape.hidden_size, make.shape.feed_forward_size
    yield make.matrix("ffn_gate", wide, hidden)
    yield make.matrix("ffn_up", wide, hidden)
    yield make.matrix("ffn_down", hidden, wide, six_bits=make.better)


def _experts(make: _Maker) -> Iterator[NewTensor]:
    count, wide, hidden = make.shape.num_experts, make.shape.expert_size, make.shape.hidden_size
    yield make.router()
    yield make.matrix("ffn_gate_exps", count, wide, hidden, of_experts=True)
    yield make.matrix("ffn_up_exps", count, wide, hidden, of_experts=True)
    yield make.matrix("ffn_down_exps", count, hidden, wide, six_bits=make.better, of_experts=True)


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


def _hybrid_keys(shape: Shape) -> dict[str, Any]:
    """Keys beside those of every shape, without the architecture's name."""
    if shape.architecture in _CONVOLUTIONS:
        is_attention = _hybrid_attention_layers(shape)
        keys = {
            "attention.head_count_kv": [shape.num_kv_heads * flag for flag in is_attention],
            "shortconv.l_cache": _CONVOLUTION_LENGTH,
        }
        if shape.num_experts:
            keys |= {"leading_dense_block_count": shape.dense_layers, "expert_gating_func": 2}
        return keys
    keys = {
        "full_attention_interval": _HYBRID_PERIOD,
        "rope.dimension_count": _HYBRID_ROTATING,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": _DELTA_LENGTH,
        "ssm.state_size": _DELTA_HEAD,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.value_heads * _DELTA_HEAD,
    }
    keys |= {"nextn_predict_layers": 1} if shape.drafts else {}
    return keys | ({"expert_shared_feed_forward_length": shape.expert_size} if shape.num_experts else {})


def _hybrid_layer(make: _Maker) -> Iterator[NewTensor]:
    shape, hidden, is_qwen = make.shape, make.shape.hidden_size, make.shape.architecture in _QWEN
    yield make.norm("attn_norm")
    if make.index == shape.num_layers:
        yield make.matrix("nextn.eh_proj", hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield make.norm(f"nextn.{name}")
    if make.index == shape.num_layers or _hybrid_attention_layers(shape)[make.index]:
        yield from _attention(make)
    elif is_qwen:
        yield from _hybrid_delta_net(make)
    else:
        yield make.matrix("shortconv.in_proj", 3 * hidden, hidden)
        yield make.vector("shortconv.conv.weight", _CONVOLUTION_LENGTH, 0.5, hidden)
        yield make.matrix("shortconv.out_proj", hidden, hidden)
    yield make.norm("post_attention_norm" if is_qwen else "ffn_norm")
    if not shape.num_experts or make.index < shape.dense_layers:
        yield from _dense(make)
        return
    yield from _experts(make)
    if not is_qwen:
        yield make.vector("exp_probs_b.bias", shape.num_experts, 0.0)  # of the choice
        return
    yield make.vector("ffn_gate_inp_shexp.weight", hidden, 0.0)
    yield make.matrix("ffn_gate_shexp", shape.expert_size, hidden)
    yield make.matrix("ffn_up_shexp", shape.expert_size, hidden)
    yield make.matrix("ffn_down_shexp", hidden, shape.expert_size, six_bits=make.better)


def _hybrid_delta_net(make: _Maker) -> Iterator[NewTensor]:
    shape, hidden = make.shape, make.shape.hidden_size
    keys, values = shape.key_heads * _DELTA_HEAD, shape.value_heads * _DELTA_HEAD
    yield make.matrix("attn_qkv", 2 * keys + values, hidden, five_bits=True)
    yield make.matrix("attn_gate", values, hidden)
    yield make.vector("ssm_conv1d.weight", _DELTA_LENGTH, 0.5, 2 * keys + values)
    yield make.vector("ssm_dt.bias", shape.value_heads, 0.0)
    yield make.vector("ssm_a", shape.value_heads, _DECAY)
    yield make.matrix("ssm_beta", shape.value_heads, hidden)
    yield make.matrix("ssm_alpha", shape.value_heads, hidden)
    yield make.norm("ssm_norm", _DELTA_HEAD)
    yield make.matrix("ssm_out", hidden, values)


def _hybrid_attention_layers(shape: Shape) -> list[bool]:
    if shape.architecture in _QWEN:
        return [(index + 1) % _HYBRID_PERIOD == 0 for index in range(shape.num_layers)]
    return [index in shape.attention_layers for index in range(shape.num_layers)]


def _gemma4_keys(shape: Shape) -> dict[str, Any]:
    """Keys beside those of every shape, without the architecture's name. Full layers have KV heads of their own."""
    is_local = _gemma4_windowed_layers(shape)
    return {
        "attention.head_count_kv": [shape.num_kv_heads if flag else shape.full_kv_heads for flag in is_local],
        "attention.key_length": shape.full_head_size,
        "attention.value_length": shape.full_head_size,
        "attention.key_length_swa": shape.head_size,
        "attention.value_length_swa": shape.head_size,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": _GEMMA4_WINDOW,
        "attention.sliding_window_pattern": is_local,
        "embedding_length_per_layer_input": 0,
        "expert_feed_forward_length": shape.expert_size,
        "final_logit_softcapping": _GEMMA4_LOGIT_CAP,
        "rope.dimension_count": shape.full_head_size,
        "rope.dimension_count_swa": shape.head_size,
        "rope.freq_base_swa": _GEMMA4_LOCAL_BASE,
    }


def _gemma4_rope_divisors(shape: Shape) -> NewTensor:
    """The tensor that keeps most of a full layer's head from rotating."""
    divisors = np.full(shape.full_head_size // 2, _UNROTATED, np.float32)
    divisors[: int(shape.full_head_size * _GEMMA4_ROTATING_SHARE / 2)] = 1
    return NewTensor("rope_freqs.weight", GGMLType.F32, divisors.shape, divisors)


def _gemma4_layer(make: _Maker) -> Iterator[NewTensor]:
    shape, hidden = make.shape, make.shape.hidden_size
    yield make.norm("attn_norm")
    yield from _gemma4_attention(make)
    yield make.norm("post_attention_norm")
    yield make.norm("ffn_norm")
    yield from _dense(make)
    for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2", "post_ffw_norm"):
        yield make.norm(name)
    count, wide = shape.num_experts, shape.expert_size
    yield make.router()
    # Takes back the root of the width, by which the router's norm is divided.
    yield make.vector("ffn_gate_inp.scale", hidden, hidden**0.5)
    yield make.matrix("ffn_gate_up_exps", count, 2 * wide, hidden, of_experts=True)
    yield make.matrix("ffn_down_exps", count, hidden, wide, six_bits=make.better, of_experts=True)
    yield make.vector("ffn_down_exps.scale", count, 1.0)
    yield make.norm("layer_output_scale", 1)


def _gemma4_attention(make: _Maker) -> Iterator[NewTensor]:
    """K makes V in full layers."""
    shape, hidden = make.shape, make.shape.hidden_size
    is_local = _gemma4_windowed_layers(shape)[make.index]
    size = shape.head_size if is_local else shape.full_head_size
    keys = size * (shape.num_kv_heads if is_local else shape.full_kv_heads)
    yield make.matrix("attn_q", shape.num_heads * size, hidden)
    yield make.matrix("attn_k", keys, hidden)
    if is_local:
        yield make.matrix("attn_v", keys, hidden, six_bits=make.better)
    yield make.vector("attn_q_norm.weight", size, _GEMMA4_QUERY_NORM)
    yield make.norm("attn_k_norm", size)
    yield make.matrix("attn_output", hidden, shape.num_heads * size)


def _gemma4_windowed_layers(shape: Shape) -> list[bool]:
    return [(index + 1) % _GEMMA4_PERIOD != 0 and index + 1 != shape.num_layers for index in range(shape.num_layers)]
