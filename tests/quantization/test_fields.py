"""Bit fields against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from realizar.quantization.fields import bit_fields


@pytest.mark.parametrize("run", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_bit_fields(width: int, run: int) -> None:
    packed = np.random.default_rng(0).integers(0, 256, (3, 2, 64), dtype=np.uint8)
    expected = [
        int(block[start + index]) >> (field * width) & (2**width - 1)
        for block in packed.reshape(6, 64)
        for start in range(0, 64, run)
        for field in range(8 // width)
        for index in range(run)
    ]
    got = bit_fields(packed, width, run)
    assert got.shape == (3, 2, 64 * 8 // width)
    assert got.reshape(-1).tolist() == expected
