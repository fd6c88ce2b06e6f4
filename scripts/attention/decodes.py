"""Times attention of single tokens alone: the CUDA kernel of a model's shape, layer after layer in one graph.

    python scripts/attention/decodes.py --shape qwen3-0.6b --rows 256 --context 192
    ncu --clock-control none -k regex:attend --launch-count 1 python scripts/attention/decodes.py --rows 256 --only 0

Blocks of one context each; keys and values are random, and every layer has its own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch

from realizar.backends.cuda.attention.decode import DecodeAttention
from realizar.backends.cuda.native.attend_source import AttendKernel
from realizar.backends.cuda.tuning.measure import replay_ms
from realizar.models.generated.shapes import SHAPES, Shape

BLOCK, MOST_PARTS = 16, 64
LIMIT_GB_PER_S = 4400.0  # of an H200, for the column of what bytes alone take
SIZES = ((2, 16, 1, False), (2, 16, 1, True), (2, 12, 1, False), (2, 8, 2, True), (4, 16, 1, False), (8, 16, 1, False))
"""Warps, those resident on a multiprocessor, tiles that a warp has asked for, whether the copy engine fetches them."""


class Inputs:
    """Inputs and outputs of a step's attention; each layer has a cache of its own."""

    def __init__(self, shape: Shape, rows: int, context: int, element: str, layers: int) -> None:
        self.shape, self.rows, self.context, self.element = shape, rows, context, element
        per_row, head, kv_heads = -(-context // BLOCK), shape.head_size, shape.num_kv_heads
        device = torch.device("cuda", torch.cuda.current_device())
        cache = rows * per_row, kv_heads, BLOCK, head

        def ints(values: torch.Tensor) -> torch.Tensor:
            return values.to(device, torch.int32).contiguous()

        def entries() -> torch.Tensor:
            if element == "int8":
                return torch.randint(-100, 100, cache, dtype=torch.int8, device=device)
            return torch.randn(cache, device=device).to(torch.bfloat16)

        def scales() -> torch.Tensor:
            return torch.rand((*cache[:3], head // 32), device=device).half() / 100

        self.layers = [(entries(), entries(), scales(), scales()) for _ in range(layers)]
        table = ints(torch.randperm(rows * per_row)).view(rows, per_row)
        numbers, last = torch.arange(rows), context - 1
        decodes = torch.stack([numbers, numbers, torch.full((rows,), context), torch.full((rows,), last)], dim=1)
        self.heads, self.cols = shape.num_heads, shape.num_heads * head
        self.partials = torch.randn(1, rows, self.cols + 2 * kv_heads * head, device=device)
        angles, norm = torch.rand(context, head // 2, device=device), torch.ones(head, device=device)
        self.before = [self.partials, None, angles, angles, norm, norm, None, None]
        self.after = [
            ints(table[:, last // BLOCK] * BLOCK + last % BLOCK), None,
            torch.zeros(rows * MOST_PARTS * self.cols, device=device),
            torch.zeros(rows * MOST_PARTS * self.heads * 2, device=device), ints(torch.zeros(rows * kv_heads)),
            ints(decodes), table, ints(torch.full((1,), per_row)),
            torch.zeros((rows + 128) * self.cols, dtype=torch.float16, device=device),
            torch.zeros(rows + 128, device=device), torch.zeros((rows + 128) * self.cols // 8, device=device),
        ]  # fmt: skip

    def kernel(self) -> AttendKernel:
        """As a layer of the shape has it, for results in halves."""
        shape, block_tokens = self.shape, min(128, max(8, self.rows))
        norm = int(shape.architecture.startswith("qwen3"))
        return AttendKernel(
            shape.head_size, shape.num_heads // shape.num_kv_heads, 1, False, norm, False, shape.head_size, False,
            self.element, BLOCK, "half", block_tokens, least=4, runs=1 if self.element == "int8" else 4,
        )  # fmt: skip

    def start(self, attention: DecodeAttention, kernel: AttendKernel, dependent: bool) -> None:
        """All layers, one after the other."""
        shape = self.shape
        strides, kv_columns = self.partials.stride(), shape.num_kv_heads * shape.head_size
        integers = [*strides[:2], self.cols, self.cols + kv_columns, shape.num_kv_heads, 0, 0, self.cols]
        for caches in self.layers:
            tensors = [*self.before, *caches, *self.after]
            grid, numbers = (shape.num_kv_heads, self.rows, 1), [1e-6, 0.0, 0.088, 0.0]
            attention.launch(kernel, grid, tensors, numbers, integers, dependent)

    @property
    def read_bytes(self) -> float:
        """Keys and values of one layer, with their scales."""
        each = 2.0 if self.element == "bf16" else 1.0 + 2.0 / 32
        return 2 * self.rows * self.context * self.shape.num_kv_heads * self.shape.head_size * each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--kv-cache-dtype", default="bf16", choices=("bf16", "int8"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--only", type=int, help="index of the one size to run")
    arguments = parser.parse_args()
    inputs = Inputs(
        SHAPES[arguments.shape], arguments.rows, arguments.context, arguments.kv_cache_dtype, arguments.layers
    )
    bound = inputs.read_bytes / LIMIT_GB_PER_S / 1e3
    print(f"{arguments.shape}, {arguments.rows} rows of {arguments.context} tokens: {bound:.1f} us for the bytes")
    sizes = SIZES if arguments.only is None else SIZES[arguments.only : arguments.only + 1]
    kernels = [
        replace(inputs.kernel(), warps=warps, resident=resident, stages=stages, bulk=bulk)
        for warps, resident, stages, bulk in sizes
    ]
    attention = DecodeAttention(torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_capability())
    attention.prepare(kernels)
    for kernel in kernels:
        for dependent in (False, True):
            run = lambda: inputs.start(attention, kernel, dependent)  # noqa: B023, E731
            us = replay_ms(run) / arguments.layers * 1e3
            size = f"{kernel.warps} warps, {kernel.resident} resident, {kernel.stages} stages"
            size += ", copy engine" if kernel.bulk else ", lanes"
            print(f"  {size}{', dependent' * dependent}: {us:.2f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
