"""Running one linear kernel by hand, and the float64 matmul that it must give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.cpu.packed import pack
from realizar.backends.cpu import activation_layout as layout
from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.formats import WeightFormat, format_number
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS, host_features, supported
from realizar.backends.cpu.instruction_set import index_of as isa_index
from realizar.backends.cpu.kernels.linear import LINEAR, make_linear
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.pack import PackedMatrix
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import MatrixSource

HOST_SETS = [candidate.name for candidate in INSTRUCTION_SETS if supported(candidate, host_features())]
_HALF = ((0, 0xFF), (1, 0xFF))
_SCALES: dict[str, tuple[tuple[int, int], ...]] = {
    "Q4_1": tuple((i, 0xFF) for i in range(4)),
    "Q5_1": tuple((i, 0xFF) for i in range(4)),
    "Q4_K": tuple((i, 0xFF) for i in range(4)),
    "Q5_K": tuple((i, 0xFF) for i in range(4)),
    "Q2_K": tuple((i, 0xFF) for i in range(80, 84)),
    "Q3_K": ((108, 0xFF), (109, 0xFF)),
    "Q6_K": ((208, 0xFF), (209, 0xFF)),
    "TQ1_0": ((52, 0xFF), (53, 0xFF)),
    "TQ2_0": ((64, 0xFF), (65, 0xFF)),
    "MXFP4": ((0, 0xFF),),
    "NVFP4": tuple((i, 0xFF) for i in range(4)),
    "IQ1_M": tuple((i, 0xF0) for i in (49, 51, 53, 55)),
}  # byte and mask of the float scales of a block; the others have a float16 first


def lanes_of(name: str) -> int:
    return INSTRUCTION_SETS[isa_index(name)].lanes


def filled_blocks(ggml_type: GGMLType, rows: int, cols: int, fill: int) -> NDArray[np.uint8]:
    """Blocks whose every byte but the float scales is `fill`."""
    blocks = random_blocks(ggml_type, rows, cols, np.random.default_rng(3), 0.02).reshape(-1, ggml_type.type_size)
    filled = np.full_like(blocks, fill)
    for byte, mask in _SCALES.get(ggml_type.name, _HALF):
        filled[:, byte] = (blocks[:, byte] & mask) | (filled[:, byte] & (0xFF ^ mask))
    return filled.reshape(-1)


@dataclass(frozen=True)
class Activations:
    """Quantised tokens: uint8 records [tokens, groups * 64], and what they stand for in float64 [tokens, cols]."""

    records: NDArray[np.uint8]
    values: NDArray[np.float64]


def quantize(x: NDArray[np.float32]) -> Activations:
    """The records of float32 [tokens, cols], by the formulas of `activation_layout`."""
    tokens, cols = x.shape
    groups = x.reshape(tokens, cols // GROUP, GROUP)
    largest = np.abs(groups).max(axis=-1)
    scale = largest * np.float32(1 / 127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest != 0)
    codes = np.rint(groups * inverse[..., None]).astype(np.int32)
    records = aligned_zeros(tokens * cols * 2, np.uint8).reshape(tokens, cols // GROUP, layout.RECORD_BYTES)

    def put(offset: int, values: NDArray[Any]) -> None:
        records[..., offset : offset + 4] = np.ascontiguousarray(values[..., None]).view(np.uint8)

    records[..., :GROUP] = codes.astype(np.int8).view(np.uint8)
    halves = codes.reshape(tokens, -1, 2, 16).sum(axis=-1).astype(np.int32)
    total = halves.sum(axis=-1).astype(np.int32)
    put(layout.SCALE, scale)
    put(layout.SCALED_SUM, scale * total.astype(np.float32))
    for offset, byte in layout.OFFSET_SUMS.items():
        put(byte, -offset * total)
    for half, byte in enumerate(layout.HALF_SUMS):
        put(byte, -layout.HALF_OFFSET * halves[..., half])
    values = (codes * scale[..., None].astype(np.float64)).reshape(tokens, cols)
    return Activations(records.reshape(tokens, -1), values)


def blocked(records: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """[tokens, groups * 64] as the kernels read them: [blocks, groups, width, 64]."""
    tokens, row = records.shape
    blocks, groups = -(-tokens // width), row // layout.RECORD_BYTES
    padded = np.full((blocks * width, row), 0xA5, np.uint8)
    padded[:tokens] = records
    out = aligned_zeros(padded.size, np.uint8).reshape(blocks, groups, width, layout.RECORD_BYTES)
    out[:] = padded.reshape(blocks, width, groups, layout.RECORD_BYTES).swapaxes(1, 2)
    return out


def random_activations(tokens: int, cols: int, rng: np.random.Generator) -> Activations:
    """Gaussian tokens; every fourth one only of the largest magnitude, every fifth zero in its first group."""
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    x[::4] = np.sign(x[::4]) * np.float32(0.3)
    x[::5, :GROUP] = 0
    return quantize(x)


@cache
def kernel(instruction_set: str, form: WeightFormat, add: int = 0) -> Any:
    return make_linear(isa_index(instruction_set), format_number(form), add).call


def run_linear(
    instruction_set: str, matrix: PackedMatrix, x: Activations, tokens: int, threads: int = 1,
    out: NDArray[np.float32] | None = None, residual_scale: float = 1.0, bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """The kernel's result for the first `tokens`, [tokens, rows]; added to `out` if that is given."""
    lanes = lanes_of(instruction_set)
    result = aligned_zeros(tokens * matrix.tiles * lanes, np.float32).reshape(tokens, -1)
    if out is not None:
        result[:, : matrix.out_features] = out
    step = np.array([tokens], np.int64)
    records = blocked(x.records, INSTRUCTION_SETS[isa_index(instruction_set)].tile_tokens[0])
    record = LINEAR.pack(
        dict.fromkeys(LINEAR.names, 0)
        | matrix.fields(lanes)
        | {
            "step": address(step), "activations": address(records), "activation_groups": matrix.in_features // GROUP,
            "out": address(result), "out_stride": result.strides[0], "residual_scale": residual_scale,
            "block_bytes": 384 * 1024, "bias": address(bias),
        }
    )  # fmt: skip
    run = kernel(instruction_set, matrix.weight_format, int(out is not None))
    for thread in range(threads):
        run(address(record), thread, threads)
    return result[:, : matrix.out_features]


def check_matmul(instruction_set: str, source: MatrixSource, x: Activations) -> None:
    """All tokens at once against float64; each number of tokens, and three threads, against that bit for bit."""
    tokens = len(x.values)
    matrix = pack(source, lanes_of(instruction_set))
    got = run_linear(instruction_set, matrix, x, tokens)
    planes = source.planes(0, source.out_features)
    scales = np.repeat(planes.group_scales().astype(np.float64), planes.layout.group_size, axis=1)
    weights = planes.unscaled() * scales
    magnitudes = np.abs(weights)
    minima = planes.group_minima()
    if minima is not None:
        wide = np.repeat(minima.astype(np.float64), planes.layout.group_size, axis=1)
        weights, magnitudes = weights + wide, magnitudes + np.abs(wide)
    allowed = 1e-5 * (np.abs(x.values) @ magnitudes.T) + 1e-30
    assert (np.abs(got - x.values @ weights.T) <= allowed).all()
    for count in range(1, tokens):
        np.testing.assert_array_equal(run_linear(instruction_set, matrix, x, count), got[:count])
    np.testing.assert_array_equal(run_linear(instruction_set, matrix, x, tokens, threads=3), got)
