"""Integers of four or eight bits with a scale a group, as AWQ, GPTQ and compressed-tensors store them. numpy only.

What compressed-tensors stores as floats, `float_tensors.py` reads.

A weight is `scale * (code - zero)`, whose zero is a group's own, or the middle of all codes. A word of 32 bits has n
codes, the first in the lowest bits:

- `awq`: `qweight` [in_features, out_features / 8], whose words have eight out_features, in the order 0, 2, 4, 6, 1, 3,
  5, 7; `qzeros` [groups, out_features / 8] likewise; `scales` [groups, out_features].
- `gptq`: `qweight` [in_features / n, out_features], whose words have n columns; `qzeros` [groups, out_features / n], in
  the first form of the format less one; `scales` [groups, out_features]; `g_idx` [in_features], a column's group.
- `compressed-tensors`: `weight_packed` [out_features, in_features / n], `weight_scale` [out_features, groups],
  `weight_zero_point` [out_features / n, groups], `weight_shape` [2]; or unpacked, `weight` and `weight_zero_point` in
  int8; `weight_g_idx` as `g_idx`.

Sources: AutoAWQ's `packing_utils`, GPTQModel's `pack_model`, compressed-tensors' `pack_quantized`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.block_source import CopiedSource, Pages
from realizar.quantization.float_tensors import BLOCK, EXPONENTS, MICRO, float_source, four_bit_source
from realizar.quantization.layout import ScaleType, WeightLayout
from realizar.quantization.parts import (
    GROUPS,
    Parts,
    PartsFormat,
    PartsSource,
    array_of,
    check_shape,
    finite_in_halves,
    floats_of,
    matrix_shape,
    wrong,
)
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

_WORD_BITS = 32
_SMALL: Mapping[int, ScaleType] = {4: "u8", 8: "i8"}
"""The type of zeros, by the bits of codes."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_COMPRESSED = (
    "float-quantized", "int-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
_WEIGHTS = (
    ("int", 4, "group"), ("int", 4, "channel"), ("int", 8, "group"), ("int", 8, "channel"), ("float", 8, "tensor"),
    ("float", 8, "channel"), ("float", 8, "block"), ("float", 8, "group"), ("float", 4, "group"),
    ("float", 4, "tensor_group"),
)  # fmt: skip
"""Of compressed-tensors: types, bits and strategies."""


