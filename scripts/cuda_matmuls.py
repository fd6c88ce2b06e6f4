"""Check and time the quantised matmuls on a CUDA device: `python scripts/cuda_matmuls.py check load time fp8 search`.

`check` runs the tests of the kernels. `load` times packing. `time` runs the linear layers of the 8B shape, 32 layers in
one CUDA graph, partial sums written and not yet summed, gate and up with the gated epilogue, and the head. `fp8` times
the same layers of prompts in 8-bit floats beside halves, and torch's matmul of 8-bit floats without scales of groups.
`search` tries tiles and splits for each shape and writes the table of the best to the file named by --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from realizar.backends.cuda.matmul.fp8 import FP8_INPUT, launch_fp8, route_fp8
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat, make_buffer
from realizar.backends.cuda.matmul.linears import launch_gated, route_gated
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.matmul.tuning_table import best_lines, write_table
from realizar.backends.cuda.native.sources import MatvecTiles
from realizar.backends.cuda.tuning.measure import DeviceMeter, copies, replay_ms
from realizar.backends.cuda.tuning.sweep import TOKEN_COUNTS, Shape, sweep
from realizar.backends.cuda.weights.pack_raw import Packer
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.ggml_layouts import GGML_LAYOUTS, Q4_K, Q6_K
from realizar.quantization.layout import WeightLayout
from realizar.quantization.random_blocks import random_blocks

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
CHECKS = tuple(
    f"tests/backends/cuda/matmul/test_{name}_gpu.py"
    for name in ("matmul_kernels", "gated_matmuls", "gated_integers", "fp8")
)
FP8_TOKENS = (1024, 2048, 8192)
# Of the mat-vec that ends with an activation: parts, unroll, blocks.
GATED_FEW = ((1, 2, 8), (2, 2, 4), (2, 2, 6), (2, 2, 7), (2, 1, 8), (3, 2, 4), (4, 2, 3), (4, 1, 4))


def time_packing() -> None:
    """Raw blocks in memory to packed weights on the device, the second time."""
    packer, taken = Packer("cuda"), 0.0
    data = random_blocks(GGMLType.Q4_K, 28672, 4096, np.random.default_rng(0), 0.02)
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.monotonic()
        packer.pack([block_source(GGMLType.Q4_K, data, 28672, 4096)])
        torch.cuda.synchronize()
        taken = time.monotonic() - started
    print(f"packing Q4_K: {data.size / taken / 1e9:.1f} GB/s of the file", flush=True)


class Bench:
    """The matrices of the 8B shape and what they are multiplied with."""

    def __init__(self, matmuls: MatmulKernels, layout: WeightLayout, count: int = LAYERS) -> None:
        self.matmuls = matmuls
        self.stacks = {n: copies(r, c, count, layout) for n, (r, c) in SHAPES.items()}
        self.inputs: dict[tuple[int, int, InputFormat], ActivationBuffer] = {}
        self.partials = torch.empty(3 << 26, device="cuda")

    def input(self, tokens: int, cols: int, activation_format: InputFormat) -> ActivationBuffer:
        key = (tokens, cols, activation_format)
        if key not in self.inputs:
            self.inputs[key] = self.matmuls.written(torch.randn(tokens, cols, device="cuda"), activation_format)
        return self.inputs[key]

    def run(self, name: str, layer: int, tokens: int, config: MatmulConfig) -> None:
        matrix = self.stacks[name][layer]
        out = self.partials[: config.splits * tokens * matrix.out_features].view(
            config.splits, tokens, matrix.out_features
        )
        self.matmuls.launch(matrix, self.input(tokens, matrix.in_features, config.format), out, tokens, config)

    def shape_ms(self, name: str, tokens: int, config: MatmulConfig, repeats: int = 5) -> float:
        """All layers of one shape."""
        count = len(self.stacks[name])

        def run() -> None:
            for layer in range(count):
                self.run(name, layer, tokens, config)

        return replay_ms(run, repeats)

    def all_ms(self, tokens: int, configs: dict[str, MatmulConfig]) -> float:
        """All layers."""
        count = len(self.stacks["o"])

        def run() -> None:
            for layer, name in itertools.product(range(count), SHAPES):
                self.run(name, layer, tokens, configs[name])

        return replay_ms(run, 15)

    def bytes(self, name: str) -> int:
        return sum(matrix.size_bytes for matrix in self.stacks[name])


def line(bench: Bench, tokens: int, configs: dict[str, MatmulConfig], label: str) -> None:
    """Time one number of tokens and print it: each shape, then all in one graph."""
    bench.matmuls.prepare([(bench.stacks[n][0].format, c) for n, c in configs.items()])
    parts = {n: bench.shape_ms(n, tokens, c) for n, c in configs.items()}
    total = bench.all_ms(tokens, configs)
    size = sum(bench.bytes(n) for n in SHAPES)
    flops = 2 * tokens * sum(r * c for r, c in SHAPES.values()) * len(bench.stacks["o"])
    each = "  ".join(f"{n} {ms:.3f} ({bench.bytes(n) / ms / 1e6:.0f} GB/s)" for n, ms in parts.items())
    rates = f"{size / total / 1e6:5.0f} GB/s  {flops / total / 1e9:5.0f} TFLOP/s"
    print(f"{label} tokens {tokens:5d}  {total:7.3f} ms  {rates} | {each}")
    sys.stdout.flush()


def time_mixed(matmuls: MatmulKernels) -> None:
    """Q, K and V of one layer where V is of another type, in one grid, against all of one type."""
    stacks = [copies(5120, 4096, LAYERS, Q4_K), copies(1024, 4096, LAYERS, Q6_K)]
    whole = copies(6144, 4096, LAYERS, Q4_K)
    partials = torch.empty((12, 64, 6144), device="cuda")
    for tokens in (1, 8, 64):
        x = matmuls.written(torch.randn(tokens, 4096, device="cuda"), matmuls.activation_format(tokens))
        config = matmuls.route_merged(tokens, [stack[0] for stack in stacks])
        one = matmuls.route(tokens, whole[0])

        def mixed() -> None:
            for pair in zip(*stacks, strict=True):
                matmuls.launch_merged(pair, x, partials, tokens, config)  # noqa: B023

        def alone() -> None:
            for matrix in whole:
                matmuls.launch(matrix, x, partials, tokens, one)  # noqa: B023

        print(
            f"qkv with V in Q6_K, tokens {tokens}: {replay_ms(mixed):.3f} ms; all Q4_K {replay_ms(alone):.3f}",
            flush=True,
        )


def time_gated(matmuls: MatmulKernels, layout: WeightLayout) -> None:
    """Gate and up, 32 layers, ending with the activation, against partial sums that are not yet read."""
    matrices = [dataclasses.replace(one, interleaved=True) for one in copies(28672, 4096, LAYERS, layout)]
    for tokens in TOKENS:
        gated, plain = route_gated(matmuls, tokens, matrices[0], "silu"), matmuls.route(tokens, matrices[0])
        if gated is None:
            continue
        matmuls.prepare([(matrices[0].format, config) for config in (gated, plain)])
        x, target = (matmuls.written(torch.randn(tokens, cols, device="cuda"), gated.format) for cols in (4096, 14336))
        partials = torch.empty((plain.splits, tokens, 28672), device="cuda")

        def all_gated(config: MatmulConfig) -> None:
            for matrix in matrices:
                launch_gated(matmuls, matrix, x, target, tokens, config)  # noqa: B023

        def all_plain() -> None:
            for matrix in matrices:
                matmuls.launch(matrix, x, partials, tokens, plain)  # noqa: B023

        each = f"{replay_ms(partial(all_gated, gated)):7.3f} ms with silu, {replay_ms(all_plain):7.3f} without"
        print(f"gate and up, tokens {tokens:5d}: {each}", flush=True)
        for shape in GATED_FEW if gated.format.kind == "int8" else ():
            gated = dataclasses.replace(gated, tiles=MatvecTiles(tokens, 2, *shape))
            print(f"  parts, unroll, blocks {shape}: {replay_ms(partial(all_gated, gated)):7.3f} ms", flush=True)


def time_all(matmuls: MatmulKernels, layout: WeightLayout) -> None:
    bench = Bench(matmuls, layout)
    for tokens in TOKENS:
        configs = {n: matmuls.route(tokens, stack[0]) for n, stack in bench.stacks.items()}
        line(bench, tokens, configs, layout.name)
    del bench
    time_gated(matmuls, layout)
    time_mixed(matmuls)
    heads = copies(128256, 4096, 2, Q6_K)
    partials = torch.empty((1, 64, 128256), device="cuda")
    for tokens in (1, 8, 64):
        config = dataclasses.replace(matmuls.route(tokens, heads[0]), splits=1)
        x = matmuls.written(torch.randn(tokens, 4096, device="cuda"), config.format)

        def run() -> None:
            for head in heads:
                matmuls.launch(head, x, partials, tokens, config)  # noqa: B023

        ms = replay_ms(run) / 2
        print(f"head Q6_K tokens {tokens}: {ms:.3f} ms, {heads[0].size_bytes / ms / 1e6:.0f} GB/s", flush=True)


def time_fp8(matmuls: MatmulKernels, layout: WeightLayout) -> None:
    """us and TFLOP/s of a layer's matmuls: in 8-bit floats, in halves, and torch's of 8-bit floats."""
    for (name, (out_features, cols)), tokens in itertools.product(SHAPES.items(), FP8_TOKENS):
        stack = copies(out_features, cols, 4, layout)
        interleaved = name == "gate_up"
        matrices = [dataclasses.replace(one, interleaved=interleaved) for one in stack]
        in_halves = route_gated(matmuls, tokens, matrices[0], "silu") if interleaved else None
        configs = (
            route_fp8(matmuls, tokens, matrices[:1], "silu" if interleaved else None),
            in_halves or matmuls.route(tokens, matrices[0]),
        )
        matmuls.prepare([(matrices[0].format, config) for config in configs])
        sums = torch.empty((1, 1) if interleaved else (configs[1].splits, tokens, out_features), device="cuda")
        times = []
        for config in configs:
            x, target = (make_buffer(config.format, each, tokens, matmuls.device) for each in (cols, out_features // 2))
            values = torch.randn(tokens * cols, device="cuda")  # zeros would take less power
            if config.format.kind == "fp8":
                x.codes.view(-1)[: len(values)] = values.to(torch.float8_e4m3fn).view(torch.uint8)
                x.terms.fill_(0.01)
            else:
                x.values.view(-1)[: len(values)] = values

            def run() -> None:
                for matrix in matrices:  # noqa: B023
                    if config.epilogue is not None:  # noqa: B023
                        launch_gated(matmuls, matrix, x, target, tokens, config)  # noqa: B023
                    elif config.format == FP8_INPUT:  # noqa: B023
                        launch_fp8(matmuls, [matrix], x, sums, tokens, config, [0])  # noqa: B023
                    else:
                        matmuls.launch(matrix, x, sums, tokens, config)  # noqa: B023

            times.append(replay_ms(run))
        plain = torch.randn((tokens, cols), device="cuda").to(torch.float8_e4m3fn)
        weights = torch.randn((out_features, cols), device="cuda").to(torch.float8_e4m3fn).t()
        one = torch.ones((), device="cuda")
        times.append(4 * replay_ms(lambda: torch._scaled_mm(plain, weights, one, one, out_dtype=torch.bfloat16)))  # noqa: B023
        each = ", ".join(
            f"{label} {ms * 250:.1f} us, {8 * tokens * out_features * cols / ms / 1e9:.0f} TFLOP/s"
            for label, ms in zip(("8-bit floats", "halves", "torch's"), times, strict=True)
        )
        print(f"{name}, tokens {tokens}: {each}", flush=True)


def run_search(matmuls: MatmulKernels, layout: WeightLayout, row_counts: list[int], out: Path | None) -> None:
    """Print the best of each shape and number of tokens, and write them."""
    started = time.monotonic()
    shapes = [Shape(tokens, cols, layout) for tokens, cols in SHAPES.values()]
    lines = sweep(matmuls.tuning, shapes, row_counts, DeviceMeter(matmuls))
    for best in best_lines(lines):
        print(*best.to_json(), f"{best.cost:.5f}")
    print(f"{len(lines)} candidates in {time.monotonic() - started:.1f} s", flush=True)
    if out is not None:
        write_table(out, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("check", "load", "time", "fp8", "search"))
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--tokens", default=",".join(map(str, TOKEN_COUNTS)))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    matmuls = MatmulKernels("cuda")
    print(torch.cuda.get_device_name(), matmuls.arch, flush=True)
    layout = GGML_LAYOUTS[GGMLType[arguments.type]]
    if "check" in arguments.what and pytest.main(["-q", "-p", "no:cacheprovider", "-m", "gpu", *CHECKS]) != 0:
        sys.exit("the matmuls are wrong")
    if "load" in arguments.what:
        time_packing()
    if "time" in arguments.what:
        time_all(matmuls, layout)
    if "fp8" in arguments.what:
        time_fp8(matmuls, layout)
    if "search" in arguments.what:
        run_search(matmuls, layout, [int(tokens) for tokens in arguments.tokens.split(",")], arguments.out)


if __name__ == "__main__":
    main()
