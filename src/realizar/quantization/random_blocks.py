"""Random but valid weights of any type, for test models and benchmark files. numpy only.

All bytes are random, so that every code and every small scale occurs; then the float scales are written so that the
weights have a mean near zero and the standard deviation asked for.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.convert import FLOAT_TYPES, dequantize
from realizar.quantization.fields import Bytes
from realizar.quantization.finite import HALF_FIELDS
from realizar.quantization.microscaling import half_e4m3, half_e8m0

_MINIMUM: dict[GGMLType, float] = {
    GGMLType.Q4_1: -7.5,
    GGMLType.Q5_1: -15.5,
    GGMLType.Q2_K: 1.5,
    GGMLType.Q4_K: 7.5,
    GGMLType.Q5_K: 15.5,
}
"""The multiple of the scale that is the half-float minimum, so that the weights' mean is zero."""
_SAMPLE_WEIGHTS = 1 << 18
_FLOAT_RUN = 1 << 22


def random_blocks(
    ggml_type: GGMLType, out_features: int, cols: int, rng: np.random.Generator, std: float, *, centred: bool = False
) -> NDArray[np.uint8]:
    """A random matrix in its file format: uint8 [size in bytes].

    Args:
        ggml_type: any type that `dequantize` takes.
        cols: a whole number of blocks.
        std: the weights' standard deviation, met within some percent where the type's float scale can be that small.
        centred: the small minima of K-quants are those that give each sub-block a mean near zero, as real weights have
            it. Where all codes are random, a matrix multiplies the sums of its sub-blocks' inputs several times as much
            as all else, so that vectors come to be much alike.
    """
    if ggml_type in FLOAT_TYPES:
        return _random_floats(ggml_type, out_features * cols, rng, std)
    size = out_features * (cols // ggml_type.block_size) * ggml_type.type_size
    blocks = _random_bytes(size, rng).reshape(-1, ggml_type.type_size)
    if centred:
        _pair_minima(ggml_type, blocks)
    scale = std / _unit_deviation(ggml_type, centred)
    if ggml_type is GGMLType.MXFP4:
        blocks[:, 0] = _nearby_bytes(np.full(len(blocks), scale), half_e8m0()[:255], rng)
    elif ggml_type is GGMLType.NVFP4:
        wanted = scale * rng.uniform(0.8, 1.2, (len(blocks), 4))
        blocks[:, :4] = _nearby_bytes(wanted, half_e4m3()[:127], rng)
    else:
        scales = scale * rng.uniform(0.8, 1.2, len(blocks))
        if ggml_type not in _MINIMUM:
            scales *= rng.choice([-1.0, 1.0], len(blocks))  # takes out the small bias of codes like -8 to 7
        _write_half_scales(ggml_type, blocks, scales)
    return blocks.reshape(-1)


def _random_bytes(size: int, rng: np.random.Generator) -> Bytes:
    words = rng.integers(0, 1 << 64, (size + 7) // 8, dtype=np.uint64)
    return words.view(np.uint8)[:size]


def _random_floats(ggml_type: GGMLType, size: int, rng: np.random.Generator, std: float) -> Bytes:
    """Gaussian numbers, made in runs so that no float32 copy of a large half-float matrix is held."""
    data = np.empty(size * ggml_type.type_size, dtype=np.uint8)
    for start in range(0, size, _FLOAT_RUN):
        count = min(_FLOAT_RUN, size - start)
        values = rng.standard_normal(count, dtype=np.float32)
        values *= np.float32(std)
        if ggml_type is GGMLType.BF16:
            stored = (values.view(np.uint32) >> np.uint32(16)).astype("<u2").view(np.uint8)
        else:
            stored = values.astype("<f4" if ggml_type is GGMLType.F32 else "<f2", copy=False).view(np.uint8)
        data[start * ggml_type.type_size : (start + count) * ggml_type.type_size] = stored
    return data


@lru_cache
def _unit_deviation(ggml_type: GGMLType, centred: bool) -> float:
    """Root mean square of random weights of a type under a float scale of 1, from a sample."""
    size = _SAMPLE_WEIGHTS // ggml_type.block_size * ggml_type.type_size
    blocks = _random_bytes(size, np.random.default_rng(0)).reshape(-1, ggml_type.type_size)
    if centred:
        _pair_minima(ggml_type, blocks)
    if ggml_type is GGMLType.MXFP4:
        blocks[:, 0] = 128
    elif ggml_type is GGMLType.NVFP4:
        blocks[:, :4] = 0x40
    else:
        _write_half_scales(ggml_type, blocks, np.ones(len(blocks)))
    weights = dequantize(ggml_type, blocks.reshape(-1), 1, _SAMPLE_WEIGHTS)
    return float(np.sqrt(np.mean(np.square(weights, dtype=np.float64))))


def _pair_minima(ggml_type: GGMLType, blocks: Bytes) -> None:
    """Give each sub-block's small minimum the code of its small scale, in blocks uint8 [n, type_size]."""
    if ggml_type in (GGMLType.Q4_K, GGMLType.Q5_K):
        blocks[:, 8:12] = blocks[:, 4:8]  # of sub-blocks 0 to 3, and the upper bits of 4 to 7
        blocks[:, 12:16] = (blocks[:, 12:16] & np.uint8(15)) * np.uint8(17)
    elif ggml_type is GGMLType.Q2_K:
        blocks[:, :16] = (blocks[:, :16] & np.uint8(15)) * np.uint8(17)


def _write_half_scales(ggml_type: GGMLType, blocks: Bytes, scales: NDArray[np.float64]) -> None:
    """Write the scale of each block, uint8 [n, type_size], and the minimum that goes with it."""
    if ggml_type is GGMLType.IQ1_M:  # four nibbles, the lowest first, atop the four words that end a block
        bits = scales.astype(np.float16).view(np.uint16)
        for index in range(4):
            nibble = ((bits >> np.uint16(4 * index)) & np.uint16(15)).astype(np.uint8)
            at = 49 + 2 * index
            blocks[:, at] = (blocks[:, at] & np.uint8(15)) | (nibble << np.uint8(4))
        return
    for at, multiple in zip(HALF_FIELDS.get(ggml_type, (0,)), (1.0, _MINIMUM.get(ggml_type, 0.0)), strict=False):
        blocks[:, at : at + 2] = (multiple * scales).astype("<f2")[:, None].view(np.uint8)


def _nearby_bytes(wanted: NDArray[np.float64], table: NDArray[np.float32], rng: np.random.Generator) -> Bytes:
    """For each wanted scale one of its two neighbours in a rising table, at random so that the mean square is right."""
    squares = np.square(table.astype(np.float64))
    target = np.clip(np.square(wanted), squares[0], squares[-1])
    below = np.clip(np.searchsorted(squares, target, side="right") - 1, 0, len(table) - 2)
    share = (target - squares[below]) / (squares[below + 1] - squares[below])
    chosen: Bytes = (below + (rng.random(wanted.shape) < share)).astype(np.uint8)
    return chosen
