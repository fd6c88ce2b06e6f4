"""Dense matmuls of a layer in one launch on a GPU, against float64 and against launches of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.cuda.matmul.gated_pairs import check_replays, expected, pair
from backends.cuda.matmul.stored_inputs import integers
from realizar.backends.cuda.matmul.chain import Link, launch_chain
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.linears import launch_gated
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.matmul.residual import Residual, epilogue_square_parts, launch_residual
from realizar.backends.cuda.native.sources import MatvecTiles
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.random_blocks import random_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of Hopper"
    ),
]
POISON, SCALE, EPS = 77, 0.7, 1e-5


@dataclass(frozen=True)
class Layer:
    """Matrices between two layers' attention, and what they are in float64."""

    output: tuple[PackedMatrix, torch.Tensor]
    gate_up: tuple[PackedMatrix, list[torch.Tensor]]
    down: tuple[PackedMatrix, torch.Tensor]
    inputs: tuple[tuple[PackedMatrix, torch.Tensor], ...]

    @staticmethod
    def make(types: tuple[GGMLType, GGMLType, GGMLType], attended: int, hidden: int, wide: int) -> Layer:
        of_output, of_down, of_values = types
        inputs = matrix_of(of_output, 512, hidden, 7), matrix_of(of_values, 200, hidden, 8)
        output, down = matrix_of(of_output, hidden, attended, 5), matrix_of(of_down, hidden, wide, 6)
        return Layer(output, pair(of_output, wide, hidden), down, inputs)


def matrix_of(ggml_type: GGMLType, rows: int, cols: int, seed: int) -> tuple[PackedMatrix, torch.Tensor]:
    source = block_source(
        ggml_type, random_blocks(ggml_type, rows, cols, np.random.default_rng(seed), 0.05), rows, cols
    )
    return pack_by_threads([source], "cuda"), torch.from_numpy(source.dequantize()).to("cuda", torch.float64)


