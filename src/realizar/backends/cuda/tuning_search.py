"""Measuring tiles and splits on the device at hand: what makes the tables that `tuning` reads."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from realizar.backends.cuda.fragments import BLOCK
from realizar.backends.cuda.native.sources import MatvecTiles, Tiles
from realizar.backends.cuda.pack import PackedMatrix, pack_matrix
from realizar.backends.cuda.products import ActivationFormat, Activations, ProductConfig, Products
from realizar.backends.cuda.tuning import Line
from realizar.backends.cuda.tuning_candidates import candidates, split_counts
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import KernelError
from realizar.quantization import random_blocks, to_planes

_LOG = logging.getLogger(__name__)
_CACHE_TIMES = 4  # matrices together are so many times the last-level cache


def copies(rows: int, cols: int, count: int, ggml_type: GGMLType, compact: bool = False) -> list[PackedMatrix]:
    """Random matrices of one shape, each in memory of its own; rows repeat after 64, which no kernel notices."""
    data = random_blocks(ggml_type, BLOCK, cols, np.random.default_rng(1), 0.02)
    one = pack_matrix(to_planes(ggml_type, data, BLOCK, cols), "cuda", compact)
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
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def search(
    products: Products, shapes: Iterable[tuple[int, int]], row_counts: Sequence[int],
    ggml_type: GGMLType = GGMLType.Q4_K, measured: Callable[[Line], None] | None = None,
) -> list[Line]:  # fmt: skip
    """Time every candidate for these shapes and numbers of activation rows.

    Args:
        products: of the device to measure. shapes: rows and columns of weights. row_counts: activation rows.
        ggml_type: of the weights.
        measured: called with each line.

    Returns:
        A line per candidate that runs; `tuning.best_lines` picks from them.
    """
    lines: list[Line] = []
    for rows_out, cols in shapes:
        one = copies(rows_out, cols, 1, ggml_type)[0]
        cache = int(torch.cuda.get_device_properties(products.device).L2_cache_size)
        matrices = copies(rows_out, cols, max(2, _CACHE_TIMES * cache // one.size_bytes), ggml_type)
        for rows in row_counts:
            for line in _measure(products, matrices, rows):
                lines.append(line)
                if measured is not None:
                    measured(line)
    return lines


def _measure(products: Products, matrices: Sequence[PackedMatrix], rows: int) -> Iterable[Line]:
    """A line for each candidate of one shape and number of rows."""
    first = matrices[0]
    tried = list(candidates(rows, first.format, products.tuning))
    products.prepare([(first.format, _config(products, tiles, 1, rows)) for tiles in tried])
    inputs: dict[ActivationFormat, Activations] = {}
    x = torch.randn(rows, first.cols, device=products.device)
    chunks = first.format.chunks(first.cols)
    for tiles in tried:
        for splits in split_counts(tiles, rows, first.rows, chunks, products.tuning.processors):
            config = _config(products, tiles, splits, rows)
            if config.format not in inputs:
                inputs[config.format] = written(products, x, config.format)
            partials = torch.empty((splits, rows, first.rows), device=products.device)

            def run(config: ProductConfig = config, partials: torch.Tensor = partials) -> None:
                for matrix in matrices:
                    products.launch(matrix, inputs[config.format], partials, rows, config)

            try:
                ms = replay_ms(run, 3) / len(matrices)
            except KernelError as error:
                _LOG.info("%s", error)
                break
            yield Line(rows, first.rows, first.cols, tiles, splits, ms)


def _config(products: Products, tiles: Tiles, splits: int, rows: int) -> ProductConfig:
    matvec = isinstance(tiles, MatvecTiles)
    form = ActivationFormat("int8", 1) if matvec else ActivationFormat("half", tiles.rows)
    return ProductConfig(tiles, form, splits, products.capability >= (9, 0) and products.tuning.dependent(rows))
