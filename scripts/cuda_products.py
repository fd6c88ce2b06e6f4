"""Check and time the quantised products on a CUDA device: `python scripts/cuda_products.py check load time search`.

`check` runs the tests of the kernels. `load` times packing. `time` runs the linear layers of the 8B shape, 32 layers in
one CUDA graph, partial sums written and not yet summed, and the head. `search` tries tiles and splits for each shape
and writes the table of the best to the file named by --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from realizar.backends.cuda.fragments import BLOCK, FragmentFormat
from realizar.backends.cuda.native.sources import MatvecTiles, Tiles, WgmmaTiles
from realizar.backends.cuda.pack import PackedMatrix, pack_matrix
from realizar.backends.cuda.pack_raw import Packer, RawMatrix
from realizar.backends.cuda.products import ActivationFormat, Activations, ProductConfig, Products
from realizar.backends.cuda.tuning import Line, best_lines
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import KernelError
from realizar.quantization import random_blocks, to_planes

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
CHECKS = ("tests/cuda/test_product_kernels_gpu.py",)


def activations_for(products: Products, x: torch.Tensor, form: ActivationFormat) -> Activations:
    return products.to_int8(x) if form.kind == "int8" else products.to_half(x, form.block_rows)


def time_packing() -> None:
    """Raw blocks in memory to packed weights on the device, the second time."""
    packer, taken = Packer("cuda"), 0.0
    data = random_blocks(GGMLType.Q4_K, 28672, 4096, np.random.default_rng(0), 0.02)
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.monotonic()
        packer.pack([RawMatrix(GGMLType.Q4_K, data, 28672, 4096)])
        torch.cuda.synchronize()
        taken = time.monotonic() - started
    print(f"packing Q4_K: {data.size / taken / 1e9:.1f} GB/s of the file", flush=True)


def layers(rows: int, cols: int, count: int, ggml_type: GGMLType, compact: bool) -> list[PackedMatrix]:
    """Matrices of one shape, each in memory of its own; their rows repeat after 64, which no kernel notices."""
    data = random_blocks(ggml_type, BLOCK, cols, np.random.default_rng(1), 0.02)
    one = pack_matrix(to_planes(ggml_type, data, BLOCK, cols), "cuda", compact)
    weights = one.weights.repeat(rows // 64)
    scales = one.block_scales.repeat(rows // 64)
    return [dataclasses.replace(one, rows=rows, weights=weights.clone(), block_scales=scales) for _ in range(count)]


def replay_ms(run: Callable[[], None], repeats: int = 7) -> float:
    """Median time of a CUDA graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Bench:
    """The matrices of the 8B shape and what they are multiplied with."""

    def __init__(self, products: Products, ggml_type: GGMLType, compact: bool, count: int = LAYERS) -> None:
        self.products = products
        self.stacks = {n: layers(r, c, count, ggml_type, compact) for n, (r, c) in SHAPES.items()}
        self.inputs: dict[tuple[int, int, ActivationFormat], Activations] = {}
        self.partials = torch.empty(3 << 26, device="cuda")

    def input(self, rows: int, cols: int, form: ActivationFormat) -> Activations:
        key = (rows, cols, form)
        if key not in self.inputs:
            self.inputs[key] = activations_for(self.products, torch.randn(rows, cols, device="cuda"), form)
        return self.inputs[key]

    def run(self, name: str, layer: int, rows: int, config: ProductConfig) -> None:
        matrix = self.stacks[name][layer]
        out = self.partials[: config.splits * rows * matrix.rows].view(config.splits, rows, matrix.rows)
        self.products.launch(matrix, self.input(rows, matrix.cols, config.format), out, rows, config)

    def shape_ms(self, name: str, rows: int, config: ProductConfig, repeats: int = 5) -> float:
        """All layers of one shape."""
        count = len(self.stacks[name])
        return replay_ms(lambda: [self.run(name, i, rows, config) for i in range(count)] and None, repeats)

    def all_ms(self, rows: int, configs: dict[str, ProductConfig]) -> float:
        """All layers."""
        count = len(self.stacks["o"])
        return replay_ms(
            lambda: [self.run(n, i, rows, configs[n]) for i, n in itertools.product(range(count), SHAPES)] and None, 15
        )

    def bytes(self, name: str) -> int:
        return sum(matrix.size_bytes for matrix in self.stacks[name])


