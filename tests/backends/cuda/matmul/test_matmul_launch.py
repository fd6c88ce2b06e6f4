"""Launches of matmuls and their arguments, on a device that only records them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.cuda.matmul.recorded_launches import STREAM, RecordingKernel, matmuls_on, record_launches
from backends.cuda.matmul.stored_inputs import halves, integers
from realizar.backends.cuda.device import Family
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, FoldedNorm
from realizar.backends.cuda.matmul.linears import launch_gated, route_gated
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.matmul.residual import Residual, launch_residual, route_residual
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, WgmmaTiles
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import KernelError
from realizar.quantization.block_source import block_source
from realizar.quantization.random_blocks import random_blocks


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> type[RecordingKernel]:
    class Fresh(RecordingKernel):
        launches: ClassVar[list[tuple[object, ...]]] = []

    record_launches(monkeypatch, Fresh)
    return Fresh


def matrix(ggml_type: GGMLType, rows: int, cols: int = 1024) -> PackedMatrix:
    data = random_blocks(ggml_type, rows, cols, np.random.default_rng(0), 0.02)
    return pack_by_threads([block_source(ggml_type, data, rows, cols)], "cpu")


def int8(tokens: int, cols: int) -> ActivationBuffer:
    return integers(torch.zeros((tokens, cols), dtype=torch.int8), torch.zeros((tokens, cols // 16, 2)))


def half(blocks: int, block_tokens: int, cols: int) -> ActivationBuffer:
    values = torch.zeros((blocks, cols // 64, 8, block_tokens // 8, 8, 8), dtype=torch.float16)
    return halves(values, torch.ones(blocks * block_tokens))


def test_few_tokens_take_integers_and_more_take_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls = matmuls_on(monkeypatch)
    kinds = {tokens: matmuls.activation_format(tokens) for tokens in (1, 2, 3, 8, 9, 64, 65, 127, 129, 4096)}
    assert [activation_format.kind for activation_format in kinds.values()] == ["int8", "int8", *["half"] * 8]
    assert [each.block_tokens for each in kinds.values()] == [1, 1, 8, 8, 16, 64, 80, 128, 160, 128]
    assert matmuls_on(monkeypatch, invariant=True).activation_format(1).kind == "half"


def test_arguments_of_one_matrix(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls, weights = matmuls_on(monkeypatch), matrix(GGMLType.IQ4_XS, 320)
    config = matmuls.route(2, weights)
    assert isinstance(config.tiles, MatvecTiles)
    x, partials = int8(2, 1024), torch.empty((config.splits, 2, 400))
    matmuls.launch(weights, x, partials, 2, config, column=64)
    (name, grid, threads, arguments, sizes, stream, dependent) = kernel.launches[0]
    assert name == "matvec_c4_f16_tokens2"
    assert grid == (-(-320 // (16 * config.tiles.tiles)), config.splits, 1)
    assert (threads, stream, dependent) == (config.tiles.threads, STREAM, True)
    assert weights.table is not None
    assert arguments == [
        weights.weights.data_ptr(), weights.block_scales.data_ptr(), weights.table.data_ptr(),
        partials.data_ptr() + 4 * 64, 320, 0, x.codes.data_ptr(), x.terms.data_ptr(), 0, 0, 0.0, 0.0, 2, 16,
        config.splits, 400, 800,
    ]  # fmt: skip
    assert sizes == "ppppii" + "pp" + "piff" + "iiiii"


def test_a_folded_norm_goes_with_its_tokens(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls, weights = matmuls_on(monkeypatch), matrix(GGMLType.Q4_K, 320)
    norm = FoldedNorm(torch.zeros(16, 8), 1024, 1e-6)
    for tokens, x in ((2, int8(2, 1024)), (8, half(1, 8, 1024))):
        config = matmuls.route(tokens, weights)
        matmuls.launch(weights, replace(x, norm=norm), torch.empty((config.splits, tokens, 320)), tokens, config)
        arguments, sizes = kernel.launches[-1][3:5]
        assert isinstance(arguments, list)
        assert arguments[8:13] == [norm.square_sums.data_ptr(), 8, 1 / 1024, 1e-6, tokens]
        assert sizes == "ppppii" + "pp" + "piff" + "iiiii"


def test_two_formats_share_one_grid(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls = matmuls_on(monkeypatch)
    pair = [matrix(GGMLType.Q4_K, 640), matrix(GGMLType.Q6_K, 200)]
    config = matmuls.route_merged(200, pair)
    tiles = config.tiles
    assert isinstance(tiles, WgmmaTiles)
    partials = torch.empty((config.splits, 200, 840))
    matmuls.launch_merged(pair, half(1, 224, 1024), partials, 200, config)
    (name, grid, _, arguments, sizes, *_) = kernel.launches[0]
    assert name == "wgmma_q4_f16_q6_f16_tokens224"
    per_block = 64 * tiles.strips * tiles.groups
    first, second = -(-640 // per_block), -(-200 // per_block)
    assert grid == (first + second, config.splits, 1)
    assert isinstance(arguments, list)
    assert arguments[3:6] == [partials.data_ptr(), 640, 0]
    assert arguments[9:12] == [partials.data_ptr() + 4 * 640, 200, first]
    assert sizes == "ppppii" * 2 + "pp" + "piff" + "iiiii"


def gate_and_up(rows: int = 28672, cols: int = 4096) -> PackedMatrix:
    """Their shape alone matters here."""
    return replace(matrix(GGMLType.Q4_K, 64, cols), out_features=rows, interleaved=True)


def test_arguments_of_a_matmul_with_an_activation_epilogue(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    matmuls, weights = matmuls_on(monkeypatch), gate_and_up()
    config = route_gated(matmuls, 200, weights, "gelu_tanh")
    assert config is not None
    assert (config.splits, config.format) == (1, matmuls.activation_format(200))
    x, target = half(1, 224, 4096), half(1, 224, 14336)
    launch_gated(matmuls, weights, x, target, 200, config)
    (name, grid, threads, arguments, sizes, stream, dependent) = kernel.launches[0]
    assert name == "wgmma_q4_f16_gelu_tanh_tokens224"
    assert grid == (28672 // 128, 1, 1)
    assert (threads, stream, dependent) == (config.tiles.threads, STREAM, True)
    assert arguments == [
        weights.weights.data_ptr(), weights.block_scales.data_ptr(), weights.weights.data_ptr(),
        target.values.data_ptr(), 28672, 0, x.values.data_ptr(), x.scales.data_ptr(), 0, 0, 0.0, 0.0, 200, 64,
        1, 0, 0,
        target.scales.data_ptr(),
    ]  # fmt: skip
    assert sizes == "ppppii" + "pp" + "piff" + "iiiii" + "p"


def test_arguments_of_an_integer_matmul_with_an_activation_epilogue(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    matmuls, weights = matmuls_on(monkeypatch), gate_and_up()
    x, target = int8(2, 4096), int8(2, 14336)
    norm = FoldedNorm(torch.zeros(2, 8), 4096, 1e-6)
    for tokens, warps in ((1, 4), (2, 2)):
        config = route_gated(matmuls, tokens, weights, "gelu")
        assert config is not None
        assert (config.splits, config.format) == (1, matmuls.activation_format(tokens))
        launch_gated(matmuls, weights, replace(x, norm=norm), target, tokens, config)
        (name, grid, threads, arguments, sizes, stream, dependent) = kernel.launches[-1]
        assert name == f"matvec_q4_f16_gelu_tokens{tokens}"
        assert grid == (28672 // 32, 1, 1)
        assert (threads, stream, dependent) == (warps * 32, STREAM, True)
        assert arguments == [
            weights.weights.data_ptr(), weights.block_scales.data_ptr(), weights.weights.data_ptr(),
            target.codes.data_ptr(), 28672, 0, x.codes.data_ptr(), x.terms.data_ptr(), norm.square_sums.data_ptr(), 8,
            1 / 4096, 1e-6, tokens, 64, 1, 0, 0,
            target.terms.data_ptr(),
        ]  # fmt: skip
        assert sizes == "ppppii" + "pp" + "piff" + "iiiii" + "p"


def test_which_matmuls_have_an_activation_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved matrices, where enough blocks run; of halves on Hopper. In fixed order always or never."""
    matmuls, weights = matmuls_on(monkeypatch), gate_and_up()
    routed = [tokens for tokens in (1, 2, 3, 8, 64, 512, 2048) if route_gated(matmuls, tokens, weights, "silu")]
    assert routed == [1, 2, 3, 8, 64, 512, 2048]
    ampere = matmuls_on(monkeypatch, (8, 0))
    assert [tokens for tokens in (1, 2, 64) if route_gated(ampere, tokens, weights, "silu")] == [1, 2]
    invariant = matmuls_on(monkeypatch, invariant=True)
    ampere = matmuls_on(monkeypatch, (8, 0), invariant=True)
    for tokens in (1, 2, 64):
        assert route_gated(invariant, tokens, weights, "silu") is not None
        assert route_gated(invariant, tokens, gate_and_up(2048), "silu") is None
        assert route_gated(ampere, tokens, weights, "silu") is None
        assert route_gated(matmuls, tokens, replace(weights, interleaved=False), "silu") is None
        assert route_gated(matmuls, tokens, gate_and_up(2048), "silu") is None


