"""Quantisers: the simple types against the `gguf` package byte for byte, the K types by their error."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization import QUANTIZABLE_TYPES, dequantize, quantize

K_TYPES = (GGMLType.Q4_K, GGMLType.Q6_K)
TINY_ROW = 7
RELATIVE_ERROR = {
    GGMLType.Q4_0: 0.09,
    GGMLType.Q4_1: 0.08,
    GGMLType.Q5_0: 0.045,
    GGMLType.Q5_1: 0.04,
    GGMLType.Q8_0: 0.006,
    GGMLType.Q4_K: 0.08,
    GGMLType.Q6_K: 0.02,
}


@pytest.fixture(scope="module")
def matrix() -> NDArray[np.float32]:
    """[64, 1024]: mostly Gaussian, with rows of zeros, of one value, of few values, tiny and huge ones."""
    weights = np.random.default_rng(0).standard_normal((64, 1024), dtype=np.float32)
    weights[3], weights[4], weights[5] = 0, 1, -2
    weights[6, ::2] = 0
    weights[TINY_ROW] *= np.float32(1e-6)
    weights[8] *= np.float32(1e3)
    weights[9] = np.abs(weights[9])
    weights[10] = -np.abs(weights[10])
    weights[11] = np.rint(weights[11] * 2)
    return weights


@pytest.mark.parametrize("ggml_type", [t for t in QUANTIZABLE_TYPES if t not in K_TYPES], ids=lambda t: t.name)
def test_same_bytes_as_the_reference(ggml_type: GGMLType, matrix: NDArray[np.float32]) -> None:
    expected = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType(ggml_type.value))
    assert np.array_equal(quantize(ggml_type, matrix), expected.reshape(-1))


@pytest.mark.parametrize("ggml_type", QUANTIZABLE_TYPES, ids=lambda t: t.name)
def test_error(ggml_type: GGMLType) -> None:
    weights = np.random.default_rng(1).standard_normal((64, 1024), dtype=np.float32)
    error = dequantize(ggml_type, quantize(ggml_type, weights), 64, 1024) - weights
    assert np.sqrt(np.square(error).mean()) < RELATIVE_ERROR[ggml_type]


@pytest.mark.parametrize("ggml_type", K_TYPES, ids=lambda t: t.name)
def test_every_weight_is_within_its_step(ggml_type: GGMLType, matrix: NDArray[np.float32]) -> None:
    """Half a step of the group, and what rounding scale and minimum to small integers adds."""
    kept = np.delete(matrix, TINY_ROW, axis=0)  # its scale over 63 or 128 is below the smallest half float
    got = dequantize(ggml_type, quantize(ggml_type, kept), 63, 1024)
    blocks = kept.reshape(-1, 256)
    span = np.abs(blocks).max(axis=1, keepdims=True)
    allowed = span * (2 / 15 if ggml_type is GGMLType.Q4_K else 1 / 24) + np.float32(1e-6)
    assert (np.abs(got.reshape(-1, 256) - blocks) <= allowed).all()


@pytest.mark.parametrize("ggml_type", K_TYPES, ids=lambda t: t.name)
def test_values_on_the_lattice_come_back_exactly(ggml_type: GGMLType) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (4, 8, 32)) if ggml_type is GGMLType.Q4_K else rng.integers(-32, 32, (4, 16, 16))
    codes[..., 0] = 15 if ggml_type is GGMLType.Q4_K else -32  # each group shows its whole scale
    if ggml_type is GGMLType.Q4_K:
        codes[..., 1] = 0
        scales, minima = rng.integers(1, 64, (4, 8, 1)), rng.integers(1, 64, (4, 8, 1))
        scales[:, 0], minima[:, 0] = 63, 63
        weights = 0.5 * scales * codes - 0.25 * minima
    else:
        scales = rng.integers(1, 127, (4, 16, 1))
        scales[:, 0] = -128
        weights = 0.5 * scales * codes
    weights = weights.reshape(4, 256).astype(np.float32)
    assert np.array_equal(dequantize(ggml_type, quantize(ggml_type, weights), 4, 256), weights)


def test_refusals() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ3_S"):
        quantize(GGMLType.IQ3_S, np.zeros((1, 256), dtype=np.float32))
    with pytest.raises(ValueError, match="Q4_K"):
        quantize(GGMLType.Q4_K, np.zeros((8, 32), dtype=np.float32))
