"""Speed of one thread's matmuls by weight type: 10^9 multiply-adds a second, the best of many runs.

    python scripts/time_matmuls.py TYPES [INSTRUCTION_SET] [TOKENS]

TYPES as Q4_K,Q6_K; TOKENS default 12, one tile's. The matrix, 2048 x 2048, and the activations stay in the cache. To
time a forced instruction set honestly, set NUMBA_CPU_NAME and NUMBA_CPU_FEATURES to what `InstructionSet` has of it.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time

import numpy as np

from realizar.backends.cpu import activation_layout as layout
from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.formats import format_number
from realizar.backends.cpu.instruction_set import index_of as set_index
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernels.linear import LINEAR, make_linear
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.pack import PackedMatrix, allocate, fill
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.random_blocks import random_blocks

SIZE, REPEATS = 2048, 200


def activations(tokens: int, width: int) -> np.ndarray:
    """uint8 [blocks, groups, width, 64]: records of random codes; their sums are left at zero."""
    shape = (-(-tokens // width), SIZE // GROUP, width, layout.RECORD_BYTES)
    records = aligned_zeros(int(np.prod(shape)), np.uint8).reshape(shape)
    codes = np.random.default_rng(2).integers(-127, 128, (*shape[:3], GROUP), np.int8)
    records[..., :GROUP] = codes.view(np.uint8)
    records[..., layout.SCALE : layout.SCALE + 4] = np.frombuffer(np.float32(0.01).tobytes(), np.uint8)
    return records


def best_seconds(matrix: PackedMatrix, instruction_set: str, tokens: int) -> float:
    """The least time of one matmul."""
    instructions = select(instruction_set)
    lanes = instructions.lanes
    records = activations(tokens, instructions.tile_tokens[0])
    out = aligned_zeros(tokens * matrix.tiles * lanes, np.float32).reshape(tokens, -1)
    step = np.array([tokens], np.int64)
    record = LINEAR.pack(
        dict.fromkeys(LINEAR.names, 0)
        | matrix.fields(lanes)
        | {
            "step": address(step), "activations": address(records), "activation_groups": SIZE // GROUP,
            "out": address(out), "out_stride": out.strides[0],
            "residual_scale": 1.0, "block_bytes": 1 << 20,
        }
    )  # fmt: skip
    kernel = make_linear(set_index(instructions.name), format_number(matrix.weight_format), 0).call
    argument, first, threads = ctypes.c_int64(address(record)), ctypes.c_int64(0), ctypes.c_int64(1)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        kernel(argument, first, threads)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of one thread's matmuls by weight type.")
    parser.add_argument("types", type=weight_types, help="weight types with commas between, such as Q4_K,Q6_K")
    parser.add_argument("instruction_set", nargs="?", help="default: the best of this processor")
    parser.add_argument("tokens", type=int, nargs="?", default=12, help="default 12, one tile's")
    given = parser.parse_args()
    instructions = select(given.instruction_set)
    for weight_type in given.types:
        data = random_blocks(weight_type, SIZE, SIZE, np.random.default_rng(1), 0.02)
        source = block_source(weight_type, data, SIZE, SIZE)
        matrix = allocate(source.layout, SIZE, SIZE, instructions.lanes)
        fill(matrix, source, instructions.lanes)
        assert isinstance(matrix, PackedMatrix)
        seconds = best_seconds(matrix, instructions.name, given.tokens)
        speed = SIZE * SIZE * given.tokens / seconds / 1e9
        print(f"{weight_type.name:8} {instructions.name:12} {speed:8.1f} G multiply-adds/s")
    return 0


def weight_types(text: str) -> list[GGMLType]:
    """Types by their names, with commas between."""
    try:
        return [GGMLType[name.upper()] for name in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(
            f"no weight type {error}; there are {', '.join(GGMLType.__members__)}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