def line(bench: Bench, rows: int, configs: dict[str, ProductConfig], label: str) -> None:
    """Time one number of rows and print it: each shape, then all in one graph."""
    bench.products.prepare([(bench.stacks[n][0].format, c) for n, c in configs.items()])
    parts = {n: bench.shape_ms(n, rows, c) for n, c in configs.items()}
    total = bench.all_ms(rows, configs)
    size = sum(bench.bytes(n) for n in SHAPES)
    flops = 2 * rows * sum(r * c for r, c in SHAPES.values()) * len(bench.stacks["o"])
    each = "  ".join(f"{n} {ms:.3f} ({bench.bytes(n) / ms / 1e6:.0f} GB/s)" for n, ms in parts.items())
    rates = f"{size / total / 1e6:5.0f} GB/s  {flops / total / 1e9:5.0f} TFLOP/s"
    print(f"{label} rows {rows:5d}  {total:7.3f} ms  {rates} | {each}")
    sys.stdout.flush()


def time_mixed(products: Products) -> None:
    """Q, K and V of one layer where V is of another type, in one grid, against all of one type."""
    stacks = [layers(5120, 4096, LAYERS, GGMLType.Q4_K, False), layers(1024, 4096, LAYERS, GGMLType.Q6_K, False)]
    whole = layers(6144, 4096, LAYERS, GGMLType.Q4_K, False)
    partials = torch.empty((12, 64, 6144), device="cuda")
    for rows in (1, 8, 64):
        x = activations_for(products, torch.randn(rows, 4096, device="cuda"), products.activation_format(rows))
        configs = products.route_merged(rows, [stack[0] for stack in stacks])
        one = products.route(rows, whole[0])

        def mixed() -> None:
            for pair in zip(*stacks, strict=True):
                products.launch_merged(pair, x, partials, rows, configs[0])  # noqa: B023

        def alone() -> None:
            for matrix in whole:
                products.launch(matrix, x, partials, rows, one)  # noqa: B023

        print(
            f"qkv with V in Q6_K, rows {rows}: {replay_ms(mixed):.3f} ms; all Q4_K {replay_ms(alone):.3f}", flush=True
        )


def time_all(products: Products, ggml_type: GGMLType, compact: bool) -> None:
    bench = Bench(products, ggml_type, compact)
    for rows in ROWS:
        configs = {n: products.route(rows, stack[0]) for n, stack in bench.stacks.items()}
        line(bench, rows, configs, ggml_type.name)
    del bench
    time_mixed(products)
    heads = layers(128256, 4096, 2, GGMLType.Q6_K, compact)
    partials = torch.empty((1, 64, 128256), device="cuda")
    for rows in (1, 8, 64):
        config = dataclasses.replace(products.route(rows, heads[0]), splits=1)
        x = activations_for(products, torch.randn(rows, 4096, device="cuda"), config.format)
        ms = replay_ms(lambda: [products.launch(h, x, partials, rows, config) for h in heads] and None) / 2  # noqa: B023
        print(f"head Q6_K rows {rows}: {ms:.3f} ms, {heads[0].size_bytes / ms / 1e6:.0f} GB/s", flush=True)


# strips, groups, stages, step, blocks
SMALL = [
    (1, 1, 4, 1, 3),
    (1, 1, 6, 1, 2),
    (1, 1, 8, 1, 2),
    (1, 1, 4, 2, 2),
    (1, 1, 3, 4, 2),
    (1, 2, 4, 1, 2),
    (1, 2, 3, 2, 2),
    (2, 1, 4, 1, 2),
    (2, 1, 6, 1, 2),
    (2, 1, 3, 2, 2),
    (2, 1, 6, 2, 1),
    (2, 2, 4, 1, 2),
    (2, 2, 8, 1, 1),
    (2, 2, 4, 2, 1),
    (1, 4, 4, 1, 1),
    (1, 2, 6, 2, 1),
    (1, 4, 4, 2, 1),
    (1, 2, 4, 2, 1),
]
LARGE = [
    (1, 1, 4, 1, 1),
    (1, 2, 4, 1, 1),
    (1, 2, 5, 1, 1),
    (2, 2, 4, 1, 1),
    (2, 2, 5, 1, 1),
    (2, 2, 6, 1, 1),
    (1, 2, 3, 2, 1),
    (1, 2, 2, 2, 1),
    (1, 1, 3, 2, 1),
    (2, 2, 3, 2, 1),
    (2, 2, 2, 2, 1),
    (1, 2, 4, 1, 2),
    (1, 1, 4, 1, 2),
    (1, 1, 2, 2, 2),
    (2, 1, 4, 1, 1),
    (2, 1, 3, 2, 1),
]


