"""Floats of eight bits (e4m3) and of four (NVFP4) with their scales, as safetensors store them. numpy only.

- e4m3: a weight is `scale * number`. `weight` [out_features, in_features] has the numbers; `weight_scale_inv` of `fp8`,
  or `weight_scale`, the scales, whose shape tells what shares one: all, with one scale; an out_feature, [out_features]
  or [out_features, 1]; a block, [out_features / 128, in_features / 128], rounded up.
- NVFP4: a weight is `scale * number`, and a scale one of 16 columns, in e4m3, times that of the matrix. `weight_packed`
  of compressed-tensors, whose `weight_global_scale` [1] is what that scale divides by, or `weight` of ModelOpt, whose
  `weight_scale_2` [] is what multiplies: uint8 [out_features, in_features / 2], the lower half of a byte first; and
  `weight_scale` [out_features, in_features / 16]. Scales are rounded to float16.

Scales of activations, keys and values that a file holds are not read: activations in FP8 have the scales of their own
values, and keys and values stay as they are.

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

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.naming import shown
from realizar.errors import UnsupportedModelError
from realizar.quantization.fields import bit_fields
from realizar.quantization.ggml_layouts import NVFP4
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.microscaling import e4m3
from realizar.quantization.parts import (
    GROUPS,
    Parts,
    PartsFormat,
    PartsSource,
    array_of,
    check_shape,
    floats_of,
    matrix_shape,
    wrong,
)
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

E4M3 = Codebook("e4m3", 256, 1, e4m3, floats=True)
_NVFP4 = replace(NVFP4, name="NVFP4 by float16", block_size=16, block_bytes=10, scale="f16")
BLOCK = 128
_SCALES = (".weight_scale_inv", ".weight_scale")


def e4m3_layout(group: int) -> WeightLayout:
    """Of numbers whose scales are shared by `group` columns."""
    return WeightLayout(f"E4M3 by {group}", group, group + 4, bits=8, group_size=group, scale="f32", codebook=E4M3)


def float_source(name: str, parts: Parts) -> MatrixSource:
    """The matrix of `codes` and `scales`; raises as `MatrixFormat.source` does."""
    codes, scales = parts["codes"], parts["scales"]
    out_features, in_features = matrix_shape(codes, "F8_E4M3")
    if math.prod(scales.shape) == 1:
        shape, shared = (1, 1), (out_features, in_features)
    elif scales.shape in ((out_features,), (out_features, 1)):
        shape, shared = (out_features, 1), (1, in_features)
    else:
        shape, shared = (-(-out_features // BLOCK), -(-in_features // BLOCK)), (BLOCK, BLOCK)
        if scales.shape != shape:
            reason = f"has the shape {scales.shape}, and the weights {(out_features, in_features)}: not one for each"
            raise wrong(scales, f"{reason} block of {BLOCK} by {BLOCK}, out_feature or tensor")
    table = replace(scales, shape=shape)
    matrix_shape(table)
    group = next((each for each in GROUPS if in_features % each == 0), 0)
    if not group:
        reason = f"has {in_features} columns, which are not a multiple of {GROUPS[-1]}"
        raise UnsupportedModelError(f"{codes.path}: tensor {shown(codes.name)} {reason}")
    return _FloatSource(e4m3_layout(group), (out_features, in_features), name, {**parts, "scales": table}, shared)


class _FloatSource(PartsSource):
    """`shared`: out_features and columns that share a scale."""

    def __init__(
        self, layout: WeightLayout, shape: tuple[int, int], name: str, parts: Parts, shared: tuple[int, int]
    ) -> None:
        super().__init__(layout, *shape, name, parts)
        self._rows, self._columns = max(shared[0], 1), shared[1]

    def planes(self, start: int, stop: int) -> Planes:
        group = self.layout.group_size
        first, last = start // self._rows, -(-stop // self._rows)
        rows, columns = np.arange(start, stop) // self._rows - first, np.arange(0, self.in_features, group)
        scales = floats_of(self.parts["scales"], np.s_[first:last])
        codes = array_of(self.parts["codes"], np.uint8)[start:stop]
        return Planes(self.layout, codes, scales[rows[:, None], columns // self._columns])


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
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            halves = scales.astype(np.float16).astype(np.float32)
        return Planes(self.layout, bit_fields(codes, 4, 1), halves)

    def _factor(self) -> np.float32:
        divides = "divisor" in self.parts
        whole = self.parts["divisor" if divides else "factor"]
        value = float(array_of(whole, "<f4").reshape(()))
        if not math.isfinite(value) or value <= 0:
            raise wrong(whole, f"is {value}, and not a finite number above 0")
        return np.float32(1 / value if divides else value)


class Fp8Tensors(PartsFormat):
    """The method `fp8`."""

    known = frozenset({
        "activation_scheme", "dequantize", "fmt", "ignored_layers", "modules_to_not_convert", "scale_fmt",
        "weight_block_size",
    })  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        if config.get("fmt") not in (None, "e4m3"):
            raise self.unsupported("fmt")
        if config.get("weight_block_size") not in (None, [BLOCK, BLOCK]):
            raise self.unsupported("weight_block_size")

    @property
    def fp8_activations(self) -> bool:
        return not self.config.get("dequantize")

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        scales = next((each for each in _SCALES if base + each in checkpoint.tensors), None)
        codes = checkpoint.tensors.get(f"{base}.weight")
        if scales is None and (codes is None or codes.dtype != "F8_E4M3"):
            return {}
        others = self.there(checkpoint, base, inputs=".input_scale", activations=".activation_scale")
        return {"codes": ".weight", "scales": scales or _SCALES[0], **others}

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        return float_source(name, self.parts(checkpoint, name))


class ModelOptTensors(PartsFormat):
    """The method `modelopt` of matrices in FP8, with a scale a tensor, and in NVFP4."""

    known = frozenset({
        "config_groups", "exclude_modules", "group_size", "ignore", "kv_cache_quant_algo", "kv_cache_scheme",
        "producer", "quant_algo",
    })  # fmt: skip

    def __init__(self, config: Mapping[str, Any], path: Path, key: str = "quantization_config") -> None:
        super().__init__(config, path, key)
        if config.get("quant_algo") not in ("FP8", "NVFP4"):
            raise self.unsupported("quant_algo")

    @property
    def fp8_activations(self) -> bool:
        return bool(self.config["quant_algo"] == "FP8")

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        codes = checkpoint.tensors.get(f"{base}.weight")
        if f"{base}.weight_scale" not in checkpoint.tensors and (codes is None or codes.ggml_type is not None):
            return {}
        factor = {"factor": ".weight_scale_2"} if codes is not None and codes.dtype == "U8" else {}
        inputs = self.there(checkpoint, base, inputs=".input_scale")
        return {"codes": ".weight", "scales": ".weight_scale", **factor, **inputs}

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        parts = self.parts(checkpoint, name)
        return nvfp4_source(name, parts) if "factor" in parts else float_source(name, parts)
