"""Checks of a record of quantised activations, read back by its documented bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH = 3  # tokens of a block of records in these tests


def poisoned_records(tokens: int, groups: int) -> NDArray[np.uint8]:
    """uint8 [blocks, groups, WIDTH, 64], all 0xFF."""
    return np.full((-(-tokens // WIDTH), groups, WIDTH, 64), 0xFF, np.uint8)


def rows_of(records: NDArray[np.uint8], tokens: int) -> NDArray[np.uint8]:
    """uint8 [tokens, groups * 64] of blocks of records; the block's other places must not have been written."""
    rows = records.transpose(0, 2, 1, 3).reshape(len(records) * WIDTH, -1)
    assert (rows[tokens:] == 0xFF).all()
    return rows[:tokens]


def read_records(records: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Codes [rows, groups, 32] and scales [rows, groups] of uint8 [rows, groups * 64]; sums are checked on the way."""
    lines = records.reshape(len(records), -1, 64)
    codes = lines[..., :32].view(np.int8).astype(np.int64)
    scales, scaled = (np.ascontiguousarray(lines[..., at : at + 4]).view(np.float32)[..., 0] for at in (32, 36))
    sums = np.ascontiguousarray(lines[..., 40:]).view(np.int32)
    np.testing.assert_array_equal(sums[..., :3], codes.sum(-1)[..., None] * [-8, -16, -128])
    np.testing.assert_array_equal(sums[..., 3:5], codes.reshape(*codes.shape[:-1], 2, 16).sum(-1) * -32)
    np.testing.assert_array_equal(sums[..., 5], -codes.sum(-1))
    np.testing.assert_array_equal(scaled, scales * codes.sum(-1).astype(np.float32))
    return codes, scales


def check_records(records: NDArray[np.uint8], values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Records of float32 [rows, width]: to nearest, the largest at 127. Returns what they leave over."""
    codes, scales = read_records(records)
    padded = np.zeros((len(values), codes.shape[1] * 32))
    padded[:, : values.shape[1]] = values
    groups = padded.reshape(codes.shape)
    largest = np.abs(groups).max(-1)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert np.all(np.abs(codes).max(-1)[largest > 0] == 127)
    assert not codes[largest == 0].any()
    rest = groups - scales[..., None].astype(np.float64) * codes
    assert np.all(np.abs(rest) <= scales[..., None] * (0.5 + 1e-4))
    return rest