def candidates(rows: int, form: FragmentFormat) -> list[tuple[Tiles, ActivationFormat]]:
    """Tiles worth trying for a number of rows."""
    if rows < 8:
        shapes = [
            (8, 1, 2, 3),
            (4, 2, 2, 3),
            (2, 4, 2, 3),
            (8, 1, 1, 4),
            (4, 2, 1, 4),
            (4, 1, 2, 6),
            (8, 1, 4, 2),
            (4, 2, 4, 2),
            (8, 1, 3, 2),
            (4, 4, 2, 1),
        ]
        if rows > 1:
            shapes = [
                (8, 1, 1, 3),
                (4, 2, 1, 3),
                (8, 1, 2, 2),
                (4, 2, 2, 2),
                (8, 1, 1, 2),
                (4, 1, 2, 4),
                (4, 4, 1, 1),
                (2, 4, 1, 3),
            ]
        return [(MatvecTiles(rows, *shape), ActivationFormat("int8", 1)) for shape in shapes]
    block = next((size for size in (8, 16, 32, 64) if rows <= size), 128)
    return [
        (tiles, ActivationFormat("half", block))
        for tiles in (WgmmaTiles(block, *shape) for shape in (SMALL if block <= 64 else LARGE))
        if tiles.shared_bytes(form) * tiles.blocks <= 225_000
        and tiles.strips * (block // 2 + 32) + 48 <= (tiles.registers or 65_536 // (tiles.threads * tiles.blocks))
    ]


def split_counts(tiles: Tiles, rows_out: int, rows: int, chunks: int, processors: int) -> list[int]:
    """Splits worth trying: those that leave no more than about two waves."""
    blocks = (
        -(-rows_out // (16 * tiles.tiles))
        if isinstance(tiles, MatvecTiles)
        else tiles.grid(rows_out, 1, -(-rows // tiles.rows))[0] * -(-rows // tiles.rows)
    )
    parts = tiles.parts if isinstance(tiles, MatvecTiles) else 1
    limit = processors * tiles.blocks * 2.2
    return [s for s in (1, 2, 3, 4, 5, 6, 8, 12) if s == 1 or (blocks * s <= limit and chunks // (s * parts) >= 3)]


def search(products: Products, bench: Bench, counts: Sequence[int], found: list[Line]) -> None:
    """Best tiles and splits of each shape, printed and added to `found`."""
    form = bench.stacks["o"][0].format
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = {rows: candidates(rows, form) for rows in counts}
    started = time.monotonic()
    everything = [(t, f) for tried in wanted.values() for t, f in tried]
    products.prepare([(form, ProductConfig(t, f, 1)) for t, f in everything])
    print(f"built {len(everything)} kernels in {time.monotonic() - started:.1f} s", flush=True)
    for rows, tried in wanted.items():
        best: dict[str, tuple[float, ProductConfig]] = {}
        for name, (rows_out, cols) in SHAPES.items():
            for tiles, activation in tried:
                for splits in split_counts(tiles, rows_out, rows, cols // 64, processors):
                    config = ProductConfig(tiles, activation, splits, rows <= 128)
                    try:
                        ms = bench.shape_ms(name, rows, config, 3)
                    except KernelError as error:
                        print("fails", config.tiles, error)
                        break
                        continue
                    found.append(Line(rows, rows_out, cols, tiles, splits, ms / len(bench.stacks[name])))
                    if name not in best or ms < best[name][0]:
                        best[name] = (ms, config)
        line(bench, rows, {n: config for n, (_, config) in best.items()}, "best")
        for name, (ms, config) in best.items():
            print(f"    {name:8s} {ms:.3f} splits {config.splits} {config.tiles}")
    print(f"search took {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("check", "load", "time", "search"))
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--compact", action="store_true")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    products = Products("cuda")
    print(torch.cuda.get_device_name(), products.arch, flush=True)
    ggml_type = GGMLType[arguments.type]
    if "check" in arguments.what and pytest.main(["-q", "-p", "no:cacheprovider", "-m", "gpu", *CHECKS]) != 0:
        sys.exit("the products are wrong")
    if "load" in arguments.what:
        time_packing()
    if "time" in arguments.what:
        time_all(products, ggml_type, arguments.compact)
    if "search" in arguments.what:
        found: list[Line] = []
        bench = Bench(products, ggml_type, arguments.compact)
        search(products, bench, [int(r) for r in arguments.rows.split(",")], found)
        if arguments.out is not None:
            lines = [json.dumps(line.to_json()) for line in best_lines(found)]
            arguments.out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
