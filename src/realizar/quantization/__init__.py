"""Quantised weights: every ggml type to `Planes`, to float32, and, for some, back. numpy only."""

from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize, to_planes
from realizar.quantization.finite import find_not_finite
from realizar.quantization.planes import Planes
from realizar.quantization.quantize import QUANTIZABLE_TYPES, quantize
from realizar.quantization.random_blocks import random_blocks

__all__ = [
    "FLOAT_TYPES",
    "QUANTIZABLE_TYPES",
    "QUANTIZED_TYPES",
    "Planes",
    "dequantize",
    "find_not_finite",
    "quantize",
    "random_blocks",
    "to_planes",
]
