"""From raw ggml blocks to `Planes` or float32, for every type that weights can have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization import iq_linear, iq_vector, k_quants, legacy, microscaling, ternary
from realizar.quantization.fields import Bytes
from realizar.quantization.planes import Planes

_FAMILIES: dict[GGMLType, Callable[[Bytes], Planes]] = {
    GGMLType.Q4_0: legacy.q4_0,
    GGMLType.Q4_1: legacy.q4_1,
    GGMLType.Q5_0: legacy.q5_0,
    GGMLType.Q5_1: legacy.q5_1,
    GGMLType.Q8_0: legacy.q8_0,
    GGMLType.Q1_0: legacy.q1_0,
    GGMLType.Q2_0: legacy.q2_0,
    GGMLType.Q2_K: k_quants.q2_k,
    GGMLType.Q3_K: k_quants.q3_k,
    GGMLType.Q4_K: k_quants.q4_k,
    GGMLType.Q5_K: k_quants.q5_k,
    GGMLType.Q6_K: k_quants.q6_k,
    GGMLType.IQ4_NL: iq_linear.iq4_nl,
    GGMLType.IQ4_XS: iq_linear.iq4_xs,
    GGMLType.IQ1_S: iq_vector.iq1_s,
    GGMLType.IQ1_M: iq_vector.iq1_m,
    GGMLType.IQ2_XXS: iq_vector.iq2_xxs,
    GGMLType.IQ2_XS: iq_vector.iq2_xs,
    GGMLType.IQ2_S: iq_vector.iq2_s,
    GGMLType.IQ3_XXS: iq_vector.iq3_xxs,
    GGMLType.IQ3_S: iq_vector.iq3_s,
    GGMLType.TQ1_0: ternary.tq1_0,
    GGMLType.TQ2_0: ternary.tq2_0,
    GGMLType.MXFP4: microscaling.mxfp4,
    GGMLType.NVFP4: microscaling.nvfp4,
}

QUANTIZED_TYPES: tuple[GGMLType, ...] = tuple(_FAMILIES)
"""The types that `to_planes` takes. Q8_1 and Q8_K are activations' formats and never lie in a file."""

FLOAT_TYPES: tuple[GGMLType, ...] = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
"""The types that `dequantize` takes besides."""

_CHUNK_WEIGHTS = 1 << 20


def to_planes(ggml_type: GGMLType, data: NDArray[np.uint8], out_features: int, cols: int) -> Planes:
    """The exact `Planes` of a quantised matrix.

    Args:
        ggml_type: one of `QUANTIZED_TYPES`.
        data: uint8 [size in bytes], the out_features one after another, contiguous.
        out_features, cols: its shape; `cols` is a whole number of blocks.

    Raises:
        UnsupportedModelError: for a type whose weights are not integer codes.
        ValueError: where `data` is not of the size that the shape asks for.
    """
    family = _FAMILIES.get(ggml_type)
    if family is None:
        raise UnsupportedModelError(f"weights of type {ggml_type.name} are not quantised codes")
    return family(_as_blocks(ggml_type, data, out_features, cols))


def dequantize(ggml_type: GGMLType, data: NDArray[np.uint8], out_features: int, cols: int) -> NDArray[np.float32]:
    """The weights as ggml's reference dequantisation gives them: float32 [out_features, cols], a new array.

    Takes `QUANTIZED_TYPES` and `FLOAT_TYPES`; arguments and errors as in `to_planes`. Works in runs of out_features, so
    that it needs little memory beside the result.
    """
    if ggml_type in FLOAT_TYPES:
        return _floats(ggml_type, _as_blocks(ggml_type, data, out_features, cols))
    weights = np.empty((out_features, cols), dtype=np.float32)
    step = max(1, _CHUNK_WEIGHTS // max(cols, 1))
    row_bytes = data.size // max(out_features, 1)
    _as_blocks(ggml_type, data, out_features, cols)
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        part = data[start * row_bytes : stop * row_bytes]
        weights[start:stop] = to_planes(ggml_type, part, stop - start, cols).dequantize()
    return weights


def _as_blocks(ggml_type: GGMLType, data: NDArray[np.uint8], out_features: int, cols: int) -> Bytes:
    """uint8 [out_features, blocks, type_size]."""
    blocks, rest = divmod(cols, ggml_type.block_size)
    if rest or data.size != out_features * blocks * ggml_type.type_size:
        raise ValueError(f"{data.size} bytes are not {out_features} output features of {cols} {ggml_type.name} weights")
    return data.reshape(out_features, blocks, ggml_type.type_size)


def _floats(ggml_type: GGMLType, elements: Bytes) -> NDArray[np.float32]:
    """uint8 [out_features, cols, bytes of a number] -> float32 [out_features, cols]."""
    out_features, cols, _ = elements.shape
    flat = np.ascontiguousarray(elements).reshape(out_features, -1)
    if ggml_type is GGMLType.BF16:
        high = flat.view("<u2").reshape(out_features, cols).astype(np.uint32) << np.uint32(16)
        return high.view(np.float32)
    return flat.view("<f4" if ggml_type is GGMLType.F32 else "<f2").reshape(out_features, cols).astype(np.float32)
