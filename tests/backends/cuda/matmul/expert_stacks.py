"""Random experts packed for the grouped matmuls, with their float64 values, and choices of experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.layouts.fragments import FLOATS, fragment_floats
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import MatrixSource

Made = Callable[[int, int, np.random.Generator], MatrixSource]
"""A random matrix of so many out_features and columns."""


def float_matrix(out_features: int, cols: int, rng: np.random.Generator) -> tuple[PackedMatrix, torch.Tensor]:
    """A matrix of bfloat16 values as halves in fragment order."""
    values = torch.from_numpy(rng.standard_normal((out_features, cols)).astype(np.float32) * 0.05).bfloat16().float()
    data, scales = fragment_floats(values.numpy())
    packed = PackedMatrix(out_features, cols, FLOATS, torch.from_numpy(data), torch.from_numpy(scales), None)
    return packed, values.double()


def expert_matrix(
    ggml_type: GGMLType | Made, out_features: int, cols: int, rng: np.random.Generator, gated: bool
) -> tuple[PackedMatrix, torch.Tensor]:
    """One expert's matrix, or its gate and up interleaved; and the values, gate above up."""
    if ggml_type == GGMLType.BF16:
        assert not gated
        return float_matrix(out_features, cols, rng)
    sizes = [out_features // 2] * 2 if gated else [out_features]
    if isinstance(ggml_type, GGMLType):
        blocks = [random_blocks(ggml_type, rows, cols, rng, 0.05) for rows in sizes]
        sources: list[MatrixSource] = [
            block_source(ggml_type, data, rows, cols) for data, rows in zip(blocks, sizes, strict=True)
        ]
    else:
        sources = [ggml_type(rows, cols, rng) for rows in sizes]
    values = np.concatenate([source.dequantize() for source in sources])
    return pack_by_threads(sources, "cpu", interleaved=gated), torch.from_numpy(values).double()


def random_stack(
    ggml_type: GGMLType | Made, count: int, out_features: int, cols: int, *, gated: bool = False,
    seed: int = 0,
) -> tuple[PackedExperts, torch.Tensor]:  # fmt: skip
    """Experts on the GPU, and float64 [count, out_features, cols] of their values."""
    rng = np.random.default_rng(seed)
    packed = [expert_matrix(ggml_type, out_features, cols, rng, gated) for _ in range(count)]
    first = packed[0][0]
    weights = torch.cat([matrix.weights for matrix, _ in packed]).cuda()
    scales = torch.cat([matrix.block_scales for matrix, _ in packed]).cuda()
    table = None if first.table is None else first.table.cuda()
    stack = PackedExperts(out_features, cols, first.format, weights, scales, table, gated, count=count)
    return stack, torch.stack([values for _, values in packed]).cuda()


def random_choices(rows: int, per_token: int, experts: int, seed: int = 0, skew: float = 0.0) -> NDArray[np.int32]:
    """int32 [rows, per_token] of different experts of a row; `skew`: the exponent of Zipf's law."""
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(rows, experts)) - skew * np.log(np.arange(1, experts + 1))
    return np.argsort(-noise, axis=1)[:, :per_token].astype(np.int32)


def expected_lists(
    chosen: NDArray[np.int32], experts: int, tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Slots, work and starts as the sort must write them."""
    flat = chosen.reshape(-1)
    slots: list[int] = []
    work: list[int] = []
    starts = [0]
    for expert in range(experts):
        pairs = np.flatnonzero(flat == expert)
        tiles = -(-len(pairs) // tokens)
        slots += [*pairs.tolist(), *[-1] * (tiles * tokens - len(pairs))]
        work += [expert * 2 + (tiles > 1)] * tiles
        starts.append(starts[-1] + len(pairs))
    return np.array(slots, np.int32), np.array([len(work), *work], np.int32), np.array(starts, np.int32)
