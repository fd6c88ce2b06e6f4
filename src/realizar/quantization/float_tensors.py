"""Floats of eight bits (e4m3) with a scale a tensor, an out_feature or a block, as safetensors store them. numpy only.

A weight is `scale * number`. `weight` [out_features, in_features] has the numbers; `weight_scale_inv`, or
`weight_scale` of compressed-tensors, the scales, whose shape tells what shares one: all, with one scale; an
out_feature, [out_features] or [out_features, 1]; a block, [out_features / 128, in_features / 128], rounded up.
Activations stay as they are: a scale of inputs that a file holds is not read.

Sources: transformers' `finegrained_fp8`, compressed-tensors' `naive_quantized`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.naming import shown
from realizar.errors import UnsupportedModelError
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.microscaling import e4m3
from realizar.quantization.parts import (
    GROUPS,
    Parts,
    PartsFormat,
    PartsSource,
    array_of,
    floats_of,
    matrix_shape,
    wrong,
)
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

E4M3 = Codebook("e4m3", 256, 1, e4m3, floats=True)
_BLOCK = 128
_NAN = np.uint8(0x7F)
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
        shape, shared = (-(-out_features // _BLOCK), -(-in_features // _BLOCK)), (_BLOCK, _BLOCK)
        if scales.shape != shape:
            reason = f"has the shape {scales.shape}, and the weights {(out_features, in_features)}: not one for each"
            raise wrong(scales, f"{reason} block of {_BLOCK} by {_BLOCK}, out_feature or tensor")
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
        self._rows, self._columns = shared

    def planes(self, start: int, stop: int) -> Planes:
        group = self.layout.group_size
        first, last = start // self._rows, -(-stop // self._rows)
        rows, columns = np.arange(start, stop) // self._rows - first, np.arange(0, self.in_features, group)
        scales = floats_of(self.parts["scales"], np.s_[first:last])
        return Planes(self.layout, self._codes(start, stop), scales[rows[:, None], columns // self._columns])

    def find_not_finite(self, start: int, stop: int) -> str | None:
        bad = ((self._codes(start, stop) & _NAN) == _NAN).any(axis=1)
        if bad.any():
            return f"a number of out_feature {start + int(np.flatnonzero(bad)[0])} is not finite"
        return super().find_not_finite(start, stop)

    def _codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        codes: NDArray[np.uint8] = array_of(self.parts["codes"], np.uint8)[start:stop]
        return codes


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
        if config.get("weight_block_size") not in (None, [_BLOCK, _BLOCK]):
            raise self.unsupported("weight_block_size")

    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        scales = next((each for each in _SCALES if base + each in checkpoint.tensors), None)
        codes = checkpoint.tensors.get(f"{base}.weight")
        if scales is None and (codes is None or codes.dtype != "F8_E4M3"):
            return {}
        others = {"inputs": ".input_scale", "activations": ".activation_scale"}
        there = {part: suffix for part, suffix in others.items() if base + suffix in checkpoint.tensors}
        return {"codes": ".weight", "scales": scales or _SCALES[0], **there}

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        return float_source(name, self.parts(checkpoint, name))
