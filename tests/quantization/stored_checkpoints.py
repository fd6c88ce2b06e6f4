"""Matrices as AWQ, GPTQ, compressed-tensors and others store them, from their descriptions; tiny models of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.open import open_checkpoint
from realizar.quantization.microscaling import e4m3

HIDDEN, WIDTH, HEAD, HEADS, VOCABULARY, LAYERS = 128, 256, 32, 4, 48, 2
CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "max_position_embeddings": 64, "hidden_size": HIDDEN,
    "intermediate_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD,
    "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = 4
MIXTURE: dict[str, Any] = CONFIG | {
    "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SHARED: dict[str, Any] = MIXTURE | {
    "model_type": "qwen2_moe", "shared_expert_intermediate_size": WIDTH, "norm_topk_prob": False,
}  # fmt: skip
_E4M3, _E8M0 = np.dtype("V1"), np.dtype("S1")
_DTYPES = {
    "void8": "F8_E4M3", "bytes8": "F8_E8M0",
    "float16": "F16", "uint16": "BF16", "float32": "F32", "int8": "I8", "uint8": "U8", "int32": "I32", "uint32": "U32",
    "int64": "I64",
}  # fmt: skip
_EXPONENTS = ("uint8", "e8m0")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Stored:
    """How a matrix is stored; a `group` of 0 is all columns, and of `rows`, which are of floats alone, all of them.

    `ordered`: columns of a group lie apart (act-order).
    """

    method: str  # awq, gptq, gptq_v2, packed, unpacked, fp8, mxfp8, float, nvfp4, mxfp4 or modelopt (with 4 or 8 bits)
    bits: int = 4
    group: int = 128
    symmetric: bool = False
    scale: str = "float16"
    rows: int = 128
    ordered: bool = False

    @property
    def is_float(self) -> bool:
        return self.method in ("fp8", "mxfp8", "float", "nvfp4", "mxfp4", "modelopt")

    @property
    def is_nvfp4(self) -> bool:
        return self.method == "nvfp4" or (self.method == "modelopt" and self.bits == 4)

    @property
    def algorithm(self) -> str:
        """ModelOpt's name."""
        if self.bits == 4:
            return "NVFP4"
        if self.scale in _EXPONENTS:
            return "MXFP8"
        return "FP8_PB_WO" if self.group else "FP8_PER_CHANNEL_PER_TOKEN" if self.rows else "FP8"

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config`."""
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        if self.method.startswith("gptq"):
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group or -1, "desc_act": self.ordered,
                "sym": self.symmetric, "checkpoint_format": self.method,
            }  # fmt: skip
        if self.method in ("fp8", "mxfp8"):
            block = [self.rows, self.group] if self.group else None
            return {
                "quant_method": self.method, "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block,
                "scale_fmt": "ue8m0" if self.scale in _EXPONENTS else None,
            }  # fmt: skip
        if self.method == "modelopt":
            return {"quant_method": "modelopt", "quant_algo": self.algorithm, "ignore": ["lm_head"], "producer": {}}
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "group_size": self.group or None,
            "strategy": "group" if self.group else "channel",
            "actorder": "group" if self.ordered else None,
        }  # fmt: skip
        names = {"packed": "pack-quantized", "unpacked": "int-quantized", "float": "float-quantized"}
        names |= {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
        inputs = {"num_bits": 8, "type": "float", "dynamic": False} if self.is_float else None
        if self.is_float:
            strategy = "block" if self.group else "channel" if self.rows else "tensor"
            weights |= {"num_bits": 8, "type": "float", "strategy": strategy}
            weights |= {"block_structure": [self.rows, self.group]} if self.group else {}
        if self.scale in _EXPONENTS or self.method == "mxfp4":
            bits = 4 if self.method == "mxfp4" else 8
            weights |= {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
            names["float"] = "mxfp8-quantized"
        if self.is_nvfp4:
            weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors", "format": names[self.method], "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
        }  # fmt: skip


def packed(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """int32 [..., n * bits / 32] of codes [..., n], the first in the lowest bits, zeros behind the last."""
    each = 32 // bits
    codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], -codes.shape[-1] % each), codes.dtype)], axis=-1)
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, each)
    words = np.bitwise_or.reduce(parts << (bits * np.arange(each, dtype=np.uint32)), axis=-1)
    return np.ascontiguousarray(words).view(np.int32)


def random_matrix(
    stored: Stored, out_features: int, in_features: int, rng: np.random.Generator
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """The tensors of a matrix by what follows its module's name, and its weights, float64, one formula for all."""
    if stored.is_float:
        return _random_floats(stored, out_features, in_features, rng)
    bits, middle = stored.bits, 1 << stored.bits - 1
    group = stored.group or in_features
    codes = rng.integers(0, 1 << bits, (out_features, in_features))
    less = 1 if stored.method == "gptq" else 0  # a zero is stored less one
    zeros = rng.integers(less, less + (1 << bits), (out_features, in_features // group))
    if stored.symmetric:
        zeros[:] = middle
    kept, scales = _kept(rng.uniform(0.5, 1.5, zeros.shape) / (middle * in_features**0.5), stored.scale)
    tensors = _tensors(stored, codes, zeros, kept)
    if not stored.ordered:
        return tensors, _spread(scales, group) * (codes - _spread(zeros, group))
    order = rng.permutation(np.arange(in_features, dtype=np.int32) // group)
    tensors[".g_idx" if stored.method.startswith("gptq") else ".weight_g_idx"] = order
    weights = scales.astype(np.float64)[:, order] * (codes - zeros[:, order])
    return tensors, weights.astype(np.float16).astype(np.float64)


def nearest_matrix(stored: Stored, weights: NDArray[np.float32]) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """As `random_matrix`, of the numbers nearest to some weights, in integers or e4m3."""
    out_features, in_features = weights.shape
    rows, group = stored.rows or out_features, stored.group or in_features
    if stored.is_float:
        padded = np.pad(weights, ((0, -out_features % rows), (0, -in_features % group)))
        blocks = np.abs(padded).reshape(len(padded) // rows, rows, -1, group)
        kept, scales = _kept(blocks.max(axis=(1, 3)) / 448, stored.scale)
        values = e4m3()[:127].astype(np.float64)
        ratio = weights / np.repeat(_spread(scales, group), rows, axis=0)[:out_features, :in_features]
        codes = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(ratio)) | (ratio < 0) << 7
        return _float_tensors(stored, codes.astype(np.uint8), kept, scales)
    groups, last = weights.reshape(out_features, -1, group).astype(np.float64), (1 << stored.bits) - 1
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    if stored.symmetric:
        high = np.maximum(-low, high)
        low = -high
    kept, scales = _kept((high - low) / last, stored.scale)
    zeros = np.full(scales.shape, 1 << stored.bits - 1)
    if not stored.symmetric:
        less = 1 if stored.method == "gptq" else 0
        zeros = np.clip(np.rint(-low / scales), less, less + last).astype(np.int64)
    codes = np.clip(np.rint(weights / _spread(scales, group)) + _spread(zeros, group), 0, last).astype(np.int64)
    return _tensors(stored, codes, zeros, kept), _spread(scales, group) * (codes - _spread(zeros, group))


def _spread(values: NDArray[Any], group: int) -> NDArray[np.float64]:
    return np.repeat(values, group, axis=1).astype(np.float64)


def _random_floats(
    stored: Stored, out_features: int, in_features: int, rng: np.random.Generator
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    if stored.is_nvfp4:
        return _random_nvfp4(stored, out_features, in_features, rng)
    if stored.method == "mxfp4":
        codes, values = _random_e2m1(out_features, in_features, rng)
        scales = rng.integers(120, 123, (out_features, in_features // 32)).astype(np.uint8)
        weights = values * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=1)
        return {".weight_packed": codes, ".weight_scale": scales}, weights
    codes = rng.integers(0, 255, (out_features, in_features)).astype(np.uint8)
    codes[codes == 127] = 0
    rows, group = stored.rows or out_features, stored.group or in_features
    scales = rng.uniform(0.5, 1.5, (-(-out_features // rows), -(-in_features // group))) / (150 * in_features**0.5)
    return _float_tensors(stored, codes, *_kept(scales, stored.scale))


def _float_tensors(
    stored: Stored, codes: NDArray[np.uint8], kept: NDArray[Any], scales: NDArray[Any]
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    out_features, in_features = codes.shape
    spread = np.repeat(_spread(scales, stored.group or in_features), stored.rows or out_features, axis=0)
    weights = e4m3()[codes].astype(np.float64) * spread[:out_features, :in_features]
    name = ".weight_scale_inv" if stored.method in ("fp8", "mxfp8") else ".weight_scale"
    return {".weight": codes.view(_E4M3), name: kept if kept.size > 1 else kept.reshape(-1)}, weights


def _random_nvfp4(
    stored: Stored, out_features: int, in_features: int, rng: np.random.Generator
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    packed_codes, values = _random_e2m1(out_features, in_features, rng)
    scales = rng.integers(40, 127, (out_features, in_features // 16)).astype(np.uint8)
    factor = np.float32(1 / 4000 if stored.scale == "float32" else 1 / 4096)
    weights = values * np.repeat(e4m3()[scales], 16, axis=1) * float(factor)
    packed_scales = scales.view(_E4M3)
    if stored.method == "modelopt":
        return {".weight": packed_codes, ".weight_scale": packed_scales, ".weight_scale_2": np.array(factor)}, weights
    whole = np.array([1 / factor], np.float32)
    return {
        ".weight_packed": packed_codes, ".weight_scale": packed_scales, ".weight_global_scale": whole,
        ".input_global_scale": whole,
    }, weights  # fmt: skip


def _random_e2m1(
    out_features: int, in_features: int, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Codes, two a byte, and their values."""
    codes = rng.integers(0, 16, (out_features, in_features)).astype(np.uint8)
    values = np.where(codes < 8, 1, -1) * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    return codes[:, 0::2] | codes[:, 1::2] << 4, values


def _kept(scales: NDArray[np.float64], kind: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales as they are stored, and as numbers."""
    if kind in _EXPONENTS:
        exponents = np.rint(np.log2(scales) + 127).astype(np.uint8)
        return exponents.view(_E8M0) if kind == "e8m0" else exponents, np.exp2(exponents.astype(np.float64) - 127)
    if kind != "bfloat16":
        return scales.astype(kind), scales.astype(kind)
    kept = (scales.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return kept, (kept.astype(np.uint32) << 16).view(np.float32)


def _tensors(stored: Stored, codes: NDArray[Any], zeros: NDArray[Any], scales: NDArray[Any]) -> dict[str, NDArray[Any]]:
    bits, shape = stored.bits, codes.shape
    if stored.method == "awq":
        words, zero_words = (
            packed(each.T.reshape(-1, shape[0] // 8, 8)[..., _AWQ_ORDER], 4) for each in (codes, zeros)
        )
        return {
            ".qweight": words.reshape(len(codes.T), -1), ".qzeros": zero_words.reshape(zeros.shape[1], -1),
            ".scales": np.ascontiguousarray(scales.T),
        }  # fmt: skip
    if stored.method.startswith("gptq"):
        less = 1 if stored.method == "gptq" else 0
        return {
            ".qweight": np.ascontiguousarray(packed(codes, bits).T), ".qzeros": packed(zeros.T - less, bits),
            ".scales": np.ascontiguousarray(scales.T),
            ".g_idx": (np.arange(shape[1]) // (shape[1] // zeros.shape[1])).astype(np.int32),
        }  # fmt: skip
    own = {".weight_scale": scales}
    if stored.method == "packed":
        own |= {".weight_packed": packed(codes, bits), ".weight_shape": np.array(shape, np.int64)}
        return own if stored.symmetric else own | {".weight_zero_point": np.ascontiguousarray(packed(zeros.T, bits).T)}
    own[".weight"] = (codes - 128).astype(np.int8)
    return own if stored.symmetric else own | {".weight_zero_point": (zeros - 128).astype(np.int8)}


def write_model(
    folder: Path, stored: Stored, *, mixture: bool = False, shared: bool = False,
    more: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    others: Mapping[str, Stored] = MappingProxyType({}), lacking: Collection[str] = (), **method: Any,
) -> dict[str, NDArray[np.float64]]:  # fmt: skip
    """A Llama, a Qwen3 of experts (`mixture`), or a Qwen2 of experts, one of them `shared`, whose layers' matrices are
    stored so, or as `others` by their names in a layer; with `more` tensors and keys of the `method`, and without those
    tensors that it is `lacking`.

    Returns their weights, by the names that they would have.
    """
    rng, weights = np.random.default_rng(5), {}
    tensors: dict[str, NDArray[Any]] = {
        "model.embed_tokens.weight": rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float16),
        "lm_head.weight": (rng.standard_normal((VOCABULARY, HIDDEN)) / 11).astype(np.float16),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        **more,
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (2 * HEAD, HIDDEN),
        "self_attn.v_proj": (2 * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    }  # fmt: skip
    parts = [f"mlp.experts.{expert}" for expert in range(EXPERTS)] if mixture or shared else ["mlp"]
    for part in [*parts, "mlp.shared_expert"] if shared else parts:
        shapes |= {f"{part}.gate_proj": (WIDTH, HIDDEN), f"{part}.up_proj": (WIDTH, HIDDEN)}
        shapes[f"{part}.down_proj"] = HIDDEN, WIDTH
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{base}.{norm}.weight"] = rng.uniform(0.8, 1.2, HIDDEN).astype(np.float32)
        if shared:
            for part in (f"self_attn.{each}_proj" for each in "qkv"):
                tensors[f"{base}.{part}.bias"] = np.zeros(shapes[part][0], np.float32)
            tensors[f"{base}.mlp.shared_expert_gate.weight"] = rng.standard_normal((1, HIDDEN)).astype(np.float16)
        elif mixture:
            tensors |= {f"{base}.self_attn.{each}_norm.weight": np.ones(HEAD, np.float32) for each in "qk"}
        if mixture or shared:
            tensors[f"{base}.mlp.gate.weight"] = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float16)
        for name, shape in shapes.items():
            made, weights[f"{base}.{name}.weight"] = random_matrix(others.get(name, stored), *shape, rng)
            tensors |= {f"{base}.{name}{suffix}": array for suffix, array in made.items()}
    tensors = {name: array for name, array in tensors.items() if name not in lacking}
    write_checkpoint(folder, tensors, stored.config | method, SHARED if shared else MIXTURE if mixture else CONFIG)
    return weights


def write_checkpoint(
    folder: Path, tensors: dict[str, NDArray[Any]], method: dict[str, Any], config: dict[str, Any] = CONFIG
) -> None:
    """Arrays of uint16 are the bits of bfloat16."""
    header: dict[str, Any] = {}
    size = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": (size, size + array.nbytes),
        }  # fmt: skip
        size += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}), encoding="utf-8")


def join_experts(folder: Path, target: Path) -> None:
    """The mixture of a folder in FP8, its layers' experts in two tensors, as transformers 5 has them in memory."""
    stored = open_checkpoint(folder)
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    tensors = {
        name: each.data.view(_E4M3 if each.dtype == "F8_E4M3" else dtypes[each.dtype]).reshape(each.shape)
        for name, each in stored.tensors.items()
    }
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.mlp.experts"
        for before, after in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
            gate, up, down = (
                np.stack([tensors.pop(f"{base}.{expert}.{part}_proj{before}") for expert in range(EXPERTS)])
                for part in ("gate", "up", "down")
            )
            tensors |= {f"{base}.gate_up_proj{after}": np.concatenate([gate, up], 1), f"{base}.down_proj{after}": down}
    write_checkpoint(target, tensors, stored.metadata["config"]["quantization_config"], MIXTURE)


def write_model_opt_file(folder: Path, *, alone: bool = True, **method: Any) -> None:
    """ModelOpt's own file, beside the `quantization_config` that the folder has or `alone`, without that."""
    details = {"kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    whole = {"producer": {"name": "modelopt"}, "quantization": {**details, **method}}
    (folder / "hf_quant_config.json").write_text(json.dumps(whole), encoding="utf-8")
    if alone:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
