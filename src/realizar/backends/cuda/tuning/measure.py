"""Timing tiles and splits on the device at hand, and writing the table that `matmul.tuning_table` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat
from realizar.backends.cuda.matmul.expert_lines import ExpertLine, updated_expert_lines
from realizar.backends.cuda.matmul.quantized import ActivationFormat, Activations, MatmulConfig, MatmulKernels
from realizar.backends.cuda.matmul.tuning_table import Line, own_table, updated_lines, write_table
from realizar.backends.cuda.native.sources import MatvecTiles, Tiles
from realizar.backends.cuda.tuning.experts import TunedExperts, sweep_experts
from realizar.backends.cuda.tuning.measure_experts import ExpertDeviceMeter
from realizar.backends.cuda.tuning.replay import replay_ms
from realizar.backends.cuda.tuning.sweep import Shape, sweep
from realizar.backends.cuda.weights.pack import PackedMatrix, pack_matrix
from realizar.errors import CapacityError
from realizar.quantization import WeightLayout, random_source

_CACHE_TIMES = 4  # matrices together are this many times the last-level cache


def copies(out_features: int, cols: int, count: int, layout: WeightLayout, compact: bool = False) -> list[PackedMatrix]:
    """Random matrices of one shape, each in memory of its own; rows repeat after 64, which no kernel notices."""
    one = pack_matrix(random_source(layout, BLOCK, cols, np.random.default_rng(1), 0.02), "cuda", compact)
    strips = -(-out_features // BLOCK)
    scales = one.block_scales.repeat(strips)
    return [
        dataclasses.replace(one, out_features=out_features, weights=one.weights.repeat(strips), block_scales=scales)
        for _ in range(count)
    ]


def written(matmuls: MatmulKernels, x: torch.Tensor, activation_format: ActivationFormat) -> Activations:
    """float32 activations in a format."""
    return (
        matmuls.to_int8(x) if activation_format.kind == "int8" else matmuls.to_half(x, activation_format.block_tokens)
    )


class DeviceMeter:
    """Times matmuls on the device at hand; matrices of a shape together do not fit its cache.

    Args:
        matmuls: of the device.
    """

    def __init__(self, matmuls: MatmulKernels) -> None:
        self._matmuls = matmuls
        self._matrices: list[PackedMatrix] = []
        self._inputs: dict[tuple[int, ActivationFormat], Activations] = {}

    def take(self, shape: Shape) -> FragmentFormat:
        self._matrices, self._inputs = [], {}  # freed before others are made
        one = copies(shape.out_features, shape.cols, 1, shape.layout)[0]
        cache = int(torch.cuda.get_device_properties(self._matmuls.device).L2_cache_size)
        count = max(2, _CACHE_TIMES * cache // one.size_bytes)
        self._matrices = copies(shape.out_features, shape.cols, count, shape.layout)
        return one.format

    def prepare(self, tokens: int, tiles: Sequence[Tiles]) -> None:
        weight_format = self._matrices[0].format
        self._matmuls.prepare([(weight_format, self._config(each, 1, tokens)) for each in tiles])

    def ms(self, tokens: int, tiles: Tiles, splits: int) -> float:
        config, first = self._config(tiles, splits, tokens), self._matrices[0]
        key = tokens, config.format
        if key not in self._inputs:
            x = torch.randn(tokens, first.in_features, device=self._matmuls.device)
            self._inputs = {key: written(self._matmuls, x, config.format)}
        x_written = self._inputs[key]
        partials = torch.empty((splits, tokens, first.out_features), device=self._matmuls.device)

        def run() -> None:
            for matrix in self._matrices:
                self._matmuls.launch(matrix, x_written, partials, tokens, config)

        return replay_ms(run, 3) / len(self._matrices)

    def _config(self, tiles: Tiles, splits: int, tokens: int) -> MatmulConfig:
        activation_format = (
            ActivationFormat("int8", 1) if isinstance(tiles, MatvecTiles) else ActivationFormat("half", tiles.tokens)
        )
        dependent = self._matmuls.capability >= (9, 0) and self._matmuls.tuning.dependent(tokens)
        return MatmulConfig(tiles, activation_format, splits, dependent)


def tune_device(
    device: DeviceProfile, shapes: Sequence[Shape], token_counts: Sequence[int],
    measured: Callable[[Line | ExpertLine], None], mixtures: Sequence[TunedExperts] = (),
) -> Path:  # fmt: skip
    """Measure the matmuls of a model here, and write this machine's table; its lines of other matmuls stay.

    Args:
        measured: called with each candidate's line. mixtures: whose grouped matmuls are measured too.

    Returns:
        The path of the table.

    Raises:
        CapacityError: the card runs no CUDA matmuls, or has too little memory.
        KernelError: no kernel compiles.
    """
    if not device.has_cuda_kernels:
        raise CapacityError(f"{device.name} can't run the kernels that are tuned: they need compute capability 8.0")
    with device_errors():
        matmuls = MatmulKernels(device.torch_device)
        tuning = matmuls.tuning
        lines = sweep(tuning, shapes, token_counts, DeviceMeter(matmuls), measured)
        of_experts = sweep_experts(tuning, mixtures, token_counts, ExpertDeviceMeter(matmuls), measured)
    path = own_table(device.name)
    write_table(path, updated_lines(tuning.lines, lines), updated_expert_lines(tuning.expert_lines, of_experts))
    return path
