"""Blocks laid byte by byte, with the weights that they must give worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import dequantize, to_planes

HALF_ONE = [0x00, 0x3C]
HALF_MINUS_QUARTER = [0x00, 0xB4]
HALF_SMALLEST = [0x01, 0x00]
HALF_LARGEST = [0xFF, 0x7B]


def weights(ggml_type: GGMLType, block: list[int]) -> NDArray[np.float32]:
    return dequantize(ggml_type, np.array(block, dtype=np.uint8), 1, ggml_type.block_size)[0]


def test_q1_0_takes_bits_from_the_lowest() -> None:
    got = weights(GGMLType.Q1_0, HALF_ONE + [0b0000_0001, 0b1000_0000] + [0x00] * 13 + [0xF0])
    expected = np.full(128, -1.0, dtype=np.float32)
    expected[[0, 15, 124, 125, 126, 127]] = 1.0
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("scale", "value"),
    [(HALF_ONE, 1.0), (HALF_MINUS_QUARTER, -0.25), (HALF_SMALLEST, 2.0**-24), (HALF_LARGEST, 65504.0)],
)
def test_q1_0_is_plus_or_minus_the_scale(scale: list[int], value: float) -> None:
    assert np.array_equal(weights(GGMLType.Q1_0, scale + [0xFF] * 16), np.full(128, value, np.float32))
    assert np.array_equal(weights(GGMLType.Q1_0, scale + [0x00] * 16), np.full(128, -value, np.float32))


def test_q1_0_planes() -> None:
    two_rows = HALF_ONE + [0x01] + [0] * 15 + HALF_MINUS_QUARTER + [0xFF] * 16
    planes = to_planes(GGMLType.Q1_0, np.array(two_rows, dtype=np.uint8), 2, 128)
    assert (planes.layout.bits, planes.layout.group_size, planes.layout.codebook) == (1, 128, None)
    assert planes.codes[0, :3].tolist() == [1, 0, 0]
    assert planes.codes.sum(axis=1).tolist() == [1, 128]


def test_q2_0_takes_pairs_of_bits_from_the_lowest() -> None:
    # 0xE4 is 3, 2, 1, 0 from the top, so the four weights are -1, 0, 1, 2 times the scale.
    got = weights(GGMLType.Q2_0, HALF_ONE + [0xE4] + [0b01_01_01_01] * 14 + [0b10_00_01_11])
    expected = np.zeros(64, dtype=np.float32)
    expected[:4] = [-1, 0, 1, 2]
    expected[60:] = [2, 0, -1, 1]
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("scale", "value"),
    [(HALF_ONE, 1.0), (HALF_MINUS_QUARTER, -0.25), (HALF_SMALLEST, 2.0**-24), (HALF_LARGEST, 65504.0)],
)
@pytest.mark.parametrize(("fill", "factor"), [(0x00, -1), (0x55, 0), (0xAA, 1), (0xFF, 2)])
def test_q2_0_scales(scale: list[int], value: float, fill: int, factor: int) -> None:
    assert np.array_equal(weights(GGMLType.Q2_0, scale + [fill] * 16), np.full(64, factor * value, np.float32))


def test_q2_0_planes() -> None:
    planes = to_planes(GGMLType.Q2_0, np.array(HALF_ONE + [0xE4] * 16, dtype=np.uint8), 1, 64)
    assert (planes.layout.bits, planes.layout.offset, planes.layout.group_size, planes.minima) == (2, 1, 64, None)
    assert planes.codes.tolist() == [[0, 1, 2, 3] * 16]


def test_mxfp4() -> None:
    # Scale byte 128 is 2^1. Byte j holds column j low and column j + 16 high.
    got = weights(GGMLType.MXFP4, [128] + [low | (low ^ 8) << 4 for low in range(16)])
    positive = 2 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    first = np.concatenate([positive, -positive])
    assert np.array_equal(got, np.concatenate([first, -first]))


def test_nvfp4() -> None:
    # Group scales 0x38 = 1, 0x08 = 2^-6, 0x01 = 2^-9 (subnormal), 0x7E = 448. Byte j: columns j and j + 8 of a group.
    got = weights(GGMLType.NVFP4, [0x38, 0x08, 0x01, 0x7E] + [0x72] * 8 + [0xA1] * 8 + [0x0F] * 8 + [0x67] * 8)
    groups = [[1] * 8 + [6] * 8, [0.5] * 8 + [-1] * 8, [-6] * 8 + [0] * 8, [6] * 8 + [4] * 8]
    scales = np.array([1, 2.0**-6, 2.0**-9, 448], dtype=np.float32)
    assert np.array_equal(got.reshape(4, 16), scales[:, None] * np.array(groups, dtype=np.float32))


def test_q4_0() -> None:
    # -0.25 * (q - 8): byte j holds column j low, column j + 16 high.
    got = weights(GGMLType.Q4_0, HALF_MINUS_QUARTER + [0x80 | low for low in range(16)])
    assert got[:16].tolist() == [-0.25 * (low - 8) for low in range(16)]
    assert got[16:].tolist() == [0.0] * 16


def test_q4_k_scales_and_minima() -> None:
    """Group 0 reads its six bits from one byte each, group 4 from the tops of the same and a nibble."""
    packed = [0b11_000101, 0, 0, 0, 0b01_000010, 0, 0, 0, 0b0110_1001, 0, 0, 0]
    got = weights(GGMLType.Q4_K, HALF_ONE + HALF_ONE + packed + [0x21] * 128).reshape(8, 32)
    assert (got[0] == 5 * 1 - 2).all()
    assert (got[4] == 0b111001 * 1 - 0b010110).all()
    assert (got[[1, 2, 3, 5, 6, 7]] == 0).all()


def test_q6_k() -> None:
    """Scale -3 in the second group of 16, codes 33 there: -3 * (33 - 32)."""
    low, high = [0x00] * 128, [0x00] * 64
    low[16:32], high[16:32] = [0x01] * 16, [0b10] * 16
    got = weights(GGMLType.Q6_K, low + high + [0, 0xFD] + [0] * 14 + HALF_ONE)
    assert (got[16:32] == -3).all()
    assert not got[:16].any()
    assert not got[32:].any()
