"""Matmuls of integers that end with a feed-forward's activation on a GPU, against float64, their outputs poisoned."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.cuda.layouts.activation_values import int8_activations
from backends.cuda.matmul.gated_pairs import ACTIVATIONS, COLS, TYPES, WIDTH, check_chain, expected, pair
from backends.cuda.matmul.stored_inputs import integers
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.linears import launch_gated
from realizar.backends.cuda.matmul.quantized import (
    MatmulConfig,
    MatmulKernels,
)
from realizar.backends.cuda.native.sources import GatedActivation, MatvecTiles
from realizar.checkpoint.ggml_types import GGMLType

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
# One part and several, an odd number, and rows whose outputs one pass of a block's threads does not hold.
TILES = [
    MatvecTiles(1, 2, 2, 2, 6), MatvecTiles(1, 2, 1, 1, 8), MatvecTiles(1, 2, 3, 1, 2), MatvecTiles(2, 2, 1, 2, 8),
    MatvecTiles(2, 2, 6, 2, 1), MatvecTiles(3, 2, 2, 1, 2), MatvecTiles(5, 2, 1, 1, 2), MatvecTiles(7, 2, 1, 1, 2),
]  # fmt: skip
_TOLERANCE = 1.5e-2  # relative: eight bits of the largest of 16 leave about 8e-3
_POISON = 77
_EPS = 1e-5


@pytest.fixture(scope="module")
def matmuls() -> MatmulKernels:
    return MatmulKernels("cuda")


def config(matmuls: MatmulKernels, tiles: MatvecTiles, activation: GatedActivation) -> MatmulConfig:
    return MatmulConfig(tiles, InputFormat("int8"), 1, matmuls.capability >= (9, 0), activation)


def poisoned(tokens: int, cols: int) -> ActivationBuffer:
    """A poisoned buffer with one token more than needed; nothing may be written there."""
    codes = torch.full((tokens + 1, cols), _POISON, dtype=torch.int8, device="cuda")
    return integers(codes, torch.full((tokens + 1, cols // 16, 2), torch.nan, device="cuda"))


def values_of(x: ActivationBuffer) -> torch.Tensor:
    """float64 [tokens, cols] of what codes and scales mean."""
    tokens, cols = x.codes.shape
    return (x.codes.reshape(tokens, -1, 16).double() * x.terms[..., :1].double()).reshape(tokens, cols)


def written(target: ActivationBuffer) -> torch.Tensor:
    """The same without the row beyond; that and the second terms are checked."""
    assert bool((target.codes[-1] == _POISON).all())
    assert bool(target.terms[-1].isnan().all())
    codes, terms = target.codes[:-1], target.terms[:-1]
    sums = codes.reshape(len(codes), -1, 16).double().sum(2) * terms[..., 0].double()
    assert torch.allclose(terms[..., 1].double(), sums, rtol=1e-6, atol=0)
    return values_of(integers(codes, terms))


def with_squares(matmuls: MatmulKernels, x: torch.Tensor) -> ActivationBuffer:
    """Rows whose norm is left to the matmul, their squares in 40 parts."""
    square_sums = torch.zeros(len(x), 40, device="cuda")
    square_sums[:, 0], square_sums[:, 37] = x[:, :100].square().sum(1), x[:, 100:].square().sum(1)
    return replace(matmuls.written(x, InputFormat("int8")), norm=FoldedNorm(square_sums, x.shape[1], _EPS))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda ggml_type: ggml_type.name)
def test_few_rows(matmuls: MatmulKernels, ggml_type: GGMLType, activation: GatedActivation) -> None:
    """With and without a folded norm, the kernel writes what `int8_activations` makes of the exact values."""
    matrix, exact = pair(ggml_type)
    configs = [config(matmuls, tiles, activation) for tiles in TILES]
    matmuls.prepare([(matrix.format, each) for each in configs])
    for tiles, each in zip(TILES, configs, strict=True):
        for folded in (False, True):
            x = (30 if folded else 2) * torch.randn(tiles.tokens, COLS, device="cuda")
            source = with_squares(matmuls, x) if folded else matmuls.written(x, InputFormat("int8"))
            target = poisoned(tiles.tokens, WIDTH)
            launch_gated(matmuls, matrix, source, target, tiles.tokens, each)
            read = values_of(source)  # the input's own rounding is not this matmul's
            if folded:
                read = read / (x.double().square().mean(1, keepdim=True) + _EPS).sqrt()
            reference = expected(read, exact, activation)
            found = written(target)
            error = (found - reference).norm(dim=1) / reference.norm(dim=1)
            assert float(error.max()) < _TOLERANCE, (tiles, folded)  # NaN where something was not written
            # Where all gates of 16 are negative, a code is a part of next to nothing, less than what sums differ by.
            least = 0.01 * reference.square().mean(1, keepdim=True).sqrt()
            code = target.terms[:-1, :, 0].double().repeat_interleave(16, dim=1)
            assert bool(((found - reference).abs() <= 2 * code + least).all()), (tiles, folded)
            codes, _ = int8_activations(reference.float().cpu().numpy())
            assert (target.codes[:-1].cpu().numpy() != codes).mean() < 0.2, (tiles, folded)


def test_zeros_and_what_is_not_a_number(matmuls: MatmulKernels) -> None:
    """Zeros give scales and codes of zero; NaN stays in its row, as scales."""
    matrix, exact = pair(GGMLType.Q4_K)
    each = config(matmuls, MatvecTiles(3, 2, 2, 1, 2), "silu")
    x = torch.randn(3, COLS, device="cuda")
    x[0] = 0.0
    x[2] = torch.nan
    source, target = matmuls.written(x, InputFormat("int8")), poisoned(3, WIDTH)
    launch_gated(matmuls, matrix, source, target, 3, each)
    assert not bool(target.codes[0].any())
    assert not bool(target.terms[0].any())
    assert bool(target.terms[2, :, 0].isnan().all())
    found, reference = values_of(target)[1], expected(values_of(source), exact, "silu")[1]
    assert float((found - reference).norm() / reference.norm()) < _TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2])
def test_what_is_routed_feeds_the_next_matmul(matmuls: MatmulKernels, tokens: int) -> None:
    def made(_: MatmulConfig, cols: int) -> tuple[ActivationBuffer, torch.Tensor]:
        source = with_squares(matmuls, torch.randn(tokens, cols, device="cuda"))
        assert source.norm is not None
        return source, values_of(source) / (source.norm.square_sums.double().sum(1, keepdim=True) / cols + _EPS).sqrt()

    def poison(target: ActivationBuffer) -> None:
        assert target.format.kind == "int8"
        target.codes.fill_(_POISON)
        target.terms.fill_(torch.nan)

    routed = check_chain(matmuls, tokens, made, lambda _, width: poisoned(tokens, width), poison, _TOLERANCE)
    assert routed.format == InputFormat("int8")
