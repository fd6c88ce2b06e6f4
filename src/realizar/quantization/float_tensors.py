"""Floats of eight bits (e4m3) and of four (NVFP4) with their scales, as safetensors store them. numpy only.

- e4m3: a weight is `scale * number`. `weight` [out_features, in_features] has the numbers; `weight_scale_inv` of `fp8`,
  or `weight_scale`, the scales, whose shape tells what shares one: all, with one scale; an out_feature, [out_features]
  or [out_features, 1]; a block, [out_features / 128, in_features / 128], rounded up; 32 columns (MXFP8), [out_features,
  in_features / 32], of exponents. Experts of a layer may be one tensor, [experts, out_features, in_features], with
  `_scale_inv` behind its name for [experts, ...] scales, of blocks or one each.
- NVFP4: a weight is `scale * number`, and a scale one of 16 columns, in e4m3, times that of the matrix. `weight_packed`
  of compressed-tensors, whose `weight_global_scale` [1] is what that scale divides by, or `weight` of ModelOpt, whose
  `weight_scale_2` [] is what multiplies: uint8 [out_features, in_features / 2], the lower half of a byte first; and
  `weight_scale` [out_features, in_features / 16].
- MXFP4: the same codes with `weight_scale` [out_features, in_features / 32] of exponents alone.

Exponents are of E8M0, which files call uint8 too.

Scales of activations that a file holds are not read: activations in FP8 have the scales of their own values.

Sources: transformers' `finegrained_fp8`; compressed-tensors' `naive_quantized`, `nvfp4_quantized`; ModelOpt's
`nvfp4_tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.fields import bit_fields
from realizar.quantization.ggml_layouts import NVFP4
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.microscaling import e4m3, e8m0
from realizar.quantization.mxfp4_tensors import mxfp4_source
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
    number_of,
    wrong,
)
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

E4M3 = Codebook("e4m3", 256, 1, e4m3, floats=True)
_NVFP4 = replace(NVFP4, name="NVFP4 by float16", block_size=16, block_bytes=10, scale="f16")
BLOCK = 128
MICRO = 32
"""Columns that share an exponent."""
EXPONENTS = ("F8_E8M0", "U8")
_SCALES = (".weight_scale_inv", ".weight_scale")


def e4m3_layout(group: int) -> WeightLayout:
    """Of numbers whose scales are shared by `group` columns."""
    return WeightLayout(f"E4M3 by {group}", group, group + 4, bits=8, group_size=group, scale="f32", codebook=E4M3)


def float_source(name: str, parts: Parts) -> MatrixSource:
    """The matrix, or the stack of them, of `codes` and `scales`; raises as `MatrixFormat.source` does."""
    codes, scales = parts["codes"], parts["scales"]
    experts = codes.shape[:1] if len(codes.shape) == 3 else ()
    out_features, in_features = matrix_shape(replace(codes, shape=codes.shape[len(experts) :]), "F8_E4M3")
    shapes = {
        (1, 1): (out_features, in_features),
        (-(-out_features // BLOCK), -(-in_features // BLOCK)): (BLOCK, BLOCK),
        (out_features, 1): (1, in_features),
        (out_features, in_features // MICRO if scales.dtype in EXPONENTS else 0): (1, MICRO),
    }
    given = scales.shape[len(experts) :] if scales.shape[: len(experts)] == experts else ()
    shape = (1, 1) if math.prod(scales.shape) == math.prod(experts) else (*given, 1) if len(given) == 1 else given
    if shape not in shapes:
        reason = f"has the shape {scales.shape}, and the weights {codes.shape}: not one for each"
        raise wrong(scales, f"{reason} block of {BLOCK} by {BLOCK}, {MICRO} columns (exponents), out_feature or tensor")
    shared = shapes[shape]
    table = replace(scales, shape=(math.prod(experts) * shape[0], shape[1]))
    if scales.dtype not in EXPONENTS or (scales.dtype == "U8" and shared != (1, MICRO)):
        matrix_shape(table)
    group = next((each for each in GROUPS if in_features % each == 0 and shared[1] % each == 0), 0)
    if not group:
        reason = f"has {in_features} columns, which are not a multiple of {GROUPS[-1]}"
        raise UnsupportedModelError(f"{codes.path}: tensor {shown(codes.name)} {reason}")
    whole = math.prod(experts) * out_features, in_features
    return _FloatSource(e4m3_layout(group), whole, name, {**parts, "scales": table}, shared, out_features)


class _FloatSource(PartsSource):
    """`shared`: out_features and columns that share a scale. `each`: out_features of a matrix of a stack, or all."""

    def __init__(
        self, layout: WeightLayout, shape: tuple[int, int], name: str, parts: Parts, shared: tuple[int, int], each: int
    ) -> None:
        super().__init__(layout, *shape, name, parts)
        self._rows, self._columns, self._each = max(shared[0], 1), shared[1], max(each, 1)

    def planes(self, start: int, stop: int) -> Planes:
        rows = self._scale_rows(np.arange(start, stop))
        first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        columns = np.arange(0, self.in_features, self.layout.group_size) // self._columns
        scales = scales_of(self.parts["scales"], np.s_[first:last])[rows[:, None] - first, columns]
        codes = self.parts["codes"].data.view(np.uint8).reshape(-1, self.in_features)[start:stop]
        return Planes(self.layout, codes, scales)

    def _scale_rows(self, out_features: NDArray[np.intp]) -> NDArray[np.intp]:
        matrix, within = np.divmod(out_features, self._each)
        rows: NDArray[np.intp] = matrix * -(-self._each // self._rows) + within // self._rows
        return rows


def scales_of(stored: StoredTensor, part: Any) -> NDArray[np.float32]:
    """Scales by their index, of floats or exponents."""
    if stored.dtype not in EXPONENTS:
        return floats_of(stored, part)
    values: NDArray[np.float32] = e8m0()[array_of(stored, np.uint8)[part]]
    return values


def four_bit_source(name: str, parts: Parts) -> MatrixSource:
    """The matrix of `codes`, `scales`, and for NVFP4 a `divisor` or `factor`; raises as `MatrixFormat.source` does."""
    return nvfp4_source(name, parts) if {"divisor", "factor"} & set(parts) else _mxfp4_matrix(name, parts)


def _mxfp4_matrix(name: str, parts: Parts) -> MatrixSource:
    codes, scales = parts["codes"], parts["scales"]
    out_features, halved = matrix_shape(codes, "U8")
    if 2 * halved % MICRO:
        raise wrong(codes, f"has {2 * halved} columns, which are not a multiple of {MICRO}")
    if scales.dtype not in EXPONENTS:
        raise wrong(scales, f"is of type {scales.type_name}, and not of exponents ({' or '.join(EXPONENTS)})")
    check_shape(scales, (out_features, 2 * halved // MICRO))
    return mxfp4_source(name, codes, scales)


def nvfp4_source(name: str, parts: Parts) -> MatrixSource:
    """The matrix of `codes`, `scales` and a `divisor` or `factor`; raises as `MatrixFormat.source` does."""
    codes, scales = parts["codes"], parts["scales"]
    out_features, halved = matrix_shape(codes, "U8")
    if halved % 8:
        raise wrong(codes, f"has {2 * halved} columns, which are not a multiple of 16")
    check_shape(scales, (out_features, halved // 8), "F8_E4M3")
    whole = parts["divisor" if "divisor" in parts else "factor"]
    if math.prod(whole.shape) != 1 or whole.dtype != "F32":
        raise wrong(whole, f"is of type {whole.type_name} and shape {whole.shape}, and not one number of F32")
    return _Nvfp4Source(_NVFP4, out_features, 2 * halved, name, parts)


class _Nvfp4Source(PartsSource):
    def planes(self, start: int, stop: int) -> Planes:
        """Raises CheckpointError where the scale of the matrix is no finite number above 0."""
        codes = array_of(self.parts["codes"], np.uint8)[start:stop]
        factor = self._factor() / 2  # codes are doubled
        scales = e4m3()[array_of(self.parts["scales"], np.uint8)[start:stop]] * factor
        return Planes(self.layout, bit_fields(codes, 4, 1), finite_in_halves(scales))

    def _factor(self) -> np.float32:
        divides = "divisor" in self.parts
        value = number_of(self.parts["divisor" if divides else "factor"])
        return np.float32(1 / value if divides else value)


class Fp8Tensors(PartsFormat):
    """The method `fp8`, and `mxfp8`, which is its form with an exponent for 32 columns."""

    known = frozenset({
        "activation_scheme", "dequantize", "expert_dtype", "fmt", "ignored_layers", "kv_cache_scheme",
        "modules_to_not_convert",
        "scale_fmt", "weight_block_size",
    })  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        for key, values in (
            ("fmt", ("e4m3",)), ("expert_dtype", ("fp8",)), ("scale_fmt", ("float", "ue8m0")),
            ("weight_block_size", ([BLOCK, BLOCK], [1, MICRO])),
        ):  # fmt: skip
            if config.get(key) not in (None, *values):
                raise self.unsupported(key)

    @property
    def fp8_activations(self) -> bool:
        return not self.config.get("dequantize")

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        if (stack := checkpoint.tensors.get(base)) is not None and stack.dtype == "F8_E4M3":
            return {"codes": "", "scales": "_scale_inv", **self.there(checkpoint, base, inputs="_activation_scale")}
        scales = next((each for each in _SCALES if base + each in checkpoint.tensors), None)
        codes = checkpoint.tensors.get(f"{base}.weight")
        if scales is None and (codes is None or codes.dtype != "F8_E4M3"):
            return {}
        others = self.there(checkpoint, base, inputs=".input_scale", activations=".activation_scale")
        return {"codes": ".weight", "scales": scales or _SCALES[0], **others}

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        codes = self.parts(checkpoint, name)["codes"]
        return codes.shape if len(codes.shape) == 3 else super().shape(checkpoint, name)

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        return float_source(name, self.parts(checkpoint, name))


_MIXED = "MIXED_PRECISION"
_ALGORITHMS: Mapping[str, str] = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8"), "F8_E4M3"),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"), "U8"),
}
"""The type of the codes of each of ModelOpt's algorithms that are read."""
_IN_FP8 = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"})
_SCALED_INPUTS = frozenset({"NVFP4_AWQ", "NVFP4_SVD", "W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL"})


