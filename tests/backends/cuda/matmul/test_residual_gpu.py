"""Matmuls that end on the residual stream on a GPU, against float64, their outputs poisoned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.cuda.layouts.activation_values import int8_activations
from backends.cuda.matmul.gated_pairs import TYPES, check_replays
from backends.cuda.matmul.stored_inputs import integers
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.quantized import (
    MatmulConfig,
    MatmulKernels,
)
from realizar.backends.cuda.matmul.residual import Residual, epilogue_square_parts, launch_residual
from realizar.backends.cuda.native.sources import MatvecTiles
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.random_blocks import random_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
# One part and many, more parts than chunks, tiles beyond the last, and rows that one pass of a block does not hold.
TILES = [
    MatvecTiles(1, 1, 12, 2, 2), MatvecTiles(1, 1, 1, 1, 16), MatvecTiles(1, 4, 2, 2, 3), MatvecTiles(2, 1, 8, 2, 2),
    MatvecTiles(2, 2, 3, 1, 4), MatvecTiles(3, 8, 1, 1, 2), MatvecTiles(7, 2, 1, 1, 2),
]  # fmt: skip
WIDTH, COLS = 336, 768  # 21 tiles: a last strip that is not whole
SCALE, EPS, POISON = 0.7, 1e-5, 77


@dataclass
class Stream:
    """A stream of some rows and one more, which nothing may touch, and all that a matmul leaves."""

    before: torch.Tensor
    residual: Residual

    @staticmethod
    def make(tokens: int, bias: bool, norm: bool) -> Stream:
        codes = torch.full((tokens + 1, -(-WIDTH // 64) * 64), POISON, dtype=torch.int8, device="cuda")
        terms = torch.full((tokens + 1, codes.shape[1] // 16, 2), torch.nan, device="cuda")
        hidden = 3 * torch.randn(tokens + 1, WIDTH, device="cuda")
        square_sums = torch.zeros(tokens + 1, epilogue_square_parts(WIDTH), device="cuda")
        square_sums[:, : WIDTH // 16] = torch.nan
        vectors = [torch.randn(WIDTH, device="cuda") if there else None for there in (bias, norm)]
        target = integers(codes, terms) if norm else None
        return Stream(hidden.clone(), Residual(hidden, vectors[0], SCALE, vectors[1], target, square_sums))

    def check(self, added: torch.Tensor) -> None:
        """Check that float64 `added` was added to the stream, and that everything derived from the stream is right."""
        left, tokens = self.residual, len(added)
        if left.bias is not None:
            added = added + left.bias.double()
        expected = self.before[:tokens].double() + SCALE * added
        error = (left.hidden[:tokens].double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(error.max()) < 3e-4  # of the weights' packing
        assert torch.equal(left.hidden[tokens], self.before[tokens])
        if left.norm_weight is None or left.target is None:
            assert bool(left.square_sums[:, : WIDTH // 16].isnan().all())
            return
        stream, target = left.hidden[:tokens], left.target
        epilogue_square_sums = stream.double().square().reshape(tokens, -1, 16).sum(2)
        assert torch.allclose(left.square_sums[:tokens, : WIDTH // 16].double(), epilogue_square_sums, rtol=1e-5)
        assert bool((left.square_sums[:tokens, WIDTH // 16 :] == 0).all())
        codes, terms = int8_activations((stream * left.norm_weight).cpu().numpy())
        apart = np.abs(target.codes[:tokens, :WIDTH].cpu().numpy().astype(np.int32) - codes[:, :WIDTH])
        assert apart.max() <= 1  # a division that rounds the other way
        assert (apart > 0).mean() < 0.01
        assert np.allclose(
            target.terms[:tokens, : WIDTH // 16].cpu().numpy()[..., 0], terms[:, : WIDTH // 16, 0], rtol=1e-5
        )
        sums = (
            target.codes[:tokens, :WIDTH].reshape(tokens, -1, 16).float().sum(2)
            * target.terms[:tokens, : WIDTH // 16, 0]
        )
        assert torch.allclose(target.terms[:tokens, : WIDTH // 16, 1], sums, rtol=1e-5)
        for rest in (target.codes[tokens], target.codes[:, WIDTH:]):
            assert bool((rest == POISON).all())
        assert bool(target.terms[tokens].isnan().all())


@pytest.fixture(scope="module")
def matmuls() -> MatmulKernels:
    return MatmulKernels("cuda")


def matrix_of(ggml_type: GGMLType, tokens: int = WIDTH, cols: int = COLS) -> tuple[PackedMatrix, torch.Tensor]:
    """A matrix, and what it is in float64."""
    data = random_blocks(ggml_type, tokens, cols, np.random.default_rng(5), 0.05)
    source = block_source(ggml_type, data, tokens, cols)
    return pack_by_threads([source], "cuda"), torch.from_numpy(source.dequantize()).to("cuda", torch.float64)


def config(matmuls: MatmulKernels, tiles: MatvecTiles) -> MatmulConfig:
    return MatmulConfig(tiles, InputFormat("int8"), 1, matmuls.capability >= (9, 0), "residual")


def values_of(x: ActivationBuffer, cols: int) -> torch.Tensor:
    """float64 [tokens, cols] of what codes and scales mean."""
    tokens, padded = x.codes.shape
    return (x.codes.reshape(tokens, -1, 16).double() * x.terms[..., :1].double()).reshape(tokens, padded)[:, :cols]


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda ggml_type: ggml_type.name)
def test_stream_codes_and_square_sums(matmuls: MatmulKernels, ggml_type: GGMLType) -> None:
    """The epilogue runs with bias and norm, and without one of the two."""
    matrix, exact = matrix_of(ggml_type)
    configs = [config(matmuls, tiles) for tiles in TILES]
    matmuls.prepare([(matrix.format, each) for each in configs])
    for tiles, each in zip(TILES, configs, strict=True):
        for bias, norm in ((True, True), (False, True), (True, False)):
            x, stream = (
                matmuls.written(torch.randn(tiles.tokens, COLS, device="cuda"), InputFormat("int8")),
                Stream.make(tiles.tokens, bias, norm),
            )
            launch_residual(matmuls, matrix, x, stream.residual, tiles.tokens, each)
            stream.check(values_of(x, COLS) @ exact.T)


def test_what_is_not_a_number_stays_in_its_row(matmuls: MatmulKernels) -> None:
    matrix, exact = matrix_of(GGMLType.Q4_K)
    x, stream = matmuls.written(torch.randn(2, COLS, device="cuda"), InputFormat("int8")), Stream.make(2, False, True)
    stream.residual.hidden[1, 5] = torch.nan
    launch_residual(matmuls, matrix, x, stream.residual, 2, config(matmuls, MatvecTiles(2, 1, 8, 2, 2)))
    target = stream.residual.target
    assert target is not None
    assert bool(target.terms[1, 0].isnan().all())
    assert not bool(target.terms[0, : WIDTH // 16].isnan().any())
    expected = stream.before[0].double() + SCALE * (values_of(x, COLS) @ exact.T)[0]
    assert float((stream.residual.hidden[0].double() - expected).norm() / expected.norm()) < 3e-4


@pytest.mark.parametrize("width", [512, 4096, 5120])
@pytest.mark.parametrize("tokens", [1, 2])
def test_next_matmul_applies_the_norm_scale(matmuls: MatmulKernels, tokens: int, width: int) -> None:
    """Two matmuls in turn, the second's input from the first, whose shares are more than a warp asks for at once."""
    (first, exact), (second, exact_second) = matrix_of(GGMLType.Q4_K, width, 512), matrix_of(GGMLType.Q6_K, 256, width)
    hidden, norm_weight = (torch.randn(size, device="cuda") for size in ((tokens, width), (width,)))
    target = matmuls.written(torch.zeros(tokens, width, device="cuda"), InputFormat("int8"))
    square_sums = torch.zeros(tokens, epilogue_square_parts(width), device="cuda")
    residual = Residual(hidden, None, SCALE, norm_weight, target, square_sums)
    x, before, after = (
        matmuls.written(torch.randn(tokens, 512, device="cuda"), InputFormat("int8")),
        hidden.clone(),
        matmuls.route(tokens, second),
    )
    partials = torch.full((after.splits, tokens, 256), torch.nan, device="cuda")
    normed = replace(target, norm=FoldedNorm(square_sums, width, EPS))

    def chain() -> None:
        hidden.copy_(before)
        launch_residual(matmuls, first, x, residual, tokens, config(matmuls, MatvecTiles(tokens, 1, 8, 2, 2)))
        matmuls.launch(second, normed, partials, tokens, after)

    chain()
    stream = before.double() + SCALE * (values_of(x, 512) @ exact.T)
    root = (stream.square().mean(1, keepdim=True) + EPS).sqrt()
    expected = (stream * norm_weight.double() / root) @ exact_second.T
    error = (partials.sum(0).double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 1.5e-2
    check_replays(chain, partials, lambda: square_sums[:, : width // 16].fill_(torch.nan))
