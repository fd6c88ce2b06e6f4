"""Quantised weights: every ggml type to `Planes`, to float32, and, for some, back. numpy only.

Backends take weights as a `MatrixSource`, whose `WeightLayout` says how they are stored.
"""

from realizar.quantization.block_source import BlockSource, block_source, expert_source, tensor_layout, tensor_source
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize, to_planes
from realizar.quantization.finite import find_not_finite
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.planes import Planes
from realizar.quantization.planes_source import PlanesSource, random_source
from realizar.quantization.quantize import QUANTIZABLE_TYPES, quantize
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import MatrixSource

__all__ = [
    "FLOAT_TYPES",
    "QUANTIZABLE_TYPES",
    "QUANTIZED_TYPES",
    "BlockSource",
    "Codebook",
    "MatrixSource",
    "Planes",
    "PlanesSource",
    "WeightLayout",
    "block_source",
    "dequantize",
    "expert_source",
    "find_not_finite",
    "quantize",
    "random_blocks",
    "random_source",
    "tensor_layout",
    "tensor_source",
    "to_planes",
]
