"""Gate and up of random feed-forwards, interleaved on a GPU, and what their products end with in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.pack import PackedMatrix, pack_matrix
from realizar.backends.cuda.pack_raw import RawMatrix
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization import random_blocks, to_planes

TYPES = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.IQ4_NL)
ACTIVATIONS: tuple[GatedActivation, ...] = ("silu", "gelu_tanh", "gelu")
WIDTH, COLS = 320, 512  # five strips each: with two groups the last block of the Hopper kernel ends early


def raw_pair(ggml_type: GGMLType, width: int, cols: int) -> list[RawMatrix]:
    rngs = [np.random.default_rng(seed) for seed in range(2)]
    return [RawMatrix(ggml_type, random_blocks(ggml_type, width, cols, rng, 0.05), width, cols) for rng in rngs]


def pair(ggml_type: GGMLType, width: int = WIDTH, cols: int = COLS) -> tuple[PackedMatrix, list[torch.Tensor]]:
    """Gate and up interleaved, and what they are."""
    planes = [to_planes(raw.ggml_type, raw.data, width, cols) for raw in raw_pair(ggml_type, width, cols)]
    exact = [torch.from_numpy(each.dequantize()).to("cuda", torch.float64) for each in planes]
    return pack_matrix(planes, "cuda", interleaved=True), exact


def expected(x: torch.Tensor, exact: list[torch.Tensor], activation: GatedActivation) -> torch.Tensor:
    gate, up = (x.double() @ each.T for each in exact)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def down_projection(width: int) -> tuple[PackedMatrix, torch.Tensor]:
    """What reads the activation: a matrix [256, width] on a GPU, and what it is."""
    data = random_blocks(GGMLType.Q6_K, 256, width, np.random.default_rng(3), 0.05)
    planes = to_planes(GGMLType.Q6_K, data, 256, width)
    return pack_matrix(planes, "cuda"), torch.from_numpy(planes.dequantize()).to("cuda", torch.float64)


def check_replays(chain: Callable[[], None], partials: torch.Tensor, poison: Callable[[], object]) -> None:
    """A graph of `chain` writes the partials that are there, each time, whatever `poison` has left before."""
    once = partials.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(5):
        poison()
        partials.fill_(torch.nan)
        graph.replay()
        assert torch.equal(partials, once)
