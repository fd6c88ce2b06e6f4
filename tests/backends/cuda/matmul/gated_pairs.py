"""Gate and up of random feed-forwards, interleaved on a GPU, and what their matmuls end with in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.matmul.linears import launch_gated, route_gated
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import BlockSource, block_source
from realizar.quantization.random_blocks import random_blocks

TYPES = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.IQ4_NL)
ACTIVATIONS: tuple[GatedActivation, ...] = ("silu", "gelu_tanh", "gelu", "relu_squared")
WIDTH, COLS = 320, 512  # five strips each: with two groups the last block of the Hopper kernel ends early


def raw_pair(ggml_type: GGMLType, width: int, cols: int) -> list[BlockSource]:
    rngs = [np.random.default_rng(seed) for seed in range(2)]
    return [block_source(ggml_type, random_blocks(ggml_type, width, cols, rng, 0.05), width, cols) for rng in rngs]


def pair(ggml_type: GGMLType, width: int = WIDTH, cols: int = COLS) -> tuple[PackedMatrix, list[torch.Tensor]]:
    """Gate and up interleaved, and what they are."""
    sources = raw_pair(ggml_type, width, cols)
    exact = [torch.from_numpy(each.dequantize()).to("cuda", torch.float64) for each in sources]
    return pack_by_threads(sources, "cuda", interleaved=True), exact


def expected(x: torch.Tensor, exact: list[torch.Tensor], activation: GatedActivation) -> torch.Tensor:
    gate, up = (x.double() @ each.T for each in exact)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "relu_squared":
        return torch.relu(gate) ** 2 * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def down_projection(width: int) -> tuple[PackedMatrix, torch.Tensor]:
    """The matmul that consumes the activation: a matrix [256, width] on a GPU, and its float64 values."""
    data = random_blocks(GGMLType.Q6_K, 256, width, np.random.default_rng(3), 0.05)
    source = block_source(GGMLType.Q6_K, data, 256, width)
    return pack_by_threads([source], "cuda"), torch.from_numpy(source.dequantize()).to("cuda", torch.float64)


def check_chain(
    matmuls: MatmulKernels, tokens: int, made: Callable[[MatmulConfig, int], tuple[ActivationBuffer, torch.Tensor]],
    poisoned: Callable[[MatmulConfig, int], ActivationBuffer], poison: Callable[[ActivationBuffer], object],
    tolerance: float,
) -> MatmulConfig:  # fmt: skip
    """Gate, up and down as of an 8B model, in a graph of dependent launches: as float64 has it, each time the same.

    Args:
        made: from a config and columns: an input, and float64 of what the matmul reads in it.
        poisoned: from a config and columns: where the activation goes. poison: spoils that again.
    """
    width, cols = 14336, 1024
    matrix, exact = pair(GGMLType.Q4_K, width, cols)
    down, exact_down = down_projection(width)
    first, second = route_gated(matmuls, tokens, matrix, "silu"), matmuls.route(tokens, down)
    assert first is not None
    assert first.format == second.format
    source, x = made(first, cols)
    target = poisoned(first, width)
    partials = torch.full((second.splits, tokens, 256), torch.nan, device="cuda")

    def chain() -> None:
        for _ in range(3):
            launch_gated(matmuls, matrix, source, target, tokens, first)
            matmuls.launch(down, target, partials, tokens, second)

    chain()
    reference = expected(x, exact, "silu") @ exact_down.T
    assert float((partials.double().sum(0) - reference).norm() / reference.norm()) < tolerance
    check_replays(chain, partials, lambda: poison(target))
    return first


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