class ModelOptTensors(PartsFormat):
    """The method `modelopt` of matrices in e4m3, NVFP4 and MXFP4, all in one of these or each as `quantized_layers`
    says of its module, or of one that has it.
    """

    known = frozenset({
        "config_groups", "exclude_modules", "group_size", "ignore", "kv_cache_quant_algo", "kv_cache_scheme",
        "producer", "quant_algo", "quantized_layers",
    })  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path, key: str = "quantization_config") -> None:
        super().__init__(config, path, key)
        whole, self._layers = config.get("quant_algo"), {}
        if whole != _MIXED:
            self._check(whole, "quant_algo")
            self._named = {whole}
            return
        layers = config.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values() or [None]):
            raise CheckpointError(path, f"key '{key}.quantized_layers'", "missing, or no object of objects")
        for name, each in layers.items():
            self._check(each.get("quant_algo"), "quantized_layers", f" for {shown(name)}")
            self._layers[name] = str(each["quant_algo"])
        self._named = set(self._layers.values())

    def _check(self, algorithm: Any, key: str, where: str = "") -> None:
        if algorithm in _SCALED_INPUTS:
            raise self.unsupported(key, f"{algorithm}{where}: inputs with scales of their own are not read")
        if algorithm not in _ALGORITHMS:
            raise self.unsupported(key, f"unsupported value {algorithm!r:.40}{where}")

    @property
    def fp8_activations(self) -> bool:
        return self._named <= _IN_FP8

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        codes = checkpoint.tensors.get(f"{base}.weight")
        scales = next((each for each in _SCALES if base + each in checkpoint.tensors), None)
        if scales is None and (codes is None or codes.ggml_type is not None):
            return {}
        kind = checkpoint.tensors.get(f"{base}.weight_scale")
        micro = codes is not None and codes.dtype == "U8" and kind is not None and kind.dtype in EXPONENTS
        factor = {"factor": ".weight_scale_2"} if codes is not None and codes.dtype == "U8" and not micro else {}
        inputs = self.there(checkpoint, base, inputs=".input_scale")
        return {"codes": ".weight", "scales": scales or _SCALES[1], **factor, **inputs}

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        parts = self.parts(checkpoint, name)
        codes, algorithm = parts["codes"], self._of_module(name.removesuffix(".weight"))
        if algorithm is not None and codes.dtype != _ALGORITHMS[algorithm]:
            raise wrong(codes, f"is of type {codes.type_name}, and {self.path.name} names {algorithm} for it")
        return four_bit_source(name, parts) if codes.dtype == "U8" else float_source(name, parts)

    def check(self, checkpoint: Checkpoint) -> None:
        super().check(checkpoint)
        for name, algorithm in self._layers.items():
            plain = checkpoint.tensors.get(f"{name}.weight")
            if plain is not None and not self.tensors(checkpoint, plain.name):
                raise wrong(plain, f"is of type {plain.type_name}, and {self.path.name} names {algorithm} for it")

    def _of_module(self, name: str) -> str | None:
        while name and name not in self._layers:
            name = name.rpartition(".")[0]
        return self._layers.get(name)
