"""Quantised weights: every ggml type to `Planes`, to float32, and, for some, back. numpy only.

Backends take weights as a `MatrixSource`, whose `WeightLayout` says how they are stored.

Read in this order:

1. `layout.py`, `source.py`: `WeightLayout` and `MatrixSource`, on which backends depend.
2. `planes.py`: `Planes`, the numbers of any layout in one form.
3. `block_source.py`, `planes_source.py`: the sources of a checkpoint's tensors, and of matrices made in memory.
4. `ggml_layouts.py`, `convert.py`: the layout of each ggml type, and the function that reads its blocks.
5. `legacy.py`, `k_quants.py`, `iq_linear.py`, `iq_vector.py` with `iq_grids.py`, `ternary.py`, `microscaling.py`: one
   family of ggml types each; `fields.py` reads the fields of their blocks.
6. `finite.py`, `quantize.py`, `random_blocks.py`: the search for NaN, float32 to blocks, and blocks for tests.
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
