"""Linear kernels besides the plain matmul: residual, bias, odd scales, float weights, and the activation records."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from backends.cpu.kernels.linear_harness import (
    HOST_SETS,
    check_matmul,
    isa_index,
    lanes_of,
    quantize,
    random_activations,
    run_linear,
)
from backends.cpu.packed import pack
from realizar.backends.cpu.codegen.float_tile import FLOAT_TYPES
from realizar.backends.cpu.kernels.float_linear import FLOAT_LINEAR, make_float_linear
from realizar.backends.cpu.kernels.quantize import quantize_group
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.pack import FloatMatrix
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.float_tensors import e4m3_layout
from realizar.quantization.layout import FloatType
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import MatrixSource, PlanesSource, random_source
from wider import diagonal, wider


@njit
def _quantize_row(source: int, target: int, groups: int) -> None:
    for group in range(groups):
        quantize_group(source + 128 * group, target + 64 * group)


def test_records_are_the_kernels() -> None:
    x = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32) * 50
    x[1, 32:64] = 0
    x[2] = np.repeat([1e-30, 127, -3e4], 32)
    want = quantize(x).records
    got = aligned_zeros(3 * 96 * 2, np.uint8).reshape(3, -1)
    for row in range(3):
        _quantize_row(address(x[row]), address(got[row]), 3)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("instruction_set", wider(HOST_SETS, HOST_SETS[0], HOST_SETS[-1]))
def test_residual_and_bias(instruction_set: str) -> None:
    """out + r * (W x + bias); rounding of one fused step apart."""
    rng = np.random.default_rng(2)
    rows, cols, tokens = 21, 96, 4
    data = random_blocks(GGMLType.Q8_0, rows, cols, rng, 0.1)
    x = random_activations(tokens, cols, rng)
    matrix = pack(block_source(GGMLType.Q8_0, data, rows, cols), lanes_of(instruction_set))
    plain = run_linear(instruction_set, matrix, x, tokens).astype(np.float64)
    bias = aligned_zeros(64, np.float32)
    bias[:rows] = rng.standard_normal(rows)
    before = rng.standard_normal((tokens, rows)).astype(np.float32)
    got = run_linear(instruction_set, matrix, x, tokens, 2, before, 0.25, bias)
    np.testing.assert_allclose(got, before + 0.25 * (plain + bias[:rows]), atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_K", "Q1_0", "IQ2_XXS", "IQ1_S", "Q6_K", "TQ2_0"])
@pytest.mark.parametrize("scale", [-6e-8, 6e-8, -0.75, 65504.0])
def test_scales_of_any_sign_and_size(name: str, scale: float) -> None:
    """The float16 scale as it is: its least subnormal, negative, or the largest."""
    ggml_type = GGMLType[name]
    rng = np.random.default_rng(3)
    data = random_blocks(ggml_type, 5, 256, rng, 0.02).reshape(-1, ggml_type.type_size)
    at = {"Q6_K": 208, "TQ2_0": 64}.get(name, 0)
    data[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    source = block_source(ggml_type, data.reshape(-1), 5, 256)
    check_matmul(HOST_SETS[0], source, random_activations(3, 256, rng))


@cache
def _float_kernel(instruction_set: str, kind: str) -> Any:
    return make_float_linear(isa_index(instruction_set), FLOAT_TYPES.index(kind), 0).call


def check_float_matmul(instruction_set: str, source: MatrixSource, tokens: int, rng: np.random.Generator) -> None:
    """All tokens at once against float64, and each number of tokens against that bit for bit."""
    matrix, cols = pack(source, lanes_of(instruction_set)), source.in_features
    assert isinstance(matrix, FloatMatrix)
    x = np.zeros((tokens, matrix.columns), np.float32)
    x[:, :cols] = rng.standard_normal((tokens, cols))

    def run(count: int) -> NDArray[np.float32]:
        out = aligned_zeros(count * matrix.tiles * lanes_of(instruction_set), np.float32).reshape(count, -1)
        step = np.array([count], np.int64)
        record = FLOAT_LINEAR.pack(
            dict.fromkeys(FLOAT_LINEAR.names, 0)
            | {
                "step": address(step), "weights": address(matrix.weights), "tiles": matrix.tiles,
                "tile_stride": matrix.tile_bytes, "columns": matrix.columns, "input": address(x),
                "input_stride": x.strides[0], "out": address(out), "out_stride": out.strides[0],
                "residual_scale": 1.0,
            }
        )  # fmt: skip
        for thread in range(2):
            _float_kernel(instruction_set, matrix.kind)(address(record), thread, 2)
        return out[:, : source.out_features]

    got, weights = run(tokens), source.dequantize().astype(np.float64)
    allowed = 1e-6 * (np.abs(x[:, :cols].astype(np.float64)) @ np.abs(weights).T)
    assert (np.abs(got - x[:, :cols].astype(np.float64) @ weights.T) <= allowed).all()
    for count in range(1, tokens):
        np.testing.assert_array_equal(run(count), got[:count])


@pytest.mark.parametrize(("instruction_set", "kind"), diagonal(HOST_SETS, get_args(FloatType)))
def test_float_weights(instruction_set: str, kind: str) -> None:
    rng, ggml_type = np.random.default_rng(4), GGMLType[kind.upper()]
    for rows, cols, tokens in ((1, 64, 9), (17, 30, 7), (33, 257, 2)):
        source = block_source(ggml_type, random_blocks(ggml_type, rows, cols, rng, 0.5), rows, cols)
        check_float_matmul(instruction_set, source, tokens, rng)


@pytest.mark.parametrize(("instruction_set", "group"), diagonal(HOST_SETS, (32, 64, 128)))
def test_weights_of_e4m3(instruction_set: str, group: int) -> None:
    """With all numbers that there are, with none below 2^-6 but 0 in the first half of a group, and with such alone."""
    rng, layout = np.random.default_rng(4), e4m3_layout(group)
    for rows, cols, tokens in ((1, group, 9), (17, 3 * group, 7), (33, 2 * group, 2)):
        planes = random_source(layout, rows, cols, rng, 0.5).planes(0, rows)
        codes = planes.codes.reshape(rows, -1, group)
        first = codes[:, ::2, : group // 2]
        first[(first & 0x78 == 0) & (first & 7 != 0)] |= 8
        codes[:, 1::2] &= 0x87
        scales = planes.scales * rng.choice([-1, 1], planes.scales.shape).astype(np.float32)
        source = PlanesSource(layout, replace(planes, scales=scales))
        check_float_matmul(instruction_set, source, tokens, rng)
