"""Every type that the `gguf` package can dequantise, bit for bit; and what holds of every `Planes`."""

from __future__ import annotations

import sys
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize, to_planes
from realizar.quantization.planes import Planes

# gguf 0.19 can't dequantise these two; test_hand_built_blocks has them.
ORACLE_TYPES = [t for t in QUANTIZED_TYPES if t not in (GGMLType.Q1_0, GGMLType.Q2_0)]
SCALES = (1.0, -0.0371, -3 * 2.0**-24, 2.0**-24, 60000.0)  # one, negative, denormal, the smallest, large

# Bytes where half floats start, read off the structs of ggml-common.h; types not named have one at byte 0.
HALVES: dict[GGMLType, tuple[int, ...]] = {
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
    GGMLType.MXFP4: (),
    GGMLType.NVFP4: (),
}


def finite(ggml_type: GGMLType, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of raw blocks whose scales can't be infinite or NaN: the exponent's top bit is cleared."""
    blocks = data.copy().reshape(-1, ggml_type.type_size)
    if ggml_type is GGMLType.IQ1_M:
        blocks[:, 55] &= 0xBF  # the top nibble of the scale lies in the last byte's top half
    elif ggml_type is GGMLType.MXFP4:
        blocks[:, 0] = np.minimum(blocks[:, 0], 250)
    else:
        for start in HALVES.get(ggml_type, (0,)):
            blocks[:, start + 1] &= 0xBF
    return blocks.reshape(-1)


def with_scales(ggml_type: GGMLType, data: NDArray[np.uint8], scale: float) -> NDArray[np.uint8]:
    """A copy of raw blocks with every half float set to a value; MXFP4's power of two to the nearest below."""
    blocks = data.copy().reshape(-1, ggml_type.type_size)
    half = np.array([scale], dtype="<f2").view(np.uint8)
    if ggml_type is GGMLType.IQ1_M:
        for index, nibble in enumerate((half[0] & 15, half[0] >> 4, half[1] & 15, half[1] >> 4)):
            blocks[:, 49 + 2 * index] = (blocks[:, 49 + 2 * index] & 15) | (nibble << 4)
    elif ggml_type is GGMLType.MXFP4:
        blocks[:, 0] = np.floor(np.log2(abs(scale))) + 128
    else:
        for start in HALVES.get(ggml_type, (0,)):
            blocks[:, start : start + 2] = half
    return blocks.reshape(-1)


def oracle(ggml_type: GGMLType, data: NDArray[np.uint8], rows: int) -> NDArray[np.float32]:
    return gguf.quants.dequantize(data.reshape(rows, -1), gguf.GGMLQuantizationType(ggml_type.value))


def size_bytes(ggml_type: GGMLType, rows: int, cols: int) -> int:
    return rows * cols // ggml_type.block_size * ggml_type.type_size


def assert_same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def check_invariants(planes: Planes, rows: int, cols: int) -> None:
    assert (planes.out_features, planes.in_features) == (rows, cols)
    assert planes.layout.bits in (1, 2, 3, 4, 5, 6, 8) or planes.layout.vector_size > 1
    assert 16 <= planes.layout.group_size <= 256
    assert planes.codes.dtype == (np.uint16 if planes.layout.vector_size > 1 else np.uint8)
    assert planes.codes.shape == (rows, cols // planes.layout.vector_size)
    assert int(planes.codes.max()) < 2**planes.layout.bits
    groups = (rows, cols // planes.layout.group_size)
    assert planes.scales.shape == planes.group_scales().shape == groups
    if planes.minima is not None:
        assert planes.minima.shape == groups
        assert planes.minima.dtype == planes.scales.dtype
    if planes.layout.super_group_size is None:
        assert planes.scales.dtype == np.float32
        assert planes.super_scales is None
        assert planes.super_minima is None
    else:
        assert planes.scales.dtype == np.int16
        assert planes.super_scales is not None
        assert planes.super_scales.shape == (rows, cols // planes.layout.super_group_size)
        assert planes.super_scales.dtype == np.float32
        assert (planes.super_minima is None) == (planes.minima is None)
    if planes.layout.codebook is not None:
        assert planes.layout.offset == 0
        assert planes.layout.codebook.load().dtype == np.int8
        assert len(planes.layout.codebook.load()) == 2**planes.layout.bits
    if planes.signs is not None:
        assert planes.signs.dtype == np.uint8
        assert planes.signs.shape == (rows, cols // 8)


@pytest.mark.parametrize("blocks", [(1, 1), (3, 1), (1, 5), (17, 4), (64, 3)])
@pytest.mark.parametrize("ggml_type", ORACLE_TYPES, ids=lambda t: t.name)
def test_random_bytes(ggml_type: GGMLType, blocks: tuple[int, int]) -> None:
    rows, cols = blocks[0], blocks[1] * ggml_type.block_size
    seed = np.random.SeedSequence().entropy
    random = np.random.default_rng(seed).integers(0, 256, size_bytes(ggml_type, rows, cols), dtype=np.uint8)
    data = finite(ggml_type, random)
    expected = oracle(ggml_type, data, rows)
    assert np.isfinite(expected).all(), f"seed {seed}"
    planes = to_planes(ggml_type, data, rows, cols)
    check_invariants(planes, rows, cols)
    assert_same_bits(planes.dequantize(), expected)
    assert_same_bits(dequantize(ggml_type, data, rows, cols), expected)


@pytest.mark.parametrize("ggml_type", ORACLE_TYPES, ids=lambda t: t.name)
def test_extreme_codes_and_scales(ggml_type: GGMLType) -> None:
    """A row of two blocks for each fill of the codes and each scale."""
    row_bytes = size_bytes(ggml_type, 1, 2 * ggml_type.block_size)
    data = np.concatenate(
        [
            with_scales(ggml_type, np.full(row_bytes, fill, dtype=np.uint8), scale)
            for fill in (0x00, 0xFF, 0xAA, 0x55, 0x0F, 0xF0)
            for scale in SCALES
        ]
    )
    rows, cols = len(data) // row_bytes, 2 * ggml_type.block_size
    expected = oracle(ggml_type, data, rows)
    assert np.isfinite(expected).all()
    planes = to_planes(ggml_type, data, rows, cols)
    check_invariants(planes, rows, cols)
    assert_same_bits(planes.dequantize(), expected)


@pytest.mark.parametrize("ggml_type", [GGMLType.MXFP4, GGMLType.NVFP4], ids=lambda t: t.name)
def test_every_eight_bit_scale(ggml_type: GGMLType) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (251, ggml_type.type_size), dtype=np.uint8)
    blocks[:, 0] = np.arange(251)
    if ggml_type is GGMLType.NVFP4:
        blocks[:, 1:4] = blocks[:, :1] ^ np.array([0xFF, 0x80, 0x07], dtype=np.uint8)  # 251 to 255, by the first
    data = blocks.reshape(-1)
    assert_same_bits(dequantize(ggml_type, data, 251, ggml_type.block_size), oracle(ggml_type, data, 251))


@pytest.mark.parametrize("ggml_type", [GGMLType.Q2_K, GGMLType.Q4_K, GGMLType.Q5_K], ids=lambda t: t.name)
def test_minima_round_as_in_ggml(ggml_type: GGMLType) -> None:
    """Scales and minima far apart in size, so that every sum rounds."""
    rows, cols = 64, 1024
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, size_bytes(ggml_type, rows, cols), dtype=np.uint8).reshape(-1, ggml_type.type_size)
    start = 80 if ggml_type is GGMLType.Q2_K else 0
    blocks[:, start : start + 2] = rng.uniform(1, 2, (len(blocks), 1)).astype("<f2").view(np.uint8)
    blocks[:, start + 2 : start + 4] = rng.uniform(-9e-4, 9e-4, (len(blocks), 1)).astype("<f2").view(np.uint8)
    data = blocks.reshape(-1)
    assert_same_bits(dequantize(ggml_type, data, rows, cols), oracle(ggml_type, data, rows))


@pytest.mark.parametrize("ggml_type", FLOAT_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64)])
def test_floats(ggml_type: GGMLType, shape: tuple[int, int]) -> None:
    rows, cols = shape
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    values.flat[0] = -0.0
    if ggml_type is GGMLType.BF16:
        stored = (values.view(np.uint32) >> 16).astype("<u2")
        expected = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = values.astype("<f4" if ggml_type is GGMLType.F32 else "<f2")
        expected = stored.astype(np.float32)
    shifted = np.concatenate([np.zeros(1, np.uint8), stored.view(np.uint8).reshape(-1)])[1:]  # not aligned, as in files
    assert_same_bits(dequantize(ggml_type, shifted, rows, cols), expected)


@pytest.mark.parametrize(
    "ggml_type", [GGMLType.Q4_0, GGMLType.Q6_K, GGMLType.IQ3_S, GGMLType.F16], ids=lambda t: t.name
)
def test_rows_are_dequantised_alike_in_any_number(ggml_type: GGMLType) -> None:
    """More weights than one run of rows, and not a whole number of runs."""
    rows, cols = 1300, 2048
    random = np.random.default_rng(3).integers(0, 256, size_bytes(ggml_type, rows, cols), dtype=np.uint8)
    if ggml_type is GGMLType.F16:
        data = np.random.default_rng(4).standard_normal(rows * cols).astype("<f2").view(np.uint8)
    else:
        data = finite(ggml_type, random)
    whole = dequantize(ggml_type, data, rows, cols)
    row_bytes = data.size // rows
    for row in (0, 511, 512, 1299):
        alone = dequantize(ggml_type, data[row * row_bytes : (row + 1) * row_bytes], 1, cols)
        assert_same_bits(whole[row : row + 1], alone)


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda t: t.name)
def test_read_only_unaligned_data(ggml_type: GGMLType) -> None:
    """Tensors are read-only views of a mapped file, at any offset."""
    rows, cols = 2, ggml_type.block_size
    random = np.random.default_rng(5).integers(0, 256, size_bytes(ggml_type, rows, cols), dtype=np.uint8)
    data = finite(ggml_type, random)
    shifted = np.concatenate([np.zeros(1, np.uint8), data])[1:]
    shifted.flags.writeable = False
    assert_same_bits(dequantize(ggml_type, shifted, rows, cols), dequantize(ggml_type, data, rows, cols))


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda t: t.name)
def test_a_large_matrix_is_converted_as_a_whole(ggml_type: GGMLType) -> None:
    """The calls are fewer than the rows: operations of numpy take many rows at once."""

    def calls(rows: int) -> int:
        data = np.zeros(size_bytes(ggml_type, rows, 1024), dtype=np.uint8)
        count = 0

        def note(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            planes = to_planes(ggml_type, data, rows, 1024)
        finally:
            sys.setprofile(None)
        assert planes.in_features == 1024
        return count

    assert calls(2048) < 512


def test_every_type_in_a_file_is_covered() -> None:
    """Weights have every type but activations' formats, plain integers and float64."""
    left = set(GGMLType) - set(QUANTIZED_TYPES) - set(FLOAT_TYPES)
    assert {t.name for t in left} == {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}


@pytest.mark.parametrize("ggml_type", [GGMLType.F32, GGMLType.Q8_K, GGMLType.I8], ids=lambda t: t.name)
def test_no_planes_of_other_types(ggml_type: GGMLType) -> None:
    data = np.zeros(ggml_type.type_size, dtype=np.uint8)
    with pytest.raises(UnsupportedModelError, match=ggml_type.name):
        to_planes(ggml_type, data, 1, ggml_type.block_size)


def test_no_weights_of_integer_types() -> None:
    with pytest.raises(UnsupportedModelError, match="I8"):
        dequantize(GGMLType.I8, np.zeros(4, dtype=np.uint8), 2, 2)


@pytest.mark.parametrize(("size", "rows", "cols"), [(17, 1, 32), (18, 1, 31), (18, 2, 32), (36, 1, 32)])
def test_data_of_another_size(size: int, rows: int, cols: int) -> None:
    with pytest.raises(ValueError, match="Q4_0"):
        to_planes(GGMLType.Q4_0, np.zeros(size, dtype=np.uint8), rows, cols)
    with pytest.raises(ValueError, match="Q4_0"):
        dequantize(GGMLType.Q4_0, np.zeros(size, dtype=np.uint8), rows, cols)
