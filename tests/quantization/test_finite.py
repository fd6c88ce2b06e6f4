"""Weights that are not finite, found in raw blocks: against what dequantising them gives, for every type."""

from __future__ import annotations

import numpy as np
import pytest

from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize
from realizar.quantization.finite import find_not_finite
from realizar.quantization.random_blocks import random_blocks

ALL = (*QUANTIZED_TYPES, *FLOAT_TYPES)
WITHOUT = {GGMLType.NVFP4}  # its scales have no infinity, and ggml takes their NaN for 0


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda each: each.name)
def test_random_bytes_are_judged_as_dequantising_judges_them(ggml_type: GGMLType) -> None:
    """Every block alone; of an MXFP4 scale that large codes alone would make infinite, none is let through."""
    rng = np.random.default_rng(ggml_type)
    blocks = rng.integers(0, 256, (3000, ggml_type.type_size), np.uint8)
    if ggml_type is GGMLType.MXFP4:
        blocks[:, 1] = 0x77  # the largest code is in every block
    if ggml_type is GGMLType.F32:
        blocks[::7, 2:] = 0xFF
    with np.errstate(all="ignore"):
        weights = dequantize(ggml_type, blocks.reshape(-1), len(blocks), ggml_type.block_size)
    bad = ~np.isfinite(weights).all(axis=1)
    assert bad.any() != (ggml_type in WITHOUT)
    found = [find_not_finite(ggml_type, block) is not None for block in blocks]
    assert found == bad.tolist()


@pytest.mark.parametrize("ggml_type", ALL, ids=lambda each: each.name)
def test_good_weights_pass(ggml_type: GGMLType) -> None:
    data = random_blocks(ggml_type, 64, 512, np.random.default_rng(1), 0.02)
    assert find_not_finite(ggml_type, data) is None
    assert find_not_finite(ggml_type, data[:0]) is None


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01], ids=["inf", "-inf", "nan"])
def test_the_place_is_reported(bits: int) -> None:
    """The place is right also beyond the first run of blocks that are checked together."""
    for ggml_type, at, what in ((GGMLType.Q4_1, 0, "scale"), (GGMLType.Q4_1, 2, "minimum"), (GGMLType.F16, 0, "")):
        data = random_blocks(ggml_type, 80, 32 * 1024, np.random.default_rng(1), 0.02)
        blocks = data.reshape(-1, ggml_type.type_size)
        blocks[70_000, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        expected = f"the {what} of block 70000 is not finite" if what else "number 70000 is not finite"
        assert find_not_finite(ggml_type, data) == expected
