"""Quantised weights: every ggml type to `Planes` and to float32. numpy only.

Read in this order:

1. `layout.py`, `source.py`: `WeightLayout` and `MatrixSource`, on which backends depend.
2. `planes.py`: `Planes`, the numbers of any layout in one form.
3. `block_source.py`: the sources of ggml blocks and plain numbers.
4. `tensors.py`, `mxfp4_tensors.py`: a checkpoint's tensors as sources, stored as several too.
5. `ggml_layouts.py`, `convert.py`: the layout of each ggml type, and the function that reads its blocks; with
   `iq_grids.py`, `microscaling.py` and `fields.py` for one family or all.
6. `finite.py`, `random_blocks.py`: the search for NaN, and random blocks for generated models.
"""

from realizar.quantization.block_source import FLOAT32_LAYOUT, BlockSource, block_source, float32_source
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize, to_planes
from realizar.quantization.finite import find_not_finite
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.mxfp4_tensors import Mxfp4Tensors
from realizar.quantization.planes import Planes
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import MatrixSource, PlanesSource, random_source
from realizar.quantization.tensors import (
    MATRIX_FORMATS,
    MatrixFormat,
    expert_source,
    is_packed,
    is_stored,
    matrix_format,
    stack_layout,
    stored_names,
    tensor_layout,
    tensor_shape,
    tensor_source,
)

__all__ = [
    "FLOAT32_LAYOUT",
    "FLOAT_TYPES",
    "MATRIX_FORMATS",
    "QUANTIZED_TYPES",
    "BlockSource",
    "Codebook",
    "MatrixFormat",
    "MatrixSource",
    "Mxfp4Tensors",
    "Planes",
    "PlanesSource",
    "WeightLayout",
    "block_source",
    "dequantize",
    "expert_source",
    "find_not_finite",
    "float32_source",
    "is_packed",
    "is_stored",
    "matrix_format",
    "random_blocks",
    "random_source",
    "stack_layout",
    "stored_names",
    "tensor_layout",
    "tensor_shape",
    "tensor_source",
    "to_planes",
]