def test_arguments_of_a_matmul_with_a_residual_epilogue(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    matmuls, weights = matmuls_on(monkeypatch), replace(matrix(GGMLType.Q4_K, 64, 14336), out_features=4096)
    config = route_residual(matmuls, 1, weights)
    assert config is not None
    hidden, norm_weight, square_sums, x, target = (
        torch.zeros(1, 4096),
        torch.ones(4096),
        torch.zeros(1, 256),
        int8(1, 14336),
        int8(1, 4096),
    )
    residual = Residual(hidden, None, 0.5, norm_weight, target, square_sums)
    launch_residual(matmuls, weights, x, residual, 1, config)
    launch_residual(matmuls, weights, x, replace(residual, bias=norm_weight, norm_weight=None, target=None), 1, config)
    (name, grid, threads, arguments, sizes, stream, dependent), (*_, bare, _, _, _) = kernel.launches
    launched = "matvec_q4_f16_residual_tokens1", (256, 1, 1), 384, STREAM, True
    assert (name, grid, threads, stream, dependent) == launched
    matmul = [
        weights.weights.data_ptr(), weights.block_scales.data_ptr(), weights.weights.data_ptr(), hidden.data_ptr(),
        4096, 0, x.codes.data_ptr(), x.terms.data_ptr(), 0, 0, 0.0, 0.0, 1, 224, 1, 0, 0,
    ]  # fmt: skip
    epilogue = [norm_weight.data_ptr(), target.codes.data_ptr(), target.terms.data_ptr(), square_sums.data_ptr(), 256]
    assert arguments == [*matmul, 0, 0.5, *epilogue]
    assert bare == [*matmul, norm_weight.data_ptr(), 0.5, 0, 0, 0, square_sums.data_ptr(), 256]
    assert sizes == "ppppii" + "pp" + "piff" + "iiiii" + "pfppppi"


def test_which_matmuls_have_a_residual_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers whose columns one block has all of, in widths of whole groups of 16."""
    matmuls, weights = matmuls_on(monkeypatch), replace(matrix(GGMLType.Q4_K, 64, 4096), out_features=4096)
    assert [tokens for tokens in (1, 2, 3, 64) if route_residual(matmuls, tokens, weights)] == [1, 2]
    assert route_residual(matmuls, 1, replace(weights, out_features=4104)) is None
    assert route_residual(matmuls, 1, replace(weights, out_features=576)) is None  # too few blocks without splits
    assert route_residual(matmuls_on(monkeypatch, invariant=True), 1, weights) is None


def test_which_sums_leave_as_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one matrix in long steps of even numbers of chunks, whose order is free and which a norm reads."""
    matmuls, fixed = matmuls_on(monkeypatch), matmuls_on(monkeypatch, invariant=True)
    even, odd, ragged = (matrix(GGMLType.Q8_0, rows, cols) for rows, cols in ((256, 1024), (256, 1088), (250, 1024)))

    def leave(kernels: MatmulKernels, matrices: list[PackedMatrix], tokens: int = 2048, reads: bool = True) -> bool:
        return kernels.route_merged(tokens, matrices, reads).halves

    assert leave(matmuls, [even])
    assert not leave(fixed, [even])
    assert not leave(matmuls, [odd])
    assert not leave(matmuls, [ragged])
    assert not leave(matmuls, [even, even])
    assert not leave(matmuls, [even], tokens=1000)
    assert not leave(matmuls, [even], reads=False)


def test_memory_for_decoded_weights_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls = matmuls_on(monkeypatch)
    for size in (300, 700, 500):
        matmuls.expect_decoded(size)
    assert matmuls.decoded_weights.numel() == 0
    address = matmuls.decoded()
    assert matmuls.decoded_weights.numel() == 700
    assert matmuls.decoded(700) == matmuls.decoded(1) == address


@pytest.mark.parametrize(("tokens", "refused"), [(1, "matvec"), (16, "wgmma")])
def test_a_kernel_that_is_refused_says_which_it_is(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch, tokens: int, refused: str
) -> None:
    kernel.refused = refused
    matmuls, weights = matmuls_on(monkeypatch), matrix(GGMLType.Q4_K, 64)
    x = int8(1, 1024) if tokens == 1 else half(1, 16, 1024)
    with pytest.raises(KernelError, match="does not fit") as caught:
        matmuls.launch(weights, x, torch.empty((12, tokens, 64)), tokens, matmuls.route(tokens, weights))
    assert (caught.value.kernel or "").startswith(refused)


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_given_up_is_nowhere_chosen(monkeypatch: pytest.MonkeyPatch, invariant: bool) -> None:
    """On a card whose table lists the kernels that are refused. What is left reads the same weights."""
    weights, whole = gate_and_up(), matrix(GGMLType.Q4_K, 4096, 4096)

    def kinds(*without: Family) -> set[str]:
        matmuls = matmuls_on(monkeypatch, invariant=invariant, without=frozenset(without))
        found = []
        for tokens in (1, 2, 8, 64, 300):
            found += [matmuls.route(tokens, weights), matmuls.route(tokens, whole)]
            found += [each for each in (route_gated(matmuls, tokens, weights, "silu"),) if each is not None]
            found += [each for each in (route_residual(matmuls, tokens, whole),) if each is not None]
        return {f"{each.tiles.kind}{' ' + each.epilogue if each.epilogue else ''}" for each in found}

    few = set() if invariant else {"matvec", "matvec silu", "matvec residual"}
    assert kinds() == {"wgmma", "wgmma silu", *few}
    assert kinds("wgmma") == {"mma_sync", *few}
    assert kinds("epilogues") == {"wgmma", *(few & {"matvec"})}
    assert kinds("mat-vec") == {"wgmma", "wgmma silu"}
    assert kinds("mat-vec", "wgmma") == {"mma_sync"}


def test_ampere_takes_mma_sync_without_dependent_launch(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    matmuls = matmuls_on(monkeypatch, (8, 0))
    config = matmuls.route(8, matrix(GGMLType.Q5_0, 64))
    assert isinstance(config.tiles, MmaSyncTiles)
    assert not config.dependent
    assert matmuls.arch == "sm_80"
