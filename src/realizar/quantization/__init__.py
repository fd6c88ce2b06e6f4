"""Quantised weights: every ggml type to `Planes`, to float32, and, for some, back. numpy only."""

from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize, to_planes
from realizar.quantization.planes import Planes

__all__ = ["FLOAT_TYPES", "QUANTIZED_TYPES", "Planes", "dequantize", "to_planes"]
