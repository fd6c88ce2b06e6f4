"""Matmuls that end with a feed-forward's activation on a GPU, against float64, their outputs poisoned before."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.cuda.matmul.gated_pairs import ACTIVATIONS, COLS, TYPES, WIDTH, check_chain, expected, pair, raw_pair
from backends.cuda.matmul.stored_inputs import halves
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.linears import launch_gated
from realizar.backends.cuda.matmul.quantized import (
    MatmulConfig,
    MatmulKernels,
)
from realizar.backends.cuda.matmul.tuning_table import DeviceTuning
from realizar.backends.cuda.native.sources import GatedActivation, WgmmaTiles
from realizar.backends.cuda.weights import pack_raw
from realizar.backends.cuda.weights.pack_raw import Packer, pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]
TOKENS = (3, 8, 9, 16, 33, 64, 65, 95, 128, 130, 192, 200, 300)
_TOLERANCE = 1.5e-3  # scales, minima, weights, inputs and results rounded to halves: a row's error is 1.1e-3 at most
_SQUARED = 3e-3  # a square has twice its root's relative error: the same roundings, done in float64, give up to 2.0e-3


@pytest.fixture(scope="module")
def matmuls() -> MatmulKernels:
    return MatmulKernels("cuda")


def poisoned(tokens: int, block_tokens: int, cols: int) -> ActivationBuffer:
    """A poisoned buffer with one block more than the tokens need; nothing may be written there."""
    blocks = -(-tokens // block_tokens) + 1
    values = torch.full((blocks, cols // 64, 8, block_tokens // 8, 8, 8), torch.nan, device="cuda", dtype=torch.float16)
    return halves(values, torch.full((blocks * block_tokens,), torch.nan, device="cuda"))


def tokens_of(target: ActivationBuffer, tokens: int) -> torch.Tensor:
    """float64 [tokens, cols] of what was written; the block beyond is checked."""
    blocks, chunks, _, eights, _, _ = target.values.shape
    assert bool(target.values[-1].isnan().all())
    assert bool(target.scales[-eights * 8 :].isnan().all())
    split = target.values.reshape(blocks, chunks, 4, 2, eights, 8, 4, 2)  # as half_activations orders them
    values = split.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(blocks * eights * 8, chunks * 64)
    return (values.double() * target.scales.double()[:, None])[:tokens]


def tiles_for(tokens: int) -> list[WgmmaTiles]:
    """One group and two, chunks one by one and in twos; of many tokens gate and up have a group each."""
    block = DeviceTuning(wgmma=True, processors=132).block_tokens(tokens)
    if block > 128:
        return [WgmmaTiles(block, 1, 2, 4, 1, 1), WgmmaTiles(block, 1, 2, 2, 2, 1)]
    return [WgmmaTiles(block, 2, 2, 3, 1, 1), WgmmaTiles(block, 2, 1, 3, 2, 2 if block <= 64 else 1)]


def configs(tokens: int, activation: GatedActivation) -> list[MatmulConfig]:
    activation_format = InputFormat("half", tiles_for(tokens)[0].tokens)
    return [MatmulConfig(tiles, activation_format, 1, tokens % 2 == 0, activation) for tiles in tiles_for(tokens)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda ggml_type: ggml_type.name)
def test_every_number_of_rows(matmuls: MatmulKernels, ggml_type: GGMLType, activation: GatedActivation) -> None:
    matrix, exact = pair(ggml_type)
    wanted = [(tokens, config) for tokens in TOKENS for config in configs(tokens, activation)]
    matmuls.prepare([(matrix.format, config) for _, config in wanted])
    for tokens, config in wanted:
        x = 2 * torch.randn(tokens, COLS, device="cuda")
        target = poisoned(tokens, config.format.block_tokens, WIDTH)
        activations = matmuls.written(x, config.format)
        launch_gated(matmuls, matrix, activations, target, tokens, config)
        reference = expected(x, exact, activation)
        error = (tokens_of(target, tokens) - reference).norm(dim=1) / reference.norm(dim=1)
        tolerance = _SQUARED if activation == "relu_squared" else _TOLERANCE
        assert float(error.max()) < tolerance, (tokens, config)  # NaN where something was not written


@pytest.mark.parametrize("width", [WIDTH, 5248])
@pytest.mark.parametrize("ggml_type", [*TYPES, GGMLType.F16], ids=lambda ggml_type: ggml_type.name)
def test_blocks_that_stay_give_the_bits_of_blocks_of_one_tile(
    matmuls: MatmulKernels, ggml_type: GGMLType, width: int
) -> None:
    """A block beside the outputs, fewer tiles than processors and more, and blocks of tokens that end a group."""
    matrix, _ = pair(ggml_type, width)
    apart = MatmulConfig(WgmmaTiles(128, 2, 2, 3, 1, 1), InputFormat("half", 128), 1, epilogue="silu")
    stays = replace(apart, tiles=matmuls.tuning.staying(apart.tiles, 1024, COLS, matrix.format))
    assert stays.tiles != apart.tiles
    for tokens in (1, 1100, 2500):
        activations = matmuls.written(torch.randn(tokens, COLS, device="cuda"), apart.format)
        found = []
        for config in (apart, stays):
            target = poisoned(tokens, 128, width)
            launch_gated(matmuls, matrix, activations, target, tokens, config)
            found.append(tokens_of(target, tokens))
        assert torch.equal(*found), tokens


@pytest.mark.parametrize("tokens", [8, 64, 200])
def test_rows_beyond_the_steps_hold_anything(matmuls: MatmulKernels, tokens: int) -> None:
    """NaN in the input's rows beyond, and in its whole other half, leaves the step's rows as they are."""
    matrix, exact = pair(GGMLType.Q4_K)
    for config in configs(tokens, "silu"):
        block = config.format.block_tokens
        x = torch.randn(tokens, COLS, device="cuda")
        few = tokens - 3
        activations = matmuls.written(x, InputFormat("half", block))
        target = poisoned(tokens, block, WIDTH)
        spoilt = matmuls.written(torch.cat([x[:few], torch.full_like(x[few:], torch.nan)]), InputFormat("half", block))
        launch_gated(matmuls, matrix, activations, target, few, config)
        clean = tokens_of(target, few)
        launch_gated(matmuls, matrix, spoilt, target, few, config)
        assert torch.equal(tokens_of(target, few), clean)
        reference = expected(x, exact, "silu")[:few]
        assert float((clean - reference).norm() / reference.norm()) < _TOLERANCE


def test_large_values_stop_and_small_ones_keep_a_step(matmuls: MatmulKernels) -> None:
    matrix, exact = pair(GGMLType.Q8_0)
    config = configs(8, "silu")[0]
    x = torch.randn(8, COLS, device="cuda")
    x[0] *= 1e5
    x[1] *= 1e-2
    x[2] = torch.nan
    target = poisoned(8, config.format.block_tokens, WIDTH)
    launch_gated(matmuls, matrix, matmuls.written(x, InputFormat("half", 8)), target, 8, config)
    found, reference = tokens_of(target, 8), expected(x, exact, "silu")
    most = 65504.0 * 64
    assert bool((reference[0].abs() > most).any())
    limited = reference[0].clamp(-most, most)
    factors = [x[0].double() @ weights.T for weights in exact]
    # Nearer to 0, rounding decides whether a gate is open, and whether gate times up reaches the limit.
    sure = torch.stack([factor.abs() > 1e-3 * factor.norm() for factor in factors]).all(0)
    assert float((found[0] - limited)[sure].norm() / limited.norm()) < _TOLERANCE
    assert float((found[1] - reference[1]).abs().max()) < 2.0**-19 + 1e-3 * float(reference[1].abs().max())
    assert bool(found[2].isnan().all())
    assert bool(found[3:].isfinite().all())


@pytest.mark.parametrize("tokens", [8, 33, 64, 130])
def test_a_norm_is_finished_before_the_activation(matmuls: MatmulKernels, tokens: int) -> None:
    matrix, exact = pair(GGMLType.Q4_K)
    x = 30 * torch.randn(tokens, COLS, device="cuda")
    square_sums = torch.zeros(tokens, 8, device="cuda")
    square_sums[:, 0], square_sums[:, 5] = x[:, :100].square().sum(1), x[:, 100:].square().sum(1)
    root = (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    for config in configs(tokens, "silu"):
        activations = matmuls.written(x, config.format)
        target = poisoned(tokens, config.format.block_tokens, WIDTH)
        unfinished = replace(activations, norm=FoldedNorm(square_sums, COLS, 1e-5))
        launch_gated(matmuls, matrix, unfinished, target, tokens, config)
        reference = expected(x.double() / root, exact, "silu")
        error = (tokens_of(target, tokens) - reference).norm(dim=1) / reference.norm(dim=1)
        assert float(error.max()) < _TOLERANCE, config


@pytest.mark.parametrize("tokens", [8, 48, 64, 96, 128, 192, 512, 700, 1100, 2500])
def test_what_is_routed_feeds_the_next_matmul(matmuls: MatmulKernels, tokens: int) -> None:
    def made(config: MatmulConfig, cols: int) -> tuple[ActivationBuffer, torch.Tensor]:
        x = torch.randn(tokens, cols, device="cuda")
        return matmuls.written(x, config.format), x

    def poison(target: ActivationBuffer) -> None:
        assert target.format.kind == "half"
        target.values.fill_(torch.nan)

    def empty(config: MatmulConfig, width: int) -> ActivationBuffer:
        return poisoned(tokens, config.format.block_tokens, width)

    check_chain(matmuls, tokens, made, empty, poison, _TOLERANCE)


def test_plain_launches_of_interleaved_matrices(matmuls: MatmulKernels) -> None:
    """Plain launches give gate and up by turns: of integers, and of halves in splits."""
    matrix, exact = pair(GGMLType.Q4_K)
    for tokens in (1, 2, 16, 130):
        x = torch.randn(tokens, COLS, device="cuda")
        config = replace(matmuls.route(tokens, matrix), splits=2)
        activation_format = config.format
        activations = matmuls.written(x, activation_format)
        partials = torch.full((2, tokens, 2 * WIDTH), torch.nan, device="cuda")
        matmuls.launch(matrix, activations, partials, tokens, config)
        both = partials.double().sum(0).reshape(tokens, -1, 2, 64)
        for part, weights in enumerate(exact):
            reference = x.double() @ weights.T
            found = both[:, :, part].reshape(tokens, WIDTH)
            assert float((found - reference).norm() / reference.norm()) < 2e-2  # int8's rounding too


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q3_K], ids=str)
def test_packing_on_the_device_interleaves(ggml_type: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices are uploaded and packed in several runs."""
    monkeypatch.setattr(pack_raw, "_PIECE_BYTES", 1 << 18)
    parts = raw_pair(ggml_type, 4096, COLS)
    got = Packer("cuda").pack(parts, interleaved=True)
    wanted = pack_by_threads(parts, "cuda", interleaved=True)
    assert got.interleaved
    assert torch.equal(got.weights, wanted.weights)
    assert torch.equal(got.block_scales, wanted.block_scales)