def poisoned(tokens: int, cols: int) -> ActivationBuffer:
    codes = torch.full((tokens + 1, -(-cols // 64) * 64), POISON, dtype=torch.int8, device="cuda")
    codes[:, cols:] = 0  # which nothing writes, as of a buffer
    return integers(codes, torch.full((tokens + 1, codes.shape[1] // 16, 2), torch.nan, device="cuda"))


@dataclass
class Run:
    """What the matmuls of a layer read and leave, in memory of their own."""

    layer: Layer
    tokens: int
    x: ActivationBuffer
    hidden: torch.Tensor
    norm_weight: torch.Tensor
    bias: torch.Tensor

    def __post_init__(self) -> None:
        width, wide = self.hidden.shape[1], self.layer.down[0].in_features
        self.before, self.normed, self.activated = (
            self.hidden.clone(),
            poisoned(self.tokens, width),
            poisoned(self.tokens, wide),
        )
        self.square_sums = torch.zeros(self.tokens + 1, epilogue_square_parts(width), device="cuda")
        self.partials = torch.full((1, self.tokens, 712), torch.nan, device="cuda")
        self.done = torch.zeros(1, dtype=torch.int32, device="cuda")
        adds = Residual(self.hidden, self.bias, SCALE, self.norm_weight, self.normed, self.square_sums)
        self.first, self.second = adds, replace(adds, bias=None)
        self.folded = replace(self.normed, norm=FoldedNorm(self.square_sums, width, EPS))
        self.poison()

    def poison(self) -> None:
        self.hidden.copy_(self.before)
        self.square_sums[:, : self.hidden.shape[1] // 16] = torch.nan
        for buffer in (self.normed, self.activated):
            buffer.codes[:, : buffer.cols] = POISON
            buffer.terms.fill_(torch.nan)

    def links(self) -> list[Link]:
        layer = self.layer
        return [
            Link([layer.output[0]], self.x, self.first), Link([layer.gate_up[0]], self.folded, self.activated),
            Link([layer.down[0]], self.activated, self.second),
            Link([matrix for matrix, _ in layer.inputs], self.folded, self.partials),
        ]  # fmt: skip

    def start(self, matmuls: MatmulKernels) -> None:
        self.hidden.copy_(self.before)
        launch_chain(matmuls, self.links(), self.tokens, "silu", self.done)

    def start_apart(self, matmuls: MatmulKernels) -> None:
        layer, tokens = self.layer, self.tokens
        adds = MatmulConfig(MatvecTiles(tokens, 1, 8, 2, 2), InputFormat("int8"), 1, True, "residual")
        gated = MatmulConfig(MatvecTiles(tokens, 2, 4, 2, 2), InputFormat("int8"), 1, True, "silu")
        inputs = [one for one, _ in layer.inputs]
        launch_residual(matmuls, layer.output[0], self.x, self.first, tokens, adds)
        launch_gated(matmuls, layer.gate_up[0], self.folded, self.activated, tokens, gated)
        launch_residual(matmuls, layer.down[0], self.activated, self.second, tokens, adds)
        config = replace(matmuls.route_merged(tokens, inputs), splits=1)
        matmuls.launch_merged(inputs, self.folded, self.partials, tokens, config)

    def exact(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 stream and sums, of which activations are not rounded."""

        def norm(stream: torch.Tensor) -> torch.Tensor:
            return stream * self.norm_weight.double() / (stream.square().mean(1, keepdim=True) + EPS).sqrt()

        stream = self.before[: self.tokens].double() + SCALE * (x @ self.layer.output[1].T + self.bias.double())
        stream = stream + SCALE * (expected(norm(stream), self.layer.gate_up[1], "silu") @ self.layer.down[1].T)
        return stream, norm(stream) @ torch.cat([exact for _, exact in self.layer.inputs]).T


@pytest.fixture(scope="module")
def matmuls() -> MatmulKernels:
    return MatmulKernels("cuda")


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("types", "sizes"),
    [
        ((GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q6_K), (4096, 4096, 14336)),
        ((GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q4_K), (512, 1024, 3072)),
        ((GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.Q8_0), (256, 768, 1024)),
        ((GGMLType.Q8_0, GGMLType.Q8_0, GGMLType.Q8_0), (2048, 2560, 4096)),
    ],
    ids=["8B", "0.6B", "small", "Q8_0"],
)
def test_layer(
    matmuls: MatmulKernels, types: tuple[GGMLType, GGMLType, GGMLType], sizes: tuple[int, int, int], tokens: int
) -> None:
    attended, hidden, _ = sizes
    generator = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    layer = Layer.make(types, *sizes)
    x = matmuls.written(random(tokens, attended), InputFormat("int8"))
    values = (x.codes.reshape(tokens, -1, 16).double() * x.terms[..., :1].double()).reshape(tokens, -1)[:, :attended]
    stream, norm_weight, bias = 3 * random(tokens + 1, hidden), random(hidden), random(hidden)
    together, alone = (Run(layer, tokens, x, stream.clone(), norm_weight, bias) for _ in range(2))
    together.start(matmuls)
    alone.start_apart(matmuls)
    assert int(together.done) == 0
    exact, sums = together.exact(values)
    assert apart(together.hidden[:tokens], exact) < 2e-2
    assert apart(together.partials[0], sums) < 3e-2
    assert apart(together.hidden[:tokens], alone.hidden[:tokens]) < 2e-3
    assert apart(together.partials, alone.partials) < 1e-2
    assert torch.equal(together.hidden[tokens], together.before[tokens])
    for buffer in (together.normed, together.activated):
        assert bool((buffer.codes[tokens, : buffer.cols] == POISON).all())
        assert bool(buffer.terms[tokens].isnan().all())
    check_replays(lambda: together.start(matmuls), together.partials, together.poison)
    assert int(together.done) == 0
