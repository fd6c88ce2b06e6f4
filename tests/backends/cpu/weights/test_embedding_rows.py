"""Rows of the embedding against `dequantize`, bit for bit, for every type: compiled, or through numpy."""

from __future__ import annotations

import numpy as np
import pytest

from realizar.backends.cpu.weights.load import EmbeddingRows
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize
from realizar.quantization.random_blocks import random_blocks

_COMMON = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "Q1_0", "IQ4_NL", "IQ2_S")
_TYPES = [
    pytest.param(ggml_type, id=ggml_type.name, marks=[pytest.mark.full] * (ggml_type.name not in _COMMON))
    for ggml_type in (*FLOAT_TYPES, *QUANTIZED_TYPES)
]


@pytest.mark.parametrize("ggml_type", _TYPES)
@pytest.mark.parametrize("scale", [1.0, 25.298221])
def test_rows_are_dequantised(ggml_type: GGMLType, scale: float) -> None:
    rows, cols = 9, 512
    data = random_blocks(ggml_type, rows, cols, np.random.default_rng(4), 0.02)
    ids = np.array([8, 0, 3, 3], np.int32)
    out = np.full((4, cols + 8), np.float32(7))
    source = block_source(ggml_type, data, rows, cols)
    EmbeddingRows(source).read(ids, scale, out[:, :cols])
    want = dequantize(ggml_type, data, rows, cols)[ids] * np.float32(scale)
    np.testing.assert_array_equal(out[:, :cols], want)
    assert (out[:, cols:] == 7).all()


def test_width_that_is_no_whole_group() -> None:
    weights = np.random.default_rng(5).standard_normal((3, 20)).astype(np.float32)
    out = np.empty((1, 20), np.float32)
    source = block_source(GGMLType.F32, weights.view(np.uint8).reshape(-1), 3, 20)
    EmbeddingRows(source).read(np.array([2], np.int32), 2.0, out)
    np.testing.assert_array_equal(out[0], 2 * weights[2])