class _IntegerSource(PartsSource):
    """A matrix of such tensors; `group` columns share a scale.

    Args:
        parts: the tensors as a method names them. bits: of a code.
        symmetric: whether all zeros are the middle of the codes.
    """

    def __init__(self, name: str, shape: tuple[int, int], bits: int, symmetric: bool, group: int, parts: Parts) -> None:
        wide = next((each for each in GROUPS if group % each == 0), 0)
        scales = parts["scales"]
        if not wide:
            reason = f"has a scale for {group} columns, and not for a multiple of {GROUPS[-1]}"
            raise UnsupportedModelError(f"{scales.path}: tensor {shown(scales.name)} {reason}")
        if symmetric:
            size = wide * bits // 8 + 2
            layout = WeightLayout(f"INT{bits} by {wide}", wide, size, bits=bits, offset=1 << bits - 1, group_size=wide)
        else:  # a zero is a small minimum, whose factor is minus the scale; the CPU multiplies eight bits less 128
            size, small, offset = wide * bits // 8 + 4, _SMALL[bits], 128 if bits == 8 else 0
            layout = WeightLayout(
                f"INT{bits} by {wide} with zeros", wide, size, bits=bits, offset=offset, group_size=wide, scale=small,
                minimum=True, super_group_size=wide,
            )  # fmt: skip
        super().__init__(layout, *shape, name, parts)
        self._repeats, self._symmetric = group // wide, symmetric
        self._order: NDArray[np.int32] | None = None

    def sorted_by(self, order: NDArray[np.int32]) -> MatrixSource:
        """The matrix with the columns `order`, groups of which share a scale: int32 [in_features]."""
        made = copy(self)
        made._order = order
        return made

    def _columns(self, start: int, stop: int) -> NDArray[np.uint8]:
        """`codes`, sorted where they are to be."""
        codes = self.codes(start, stop)
        return codes if self._order is None else codes[:, self._order]

    def planes(self, start: int, stop: int) -> Planes:
        codes, scales = self._columns(start, stop), self._spread(finite_in_halves(self.scales(start, stop)))
        if self._symmetric:
            return Planes(self.layout, codes, scales)
        zeros = self._spread(self.zeros(start, stop).astype(np.int16)) - np.int16(self.layout.offset)
        signs = np.where(zeros > 127, np.int16(-1), np.int16(1))  # 128 is no signed byte, and -128 is
        return Planes(
            self.layout, codes, np.ones_like(zeros), zeros * signs, super_scales=scales, super_minima=-scales * signs
        )

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """With one rounding, as the methods have it: a scale times a code less its zero."""
        if self._symmetric:
            return super().read(start, stop)
        scales, zeros = self.scales(start, stop), self.zeros(start, stop).astype(np.float32)
        values = self._columns(start, stop).astype(np.float32).reshape(*scales.shape, -1)
        values -= zeros[..., None]
        values *= scales[..., None]
        return values.reshape(stop - start, self.in_features)

    def find_not_finite(self, start: int, stop: int) -> str | None:
        """Also a scale of 0 whose codes are other than their zero, as of floats."""
        scales = self.scales(start, stop)
        if not scales.all():
            zeros = self.layout.offset if self._symmetric else self.zeros(start, stop)[..., None]
            others = (self._columns(start, stop).reshape(*scales.shape, -1) != zeros).any(axis=2)
            silenced = np.flatnonzero((others & (scales == 0)).any(axis=1))
            if len(silenced):
                return f"a scale of out_feature {start + silenced[0]} is 0, and its numbers are not"
        return super().find_not_finite(start, stop)

    @abstractmethod
    def codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """uint8 [out_features, in_features]."""

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """float32 [out_features, groups]."""
        return floats_of(self.parts["scales"], np.s_[:, start:stop]).T

    @abstractmethod
    def zeros(self, start: int, stop: int) -> NDArray[np.int32]:
        """The codes that mean zero, int32 [out_features, groups]."""

    def _spread(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(values, self._repeats, axis=1)


class _AwqSource(_IntegerSource):
    def codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._unpacked("codes", start, stop)

    def zeros(self, start: int, stop: int) -> NDArray[np.int32]:
        return self._unpacked("zeros", start, stop).astype(np.int32)

    def _unpacked(self, part: str, start: int, stop: int) -> NDArray[np.uint8]:
        first, last = start // 8, -(-stop // 8)
        words = np.ascontiguousarray(array_of(self.parts[part], "<u4")[:, first:last].T)
        codes = words.view(np.uint8).reshape(*words.shape, 4)
        found = np.empty((last - first, 8, words.shape[1]), np.uint8)
        for place, out_feature in enumerate(_AWQ_ORDER):  # two to a byte
            both = codes[..., place // 2]
            found[:, out_feature] = both >> np.uint8(4) if place % 2 else both & np.uint8(15)
        return found.reshape(-1, words.shape[1])[start - 8 * first : stop - 8 * first]


class _GptqSource(_IntegerSource):
    """`less`: what zeros are stored less by."""

    less = 1

    def planes(self, start: int, stop: int) -> Planes:
        """Raises CheckpointError where a symmetric matrix has other zeros than the middle."""
        if self._symmetric and (self.zeros(start, stop) != self.layout.offset).any():
            raise wrong(self.parts["zeros"], f"has other zeros than {self.layout.offset}, and `sym` is true")
        return super().planes(start, stop)

    def codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        words = np.ascontiguousarray(array_of(self.parts["codes"], "<u4")[:, start:stop].T)
        return _unpacked(words, self.layout.bits)

    def zeros(self, start: int, stop: int) -> NDArray[np.int32]:
        each = _WORD_BITS // self.layout.bits
        first, last = start // each, -(-stop // each)
        zeros = _unpacked(array_of(self.parts["zeros"], "<u4")[:, first:last], self.layout.bits).astype(np.int32)
        return zeros.T[start - each * first : stop - each * first] + self.less


class _Gptq2Source(_GptqSource):
    less = 0


class _CompressedSource(_IntegerSource):
    def codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        stored = self.parts["codes"]
        if stored.dtype == "I8":
            signed: NDArray[np.uint8] = array_of(stored, np.uint8)[start:stop]
            return signed ^ np.uint8(0x80)
        words = np.ascontiguousarray(array_of(stored, "<u4")[start:stop])
        return _unpacked(words, self.layout.bits)

    def zeros(self, start: int, stop: int) -> NDArray[np.int32]:
        stored, bits = self.parts.get("zeros"), self.layout.bits
        if stored is None:
            return np.full((stop - start, self.parts["scales"].shape[1]), 1 << bits - 1, np.int32)
        if stored.dtype == "I8":
            signed: NDArray[np.int32] = array_of(stored, np.int8)[start:stop].astype(np.int32)
            return signed + 128
        each = _WORD_BITS // bits
        first, last = start // each, -(-stop // each)
        words = np.ascontiguousarray(array_of(stored, "<u4")[first:last].T)
        return _unpacked(words, bits).astype(np.int32).T[start - each * first : stop - each * first]

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        return floats_of(self.parts["scales"], np.s_[start:stop])


class AwqTensors(PartsFormat):
    """The method `awq`, of four bits, in AutoAWQ's order `gemm`."""

    known = frozenset({
        "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "modules_to_not_convert",
        "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "desc_act", "sym",
    })  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        for key in ("bits", "w_bit"):
            if config.get(key, 4) != 4:
                raise self.unsupported(key)
        for key in ("version", "format"):
            if str(config.get(key) or "gemm").lower() != "gemm":
                raise self.unsupported(key)
        if config.get("zero_point", True) is not True:
            raise self.unsupported("zero_point")

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        return {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        parts = self.parts(checkpoint, name)
        in_features, words = matrix_shape(parts["codes"], "I32")
        groups, out_features = matrix_shape(parts["scales"])
        check_shape(parts["zeros"], (groups, words), "I32")
        check_shape(parts["scales"], (groups, words * 8))
        group = _group(parts["scales"], in_features, groups)
        return _AwqSource(name, (out_features, in_features), 4, False, group, parts)


class GptqTensors(PartsFormat):
    """The method `gptq`, of four and eight bits; and `auto-round`, which packs so."""

    known = frozenset({
        "bits", "group_size", "desc_act", "sym", "lm_head", "dynamic", "damp_percent", "static_groups",
        "true_sequential", "model_name_or_path", "model_file_base_name", "checkpoint_format", "format", "meta",
        "quantizer", "is_marlin_format", "pack_dtype", "backend", "batch_size", "block_name_to_quantize",
        "cache_block_outputs", "dataset", "exllama_config", "max_input_length", "model_seqlen",
        "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id", "tokenizer",
        "use_cuda_fp16", "use_exllama", "disable_exllama", "hyb_act", "act_group_aware", "damp_auto_increment", "mse",
        "autoround_version", "data_type", "enable_quanted_input", "extra_config", "iters", "low_gpu_mem_usage",
        "model_free", "packing_format",
    })  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        for key in ("checkpoint_format", "format"):
            if config.get(key) not in (None, "", "gptq", "gptq_v2"):
                raise self.unsupported(key)
        if config.get("is_marlin_format"):
            raise self.unsupported("is_marlin_format")
        for key, value in (("pack_dtype", "int32"), ("data_type", "int"), ("packing_format", "auto_round:auto_gptq")):
            if config.get(key) not in (None, value):
                raise self.unsupported(key)
        if config.get("bits") not in (4, 8):
            raise self.unsupported("bits")
        second = "gptq_v2" in (config.get("checkpoint_format"), config.get("format"))
        self._made, self._symmetric = _Gptq2Source if second else _GptqSource, config.get("sym") is True

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        order = {"order": ".g_idx"}
        if not self.config.get("desc_act"):  # else without it no column's group is known
            order = self.there(checkpoint, base, **order)
        return {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales", **order}

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        parts = self.parts(checkpoint, name)
        words, out_features = matrix_shape(parts["codes"], "I32")
        groups, _ = matrix_shape(parts["scales"])
        zero_words = matrix_shape(parts["zeros"], "I32")[1]
        bits = zero_words * _WORD_BITS // max(out_features, 1)  # modules of `dynamic` may have other bits
        if bits not in (4, 8):
            raise wrong(parts["zeros"], f"has {zero_words} words for {out_features} out_features, of {bits} bits each")
        in_features = words * _WORD_BITS // bits
        check_shape(parts["zeros"], (groups, out_features * bits // _WORD_BITS), "I32")
        check_shape(parts["scales"], (groups, out_features))
        group = _group(parts["scales"], in_features, groups)
        return _in_order(self._made(name, (out_features, in_features), bits, self._symmetric, group, parts), group)


class CompressedTensors(PartsFormat):
    """The method `compressed-tensors` in its formats of integers, e4m3 and NVFP4."""

    known = frozenset({
        "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio",
        "sparsity_config", "transform_config", "version",
    })  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        for key in ("sparsity_config", "transform_config"):
            if config.get(key):
                raise self.unsupported(key)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping) for each in groups.values() or [None]):
            raise CheckpointError(path, "key 'quantization_config.config_groups'", "missing, or no object of objects")
        for group in (config, *groups.values()):
            if group.get("format") not in (None, *_COMPRESSED, "mixed-precision"):
                reason = f"of {shown(group['format'])}; weights of {', '.join(_COMPRESSED)} are read"
                raise self.unsupported("format", reason)
        for number, group in groups.items():
            self._check_group(str(number), group)
        self._kinds = {group["weights"]["type"] for group in groups.values()}
        integers = [group["weights"] for group in groups.values() if group["weights"]["type"] == "int"]
        self._bits = {each["num_bits"] for each in integers}
        ordered = [each.get("actorder") not in (None, False, "weight", "static") for each in integers]
        self._needed = {
            part for part, by_all in (
                ("zeros", [each.get("symmetric") is False for each in integers]), ("order", ordered),
            ) if by_all and all(by_all)
        }  # fmt: skip

    @property
    def fp8_activations(self) -> bool:
        pairs = ((group["weights"], group.get("input_activations")) for group in self.config["config_groups"].values())
        return all(_is_fp8(weights) and isinstance(inputs, Mapping) and _is_fp8(inputs) for weights, inputs in pairs)

    def _check_group(self, number: str, group: Mapping[str, Any]) -> None:
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise CheckpointError(self.path, f"key 'quantization_config.config_groups.{number}.weights'", "missing")
        kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
        if (kind, bits, strategy) not in _WEIGHTS:
            reason = f"{number} has weights of type {kind}, {bits} bits and strategy {strategy}"
            known = "integers by group or channel, floats of 8 bits by tensor, channel or block, NVFP4, MXFP4, MXFP8"
            raise self.unsupported("config_groups", f"{reason}: {known} are read")
        if strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
            reason = (
                f"{number} has blocks of {weights.get('block_structure')}, and those of {BLOCK} by {BLOCK} are read"
            )
            raise self.unsupported("config_groups", reason)
        if (kind, strategy) == ("float", "group") and weights.get("group_size") != MICRO:
            reason = f"{number} has floats by {weights.get('group_size')} columns, and those by {MICRO} are read"
            raise self.unsupported("config_groups", reason)

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        plain = checkpoint.tensors.get(f"{base}.weight")
        is_of_codes = plain is not None and plain.dtype in ("F8_E4M3", "I8")
        if not is_of_codes and not self.there(checkpoint, base, codes=".weight_packed", scales=".weight_scale"):
            return {}
        own = {"codes": ".weight_packed" if plain is None else ".weight", "scales": ".weight_scale"}
        packed, scales = (checkpoint.tensors.get(base + own[part]) for part in ("codes", "scales"))
        if plain is None and packed is not None and (packed.dtype == "U8" or not self._bits):
            divisor = {"divisor": ".weight_global_scale"}
            if scales is not None and scales.dtype in EXPONENTS:  # those of MXFP4 have none
                divisor = self.there(checkpoint, base, **divisor)
            return own | divisor | self.there(checkpoint, base, inputs=".input_global_scale")
        if plain is not None and plain.dtype == "F8_E4M3":
            return own | self.there(checkpoint, base, inputs=".input_scale")
        shape = {} if plain is not None else {"shape": ".weight_shape"}
        others = self.there(checkpoint, base, inputs=".input_scale", input_zeros=".input_zero_point")
        zeros = {
            part: suffix
            for part, suffix in (("zeros", ".weight_zero_point"), ("order", ".weight_g_idx"))
            if part in self._needed or base + suffix in checkpoint.tensors
        }
        return own | shape | zeros | others

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        parts = self.parts(checkpoint, name)
        codes, scales, zeros = parts["codes"], parts["scales"], parts.get("zeros")
        if not codes.name.endswith("_packed"):
            kind = "float" if codes.dtype == "F8_E4M3" else "int"
            if kind not in self._kinds:
                raise wrong(codes, f"is of type {codes.type_name}, and no group of the configuration is of {kind}")
        if codes.dtype == "F8_E4M3":
            return float_source(name, parts)
        if codes.name.endswith("_packed") and "shape" not in parts:
            return four_bit_source(name, parts)
        if "shape" in parts:
            out_features, words = matrix_shape(codes, "I32")
            bits = self._packed_bits(parts["shape"], words)
            in_features = words * _WORD_BITS // bits
            stated = array_of(parts["shape"], "<i8").tolist()
            if stated != [out_features, in_features]:
                raise wrong(parts["shape"], f"says {stated}, and the codes are of {[out_features, in_features]}")
        else:
            (out_features, in_features), bits = matrix_shape(codes, "I8"), 8
        groups = matrix_shape(scales)[1]
        check_shape(scales, (out_features, groups))
        if zeros is not None:
            packed = (-(-out_features * bits // _WORD_BITS), groups), "I32"
            check_shape(zeros, *(packed if "shape" in parts else ((out_features, groups), "I8")))
        group = _group(scales, in_features, groups)
        return _in_order(_CompressedSource(name, (out_features, in_features), bits, zeros is None, group, parts), group)

    def _packed_bits(self, shape: StoredTensor, words: int) -> int:
        """Those of the configuration; where modules have several, the stored shape tells."""
        check_shape(shape, (2,), "I64")
        if len(self._bits) == 1:
            return int(next(iter(self._bits)))
        in_features = int(array_of(shape, "<i8")[1])
        bits = next((each for each in self._bits if in_features * each == words * _WORD_BITS), None)
        if bits is None:
            raise wrong(shape, f"has {in_features} columns for {words} words of codes")
        return int(bits)


def _is_fp8(numbers: Mapping[str, Any]) -> bool:
    return (numbers.get("type"), numbers.get("num_bits")) == ("float", 8)


def _unpacked(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """uint8 [n, codes] of words [n, m], the lowest bits first."""
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)
    nibbles = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(len(words), -1)


def _group(scales: StoredTensor, in_features: int, groups: int) -> int:
    """Columns that share a scale."""
    if groups < 1 or in_features % groups:
        raise wrong(scales, f"has {groups} groups of {in_features} columns")
    return in_features // groups


def _in_order(source: _IntegerSource, group: int) -> MatrixSource:
    """A matrix as it is where neighbours share a scale, or else (act-order) its weights in float16.

    Kernels read groups of neighbours. Those that take their inputs in the order of a matrix read it sorted.
    """
    order = source.parts.get("order")
    if order is None:
        return source
    check_shape(order, (source.in_features,), "I32")
    places, groups = array_of(order, "<i4"), source.in_features // group
    if places.min(initial=0) < 0 or places.max(initial=0) >= groups:
        raise wrong(order, f"has the groups {places.min()} to {places.max()}, of {groups}")
    if np.array_equal(places, np.arange(source.in_features) // group):
        return source
    out_features = [np.arange(source.out_features)]
    make, pages = partial(_ordered_halves, source, places), Pages(source.parts["codes"])
    made = CopiedSource(GGMLType.F16, source.in_features, out_features, make, source.path, source.name, pages)
    if (np.bincount(places) == group).all():
        by_group = np.argsort(places, kind="stable").astype(np.int32)
        made.ordered = source.sorted_by(by_group), by_group
    return made


def _ordered_halves(
    source: _IntegerSource, order: NDArray[np.int32], out_features: NDArray[np.intp]
) -> NDArray[np.uint8]:
    """The bytes of float16 weights, whose columns have the groups `order`; of rising out_features.

    Raises CheckpointError where a scale is 0 and its numbers are not.
    """
    if not len(out_features):
        return np.empty((0, 2 * source.in_features), np.uint8)
    start, stop = int(out_features[0]), int(out_features[-1]) + 1
    own = out_features - start
    scales, zeros = source.scales(start, stop)[own], source.zeros(start, stop)[own]
    values = source.codes(start, stop)[own].astype(np.float32)
    values -= zeros[:, order]
    if not scales.all() and (silenced := ((values != 0) & (scales == 0)[:, order]).any(axis=1)).any():
        reason = f"a scale of out_feature {out_features[silenced.argmax()]} is 0, and its numbers are not"
        raise wrong(source.parts["scales"], reason)
    values *= scales[:, order]
    with np.errstate(over="ignore"):  # what is infinite is refused as it is loaded
        return values.astype("<f2").view(np.uint8)
