"""Random weights: valid, of the deviation asked for, the same from the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize, to_planes
from realizar.quantization.random_blocks import random_blocks

ALL_TYPES = (*QUANTIZED_TYPES, *FLOAT_TYPES)


@pytest.mark.parametrize("std", [0.5, 0.0156, 0.003])
@pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
def test_deviation_and_mean(ggml_type: GGMLType, std: float) -> None:
    data = random_blocks(ggml_type, 512, 1024, np.random.default_rng(0), std)
    weights = dequantize(ggml_type, data, 512, 1024)
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(std, rel=0.04)
    assert abs(weights.mean()) < 0.02 * std
    assert np.abs(weights).max() < 7 * std


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda t: t.name)
def test_every_code_occurs(ggml_type: GGMLType) -> None:
    planes = to_planes(ggml_type, random_blocks(ggml_type, 512, 1024, np.random.default_rng(1), 0.02), 512, 1024)
    codes = 3 if ggml_type is GGMLType.TQ1_0 else 2**planes.layout.bits
    assert len(np.unique(planes.codes)) == codes


@pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
def test_seeded(ggml_type: GGMLType) -> None:
    first = random_blocks(ggml_type, 3, 512, np.random.default_rng(5), 0.02)
    assert first.dtype == np.uint8
    assert first.shape == (3 * 512 // ggml_type.block_size * ggml_type.type_size,)
    assert np.array_equal(first, random_blocks(ggml_type, 3, 512, np.random.default_rng(5), 0.02))
    assert not np.array_equal(first, random_blocks(ggml_type, 3, 512, np.random.default_rng(6), 0.02))


@pytest.mark.parametrize("ggml_type", [GGMLType.Q2_K, GGMLType.Q4_K, GGMLType.Q5_K], ids=lambda t: t.name)
def test_centred_sub_blocks_have_a_mean_near_zero(ggml_type: GGMLType) -> None:
    """No direction of inputs is then multiplied much more than the others: Gaussian numbers would give 1.5."""
    size = 16 if ggml_type is GGMLType.Q2_K else 32
    largest = []
    for centred in (False, True):
        data = random_blocks(ggml_type, 256, 1024, np.random.default_rng(0), 1024**-0.5, centred=centred)
        weights = dequantize(ggml_type, data, 256, 1024)
        assert weights.std() == pytest.approx(1024**-0.5, rel=0.04)
        means = weights.reshape(-1, size).mean(axis=1)
        assert (means.std() < 1.1 * (1024 * size) ** -0.5) == centred
        largest.append(np.linalg.norm(weights, 2))
    assert largest[1] < 1.7 < 2.3 < largest[0]
