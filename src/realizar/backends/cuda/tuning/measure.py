"""Measuring tiles and splits on the device at hand: what makes the tables that `tuning` reads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat
from realizar.backends.cuda.matmul.quantized import ActivationFormat, Activations, ProductConfig, Products
from realizar.backends.cuda.matmul.tuning_table import Line, own_table, updated_lines, write_table
from realizar.backends.cuda.native.sources import MatvecTiles, Tiles
from realizar.backends.cuda.tuning.sweep import Shape, sweep
from realizar.backends.cuda.weights.pack import PackedMatrix, pack_matrix
from realizar.errors import CapacityError
from realizar.quantization import WeightLayout, random_source

_CACHE_TIMES = 4  # matrices together are so many times the last-level cache


def copies(rows: int, cols: int, count: int, layout: WeightLayout, compact: bool = False) -> list[PackedMatrix]:
    """Random matrices of one shape, each in memory of its own; rows repeat after 64, which no kernel notices."""
    one = pack_matrix(random_source(layout, BLOCK, cols, np.random.default_rng(1), 0.02), "cuda", compact)
    strips = -(-rows // BLOCK)
    scales = one.block_scales.repeat(strips)
    return [
        dataclasses.replace(one, rows=rows, weights=one.weights.repeat(strips), block_scales=scales)
        for _ in range(count)
    ]


def written(products: Products, x: torch.Tensor, form: ActivationFormat) -> Activations:
    """float32 rows in a format."""
    return products.to_int8(x) if form.kind == "int8" else products.to_half(x, form.block_rows)


def replay_ms(run: Callable[[], None], repeats: int = 7) -> float:
    """Median time of a CUDA graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return median_ms(graph.replay, repeats)


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time on the device of what `run` launches."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class DeviceMeter:
    """Times products on the device at hand; matrices of a shape together do not fit its cache.

    Args:
        products: of the device.
    """

    def __init__(self, products: Products) -> None:
        self._products = products
        self._matrices: list[PackedMatrix] = []
        self._inputs: dict[tuple[int, ActivationFormat], Activations] = {}

    def take(self, shape: Shape) -> FragmentFormat:
        self._matrices, self._inputs = [], {}  # freed before others are made
        one = copies(shape.rows_out, shape.cols, 1, shape.layout)[0]
        cache = int(torch.cuda.get_device_properties(self._products.device).L2_cache_size)
        count = max(2, _CACHE_TIMES * cache // one.size_bytes)
        self._matrices = copies(shape.rows_out, shape.cols, count, shape.layout)
        return one.format

    def prepare(self, rows: int, tiles: Sequence[Tiles]) -> None:
        form = self._matrices[0].format
        self._products.prepare([(form, self._config(each, 1, rows)) for each in tiles])

    def ms(self, rows: int, tiles: Tiles, splits: int) -> float:
        config, first = self._config(tiles, splits, rows), self._matrices[0]
        key = rows, config.format
        if key not in self._inputs:
            x = torch.randn(rows, first.cols, device=self._products.device)
            self._inputs = {key: written(self._products, x, config.format)}
        x_written = self._inputs[key]
        partials = torch.empty((splits, rows, first.rows), device=self._products.device)

        def run() -> None:
            for matrix in self._matrices:
                self._products.launch(matrix, x_written, partials, rows, config)

        return replay_ms(run, 3) / len(self._matrices)

    def _config(self, tiles: Tiles, splits: int, rows: int) -> ProductConfig:
        form = ActivationFormat("int8", 1) if isinstance(tiles, MatvecTiles) else ActivationFormat("half", tiles.rows)
        dependent = self._products.capability >= (9, 0) and self._products.tuning.dependent(rows)
        return ProductConfig(tiles, form, splits, dependent)


def tune_device(
    device: DeviceProfile, shapes: Sequence[Shape], row_counts: Sequence[int], measured: Callable[[Line], None]
) -> Path:
    """Measure the products of a model here, and write this machine's table: what it says of others stays.

    Args:
        measured: called with each candidate's line.

    Returns:
        Where the table is.

    Raises:
        CapacityError: the card runs no CUDA products, or has too little memory.
        KernelError: no kernel compiles.
    """
    if not device.has_cuda_kernels:
        raise CapacityError(f"{device.name} runs no kernels that could be tuned: they need compute capability 8.0")
    with device_errors():
        products = Products(device.torch_device)
        lines = sweep(products.tuning, shapes, row_counts, DeviceMeter(products), measured)
    path = own_table(device.name)
    write_table(path, updated_lines(products.tuning.lines, lines))
    return path
