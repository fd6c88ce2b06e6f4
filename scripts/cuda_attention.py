"""Times attention of single tokens alone: the CUDA kernel on the 8B shape, layer after layer in one graph.

python scripts/cuda_attention.py
ncu --set full -k regex:attend --launch-count 1 python scripts/cuda_attention.py --only 256x192
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch

from realizar.backends.cuda.attention.native_decode import DecodeAttention
from realizar.backends.cuda.native.attend_source import AttendKernel
from realizar.backends.cuda.tuning.measure import replay_ms

HEADS, KV_HEADS, HEAD, BLOCK = 32, 8, 128, 16
LAYERS, MOST_PARTS = 16, 64
WIDTH, COLS = (HEADS + 2 * KV_HEADS) * HEAD, HEADS * HEAD
LIMIT_GB_PER_S = 4400.0  # of an H200, for the column of what bytes alone take


@dataclass(frozen=True)
class Case:
    """Rows of one context each; the matmul's splits, parts of the grid, kernels as (warps, resident, stages)."""

    rows: int
    context: int
    element: str
    splits: int
    parts: tuple[int, ...]
    sizes: tuple[tuple[int, int, int], ...]


CASES = (
    Case(1, 150, "bf16", 1, (1, 2), ((4, 16, 2), (8, 16, 1), (8, 16, 2))),
    Case(8, 192, "bf16", 8, (1, 2), ((4, 12, 1), (8, 16, 2))),
    Case(16, 192, "bf16", 5, (1, 2), ((4, 12, 1), (8, 16, 2))),
    Case(64, 192, "bf16", 2, (1,), ((2, 16, 1), (4, 16, 1), (4, 20, 1))),
    Case(256, 192, "bf16", 1, (1,), ((2, 16, 1), (4, 16, 1), (4, 20, 1))),
    Case(64, 2000, "bf16", 2, (1, 2), ((2, 16, 1), (4, 16, 1))),
    Case(1, 16384, "bf16", 1, (32, 33, 64), ((4, 16, 1), (8, 16, 1))),
    Case(1, 16384, "int8", 1, (32, 33, 64), ((4, 16, 1), (8, 16, 1))),
)


class Inputs:
    """Inputs and outputs of a case's kernel; each layer has a cache of its own."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, rows, per_row = case, case.rows, -(-case.context // BLOCK)
        shape = rows * per_row, KV_HEADS, BLOCK, HEAD

        def ints(values: torch.Tensor) -> torch.Tensor:
            return values.to(device, torch.int32).contiguous()

        def cache() -> torch.Tensor:
            if case.element == "int8":
                return torch.randint(-100, 100, shape, dtype=torch.int8, device=device)
            return torch.randn(shape, device=device).to(torch.bfloat16)

        def scales() -> torch.Tensor:
            return torch.rand((*shape[:3], HEAD // 32), device=device).half() / 100

        self.layers = [(cache(), cache(), scales(), scales()) for _ in range(LAYERS)]
        table = ints(torch.randperm(rows * per_row)).view(rows, per_row)
        last = case.context - 1
        self.partials = torch.randn(case.splits, rows, WIDTH, device=device)
        angles = torch.rand(case.context, HEAD // 2, device=device)
        numbers, contexts = ints(torch.arange(rows)), ints(torch.full((rows,), case.context))
        self.before = [self.partials, None, contexts - 1, angles, angles, None, None, None, None]
        half = case.rows > 2
        out = torch.zeros((rows + 128) * COLS, dtype=torch.float16 if half else torch.int8, device=device)
        self.after = [
            ints(table[:, last // BLOCK] * BLOCK + last % BLOCK), None,
            torch.zeros(rows * MOST_PARTS * COLS, device=device),
            torch.zeros(rows * MOST_PARTS * HEADS * 2, device=device), ints(torch.zeros(rows * KV_HEADS)), numbers,
            numbers, contexts, table, ints(torch.full((1,), per_row)), out, torch.zeros(rows + 128, device=device),
            torch.zeros((rows + 128) * COLS // 8, device=device),
        ]  # fmt: skip

    def kernel(self, warps: int, resident: int, stages: int) -> AttendKernel:
        rows = self.case.rows
        out, block_tokens = ("int8", 1) if rows <= 2 else ("half", min(128, max(8, rows)))
        return AttendKernel(
            HEAD, HEADS // KV_HEADS, self.case.splits, False, 0, False, HEAD, False, self.case.element, BLOCK, out,
            block_tokens, warps, resident, stages,
        )  # fmt: skip

    def start(self, attention: Any, kernel: AttendKernel, parts: int) -> None:
        """All layers, one after the other."""
        strides = self.partials.stride(0), self.partials.stride(1)
        integers = [*strides, COLS, COLS + KV_HEADS * HEAD, KV_HEADS, 0, 0, COLS]
        for caches in self.layers:
            tensors = [*self.before, *caches, *self.after]
            attention.launch(kernel, (self.case.rows, KV_HEADS, parts), tensors, [0.0, 0.088, 0.0], integers, True)

    @property
    def read_bytes(self) -> float:
        """Keys and values of one layer, with their scales."""
        each = 2.0 if self.case.element == "bf16" else 1.0 + 2.0 / 32
        return 2 * self.case.rows * self.case.context * KV_HEADS * HEAD * each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="rows x context of the cases to run, such as 256x192")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    attention = DecodeAttention(device)
    for case in CASES:
        if arguments.only not in (None, f"{case.rows}x{case.context}"):
            continue
        inputs = Inputs(case, device)
        bound = inputs.read_bytes / LIMIT_GB_PER_S / 1e3
        print(f"{case.rows} rows, {case.context} tokens, {case.element}: {bound:.1f} us for the bytes", flush=True)
        kernels = [inputs.kernel(*each) for each in case.sizes]
        attention.prepare(kernels)
        for kernel in kernels:
            for parts in case.parts:
                us = replay_ms(lambda: inputs.start(attention, kernel, parts)) / LAYERS * 1e3  # noqa: B023
                size = f"{kernel.warps} warps, {kernel.resident} resident, {kernel.stages} stages"
                print(f"  {size}, {parts} parts: {us:.2f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
