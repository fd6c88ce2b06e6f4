"""The linear kernel of every quantised type against float64, on every instruction set that this processor has."""

from __future__ import annotations

import numpy as np
import pytest

from backends.cpu.kernels.linear_harness import HOST_SETS, check_matmul, filled_blocks, random_activations
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.convert import QUANTIZED_TYPES
from realizar.quantization.random_blocks import random_blocks
from wider import diagonal

_MATRIX = diagonal(QUANTIZED_TYPES, HOST_SETS)


def _name(value: object) -> str:
    return str(getattr(value, "name", value))


@pytest.mark.parametrize(("ggml_type", "instruction_set"), _MATRIX, ids=_name)
def test_matmul_is_float64s(instruction_set: str, ggml_type: GGMLType) -> None:
    rng = np.random.default_rng(5)
    block = ggml_type.block_size
    for rows, cols, tokens in (
        (1, block, 25),
        (15, 3 * block, 3),
        (16, 2 * block, 13),
        (17, block, 6),
        (33, 5 * block, 2),
    ):
        data = random_blocks(ggml_type, rows, cols, rng, 0.02)
        check_matmul(instruction_set, block_source(ggml_type, data, rows, cols), random_activations(tokens, cols, rng))


@pytest.mark.parametrize(("ggml_type", "instruction_set"), _MATRIX, ids=_name)
@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF])
def test_extreme_codes_do_not_saturate(instruction_set: str, ggml_type: GGMLType, fill: int) -> None:
    cols = max(256, ggml_type.block_size)
    x = random_activations(5, cols, np.random.default_rng(6))
    check_matmul(instruction_set, block_source(ggml_type, filled_blocks(ggml_type, 3, cols, fill), 3, cols), x)
