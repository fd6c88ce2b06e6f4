"""The `WeightLayout` of every ggml type that weights can have: one constant each, and a table of all. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.iq_grids import GridName, grid, shifted_iq1_grid
from realizar.quantization.layout import Codebook, FloatType, WeightLayout
from realizar.quantization.microscaling import E2M1_DOUBLED


def _layout(name: str, bits: int, offset: int, group_size: int, **fields: Any) -> WeightLayout:
    kind = GGMLType[name]
    sizes = kind.block_size, kind.type_size
    return WeightLayout(name, *sizes, bits=bits, offset=offset, group_size=group_size, **fields)


def _float_layout(name: str, float_type: FloatType) -> WeightLayout:
    return WeightLayout(name, 1, GGMLType[name].type_size, float_type)


def _grid_layout(name: str, grid_name: GridName, entries: int, vector_size: int, group_size: int) -> WeightLayout:
    book = Codebook(grid_name, entries, vector_size, partial(grid, grid_name))
    bits = (entries - 1).bit_length()
    return _layout(name, bits, 0, group_size, scale="odd4", super_group_size=256, codebook=book, signs=True)


F32 = _float_layout("F32", "f32")
F16 = _float_layout("F16", "f16")
BF16 = _float_layout("BF16", "bf16")
Q4_0 = _layout("Q4_0", 4, 8, 32)
Q4_1 = _layout("Q4_1", 4, 0, 32, minimum=True)
Q5_0 = _layout("Q5_0", 5, 16, 32)
Q5_1 = _layout("Q5_1", 5, 0, 32, minimum=True)
Q8_0 = _layout("Q8_0", 8, 128, 32)
Q1_0 = _layout("Q1_0", 1, 0, 128, minimum=True, centred=True)
Q2_0 = _layout("Q2_0", 2, 1, 64)
Q2_K = _layout("Q2_K", 2, 0, 16, scale="u4", minimum=True, super_group_size=256)
Q3_K = _layout("Q3_K", 3, 4, 16, scale="i8", super_group_size=256)
Q4_K = _layout("Q4_K", 4, 0, 32, scale="u8", minimum=True, super_group_size=256)
Q5_K = _layout("Q5_K", 5, 0, 32, scale="u8", minimum=True, super_group_size=256)
Q6_K = _layout("Q6_K", 6, 32, 16, scale="i8", super_group_size=256)
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""`kvalues_iq4nl` of ggml-common.h."""
_IQ4 = Codebook("iq4", 16, 1, lambda: _IQ4_VALUES)
IQ4_NL = _layout("IQ4_NL", 4, 0, 32, codebook=_IQ4)
IQ4_XS = _layout("IQ4_XS", 4, 0, 32, scale="i8", super_group_size=256, codebook=_IQ4)
_IQ1 = Codebook("iq1", 4096, 8, shifted_iq1_grid)
IQ1_S = _layout("IQ1_S", 12, 0, 32, scale="odd4", super_group_size=256, codebook=_IQ1)
IQ1_M = _layout("IQ1_M", 12, 0, 16, scale="odd4", super_group_size=256, codebook=_IQ1)
IQ2_XXS = _grid_layout("IQ2_XXS", "iq2_xxs", 256, 8, 32)
IQ2_XS = _grid_layout("IQ2_XS", "iq2_xs", 512, 8, 16)
IQ2_S = _grid_layout("IQ2_S", "iq2_s", 1024, 8, 16)
IQ3_XXS = _grid_layout("IQ3_XXS", "iq3_xxs", 256, 4, 32)
IQ3_S = _grid_layout("IQ3_S", "iq3_s", 512, 4, 32)
TQ1_0 = _layout("TQ1_0", 2, 1, 256)
TQ2_0 = _layout("TQ2_0", 2, 1, 256)
_E2M1 = Codebook("e2m1", 16, 1, lambda: E2M1_DOUBLED)
MXFP4 = _layout("MXFP4", 4, 0, 32, scale="e8m0", codebook=_E2M1)
NVFP4 = _layout("NVFP4", 4, 0, 16, scale="e4m3", codebook=_E2M1)

GGML_LAYOUTS: Mapping[GGMLType, WeightLayout] = {
    GGMLType[layout.name]: layout
    for layout in (
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q1_0, Q2_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, IQ1_S,
        IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, TQ1_0, TQ2_0, MXFP4, NVFP4,
    )
}  # fmt: skip
