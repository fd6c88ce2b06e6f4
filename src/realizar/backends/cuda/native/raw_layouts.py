"""The layouts whose raw blocks `repack.cu` reads: the one place of this backend that knows formats by their names.

A kernel there is chosen by the macro TYPE_ and the layout's name. Every other layout is packed from its `Planes`.
"""

from __future__ import annotations

from realizar.quantization import ggml_layouts as ggml
from realizar.quantization.layout import WeightLayout

REPACKED_LAYOUTS: tuple[WeightLayout, ...] = (
    ggml.Q4_0, ggml.Q4_1, ggml.Q5_0, ggml.Q5_1, ggml.Q8_0, ggml.Q4_K, ggml.Q5_K, ggml.Q6_K, ggml.IQ4_NL, ggml.IQ4_XS,
    ggml.MXFP4,
)  # fmt: skip
