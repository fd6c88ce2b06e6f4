"""Matmul kernels on a GPU against float64: every weight type, odd shapes, 1 to 210 rows, outputs poisoned before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.cuda.layouts.activation_values import half_activations, int8_activations
from backends.grouped_source import grouped_source
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.cuda.matmul.inputs import FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.quantized import (
    MatmulConfig,
    MatmulKernels,
)
from realizar.backends.cuda.native.raw_layouts import REPACKED_LAYOUTS
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, Tiles, WgmmaTiles
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import Packer, pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import BlockSource, block_source
from realizar.quantization.convert import QUANTIZED_TYPES
from realizar.quantization.float_tensors import e4m3_layout
from realizar.quantization.layout import WeightLayout
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import MatrixSource, random_source

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 33, 64, 65, 95, 100, 127, 150, 180, 210)
NORM_TOKENS = (1, 2, 7, 8, 33, 64, 130)
FAMILIES = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.Q3_K, GGMLType.IQ4_NL, GGMLType.IQ2_XS)
_TOLERANCE = 1e-3  # weights rounded to halves: about 3e-4


@pytest.fixture(scope="module")
def matmuls() -> MatmulKernels:
    return MatmulKernels("cuda")


def shape_for(ggml_type: GGMLType, number: int) -> tuple[int, int]:
    """Rows that end within a strip and columns that end within a chunk, where blocks allow it."""
    unit = ggml_type.block_size
    return 80 + 24 * (number % 4), unit * -(-(320 + 32 * (number % 5)) // unit)


def random_raw(ggml_type: GGMLType, rows: int, cols: int, seed: int) -> BlockSource:
    return block_source(ggml_type, random_blocks(ggml_type, rows, cols, np.random.default_rng(seed), 0.02), rows, cols)


def random_matrix(ggml_type: GGMLType, rows: int, cols: int, seed: int) -> tuple[PackedMatrix, torch.Tensor]:
    source = random_raw(ggml_type, rows, cols, seed)
    return pack_by_threads([source], "cuda"), torch.from_numpy(source.dequantize()).to("cuda", torch.float64)


def kernels(matmuls: MatmulKernels, tokens: int) -> Iterator[MatmulConfig]:
    """Every kernel that takes so many rows, with one split and several."""
    block = replace(matmuls.tuning, wgmma=False).block_tokens(tokens)
    found: list[tuple[Tiles, InputFormat]] = [(MmaSyncTiles(block, 1 + tokens % 2, 3, 1), InputFormat("half", block))]
    if tokens <= 7:
        found.append((MatvecTiles(tokens, 4, 2, 1 + tokens % 2, 1), InputFormat("int8")))
    if matmuls.capability == (9, 0):
        block = matmuls.tuning.block_tokens(tokens)
        half = InputFormat("half", block)
        found.append((WgmmaTiles(block, 1, 1 + tokens % 2, 3, 1 + tokens // 8 % 2, 1), half))
        if tokens in (1, 6, 9, 31):  # in turn; also more warpgroups than a split has stages
            found.append((WgmmaTiles(block, 1, 1 + tokens % 2, 4, 1, 1, 2 + tokens % 3 % 2), half))
    for tiles, activation_format in found:
        for splits in (1, 3):
            yield MatmulConfig(
                tiles, activation_format, splits, dependent=tokens % 2 == 0 and matmuls.capability >= (9, 0)
            )


def random_norm(tokens: int, parts: int) -> FoldedNorm:
    """A folded norm of tokens of very different size; beyond them there is nothing to read."""
    square_sums = torch.rand((tokens + 1, parts), device="cuda") + 0.1
    square_sums *= 10.0 ** torch.arange(-3, tokens - 2, device="cuda").remainder(7)[:, None]
    square_sums[tokens] = torch.nan
    return FoldedNorm(square_sums, 1234, 1e-2)


def relative_error(
    matmuls: MatmulKernels, matrix: PackedMatrix, exact: torch.Tensor, tokens: int, config: MatmulConfig,
    norm: FoldedNorm | None = None,
) -> float:  # fmt: skip
    """The error of the summed splits, for a fresh input; nothing beside the output's place may be written."""
    x = torch.randn(tokens, matrix.in_features, device="cuda")
    beside = 4 if tokens % 2 else 1  # output rows that begin at 16 bytes, and others
    place = slice(beside, beside + matrix.out_features)
    partials = torch.full((config.splits, tokens + 1, matrix.out_features + 2 * beside), torch.nan, device="cuda")
    activations = replace(matmuls.written(x, config.format), norm=norm)
    matmuls.launch(matrix, activations, partials, tokens, config, column=beside)
    inside = partials[:, :tokens, place].clone()
    partials[:, :tokens, place] = torch.nan
    assert bool(torch.isnan(partials).all())
    if config.format.kind == "int8":  # their rounding is the format's: compare with what the codes stand for
        groups = x.reshape(tokens, -1, 16)
        scale = groups.abs().amax(2, keepdim=True) / 127
        x = (torch.round(groups / scale) * scale).reshape(tokens, -1)
    reference = x.double() @ exact.T
    if norm is not None:
        reference /= (norm.square_sums[:tokens].double().sum(1, keepdim=True) / norm.width + norm.eps).sqrt()
        errors = (inside.double().sum(0) - reference).norm(dim=1) / reference.norm(dim=1)
        return float(errors.nan_to_num(torch.inf).max())
    return float((inside.double().sum(0) - reference).norm() / reference.norm())


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda ggml_type: ggml_type.name)
def test_every_kernel_multiplies(matmuls: MatmulKernels, ggml_type: GGMLType) -> None:
    number = QUANTIZED_TYPES.index(ggml_type)
    matrix, exact = random_matrix(ggml_type, *shape_for(ggml_type, number), number)
    wanted = [(tokens, config) for tokens in TOKENS for config in kernels(matmuls, tokens)]
    matmuls.prepare([(matrix.format, config) for _, config in wanted])
    for tokens, config in wanted:
        error = relative_error(matmuls, matrix, exact, tokens, config)
        assert error < _TOLERANCE, (tokens, config)  # NaN where something was not written


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("floats", [False, True])
def test_every_kernel_multiplies_a_layout_of_no_ggml_type(matmuls: MatmulKernels, group: int, floats: bool) -> None:
    source: MatrixSource = grouped_source(152, 5 * group, group)
    if floats:
        source = random_source(e4m3_layout(group), 152, 5 * group, np.random.default_rng(1), 0.02)
    matrix = Packer("cuda").pack([source])
    exact = torch.from_numpy(source.dequantize()).to("cuda", torch.float64)
    wanted = [(tokens, config) for tokens in TOKENS for config in kernels(matmuls, tokens)]
    matmuls.prepare([(matrix.format, config) for _, config in wanted])
    for tokens, config in wanted:
        assert relative_error(matmuls, matrix, exact, tokens, config) < _TOLERANCE, (tokens, config)


@pytest.mark.parametrize("parts", [8, 16, 40])
@pytest.mark.parametrize("ggml_type", FAMILIES, ids=lambda ggml_type: ggml_type.name)
def test_every_kernel_applies_a_folded_norm(matmuls: MatmulKernels, ggml_type: GGMLType, parts: int) -> None:
    """Each row's own factor; also by fewer warps than rows, and where outputs leave through shared memory."""
    matrix, exact = random_matrix(ggml_type, 256, 512, 9)
    wanted = [(tokens, config) for tokens in NORM_TOKENS for config in kernels(matmuls, tokens)]
    wanted.append((7, MatmulConfig(MatvecTiles(7, 4, 1, 1, 1), InputFormat("int8"), 2)))
    if matmuls.capability == (9, 0):
        for block in (80, 96, 112, 128):
            half = InputFormat("half", block)
            tiles = WgmmaTiles(block, 2, 2, 4, 1, 1), WgmmaTiles(block, 1, 1, 3, 2, 1)
            wanted += [(tokens, MatmulConfig(tile, half, 1, True)) for tokens in (block, block + 3) for tile in tiles]
    matmuls.prepare([(matrix.format, config) for _, config in wanted])
    for tokens, config in wanted:
        error = relative_error(matmuls, matrix, exact, tokens, config, random_norm(tokens, parts))
        assert error < _TOLERANCE, (tokens, config)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0])
def test_routes_multiply(ggml_type: GGMLType, invariant: bool) -> None:
    matmuls = MatmulKernels("cuda", batch_invariant=invariant)
    matrix, exact = random_matrix(ggml_type, 1088, 2048, 5)
    for tokens in (1, 2, 3, 8, 17, 64, 100, 192, 300):
        config = matmuls.route(tokens, matrix)
        assert config.format == matmuls.activation_format(tokens)
        assert relative_error(matmuls, matrix, exact, tokens, config) < _TOLERANCE


@pytest.mark.parametrize("ggml_type", FAMILIES, ids=lambda ggml_type: ggml_type.name)
@pytest.mark.parametrize("block", [96, 128])
def test_blocks_that_add_parts_give_the_bits_of_splits_added_later(
    matmuls: MatmulKernels, block: int, ggml_type: GGMLType
) -> None:
    """By tiles of many tokens and of few, with outputs that leave through shared memory and such that do not."""
    if matmuls.capability != (9, 0):
        pytest.skip("the Hopper kernel runs on compute capability 9.0 alone")
    half = InputFormat("half", block)
    for rows, parts, chunks in ((640, 4, 6), (152, 3, 4), (256, 2, 12)):
        matrix, exact = random_matrix(ggml_type, rows, 64 * parts * chunks, parts)
        tiles = WgmmaTiles(block, 2, 2, 3, 1, 1, 1, parts)
        if matmuls.tuning.shrunk(tiles, [matrix.format]) != tiles:
            pytest.skip("its blocks have no room for sums, and none are chosen that add parts")
        summing = MatmulConfig(tiles, half, 1)
        for tokens in (1, 128, 300):
            assert relative_error(matmuls, matrix, exact, tokens, summing, random_norm(tokens, 8)) < _TOLERANCE
            x = torch.randn(tokens, matrix.in_features, device="cuda")
            activations = replace(matmuls.written(x, half), norm=random_norm(tokens, 8))
            sums = torch.full((1, tokens, rows), torch.nan, device="cuda")
            matmuls.launch(matrix, activations, sums, tokens, summing)
            splits = torch.full((parts, tokens, rows), torch.nan, device="cuda")
            apart = matmuls.tuning.shrunk(WgmmaTiles(block, 2, 2, 4, 1, 1), [matrix.format])
            matmuls.launch(matrix, activations, splits, tokens, MatmulConfig(apart, half, parts))
            total = splits[0]
            for split in splits[1:]:
                total = total + split
            assert torch.equal(sums[0], total)


@pytest.mark.parametrize("ggml_type", [*FAMILIES, GGMLType.F16], ids=lambda ggml_type: ggml_type.name)
def test_blocks_that_stay_give_the_bits_of_blocks_of_one_tile(matmuls: MatmulKernels, ggml_type: GGMLType) -> None:
    """With odd numbers of blocks and a last one that is not whole; fewer tiles than processors and more."""
    if matmuls.capability != (9, 0):
        pytest.skip("the Hopper kernel runs on compute capability 9.0 alone")
    half, apart = InputFormat("half", 128), WgmmaTiles(128, 2, 2, 3, 1, 1)
    for rows, cols in ((152, 1536), (2200, 768)):
        matrix, exact = random_matrix(ggml_type, rows, cols, rows)
        stays = matmuls.tuning.staying(apart, 1024, cols, matrix.format)
        assert stays != apart
        for tokens, splits in ((1, 1), (1100, 1), (1101, 3), (2500, 1), (2501, 2)):
            config = MatmulConfig(stays, half, splits)
            assert relative_error(matmuls, matrix, exact, tokens, config, random_norm(tokens, 8)) < _TOLERANCE
            activations = matmuls.written(torch.randn(tokens, cols, device="cuda"), half)
            found = torch.full((2, splits, tokens, rows), torch.nan, device="cuda")
            for out, tiles in zip(found, (apart, stays), strict=True):
                matmuls.launch(matrix, activations, out, tokens, MatmulConfig(tiles, half, splits))
            assert torch.equal(*found), (rows, tokens, splits)


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.F16], ids=lambda each: each.name)
def test_sums_leave_as_halves(matmuls: MatmulKernels, ggml_type: GGMLType) -> None:
    """Each is that of the same matmul in float32, rounded, and nothing else is written."""
    if matmuls.capability != (9, 0):
        pytest.skip("the Hopper kernel runs on compute capability 9.0 alone")
    matrix, _ = random_matrix(ggml_type, 896, 1536, 3)
    half = InputFormat("half", 128)
    tiles = matmuls.tuning.staying(WgmmaTiles(128, 2, 2, 4, 1, 1), 1024, 1536, matrix.format)
    assert matmuls.route_merged(1100, [matrix], True).halves
    for tokens, splits in ((1, 1), (1100, 1), (2500, 2)):
        config = MatmulConfig(tiles, half, splits)
        activations = matmuls.written(torch.randn(tokens, 1536, device="cuda"), half)
        floats = torch.full((splits, tokens, 896), torch.nan, device="cuda")
        halves = torch.full((splits, tokens + 1, 912), torch.nan, device="cuda", dtype=torch.float16)
        matmuls.launch(matrix, activations, floats, tokens, config)
        matmuls.launch(matrix, activations, halves, tokens, replace(config, halves=True), column=8)
        assert torch.equal(halves[:, :tokens, 8:904], (floats / HALF_FACTOR.value).half())
        halves[:, :tokens, 8:904] = torch.nan
        assert bool(torch.isnan(halves).all())


@pytest.mark.parametrize("second", [GGMLType.Q6_K, GGMLType.Q3_K, GGMLType.IQ4_XS])
def test_matrices_of_two_formats_share_a_grid(matmuls: MatmulKernels, second: GGMLType) -> None:
    cols = 1024
    pairs = [random_matrix(t, out, cols, out) for t, out in ((GGMLType.Q4_K, 320), (second, 200))]
    matrices, exact = [pair[0] for pair in pairs], torch.cat([pair[1] for pair in pairs])
    for tokens in (1, 2, 8, 40, 128, 300, 1100):
        x = torch.randn(tokens, cols, device="cuda")
        config = matmuls.route_merged(tokens, matrices)
        partials = torch.full((config.splits, tokens, 520), torch.nan, device="cuda")
        activations = matmuls.written(x, config.format)
        matmuls.launch_merged(matrices, activations, partials, tokens, config)
        alone = torch.full_like(partials, torch.nan)
        for matrix, column in zip(matrices, (0, 320), strict=True):
            matmuls.launch(matrix, activations, alone, tokens, config, column=column)
        assert torch.equal(partials, alone)
        reference = x.double() @ exact.T
        assert float((partials.double().sum(0) - reference).norm() / reference.norm()) < 2e-2  # int8's rounding too


@pytest.mark.parametrize("cols", [1088, 4096])
@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0])
def test_tokens_do_not_depend_on_the_batch(ggml_type: GGMLType, cols: int) -> None:
    """In fixed order all tiles give the same bits, for outputs that need four parts, two and one."""
    cols -= cols % ggml_type.block_size
    matmuls = MatmulKernels("cuda", batch_invariant=True)
    for out_features in (576, 4096, 6144, 14336):
        matrix = Packer("cuda").pack([random_raw(ggml_type, out_features, cols, 6)])
        x = torch.randn(600, cols, device="cuda")
        seen: torch.Tensor | None = None
        for tokens in (600, 256, 200, 192, 128, 65, 64, 33, 24, 9, 8, 2, 1):
            config = matmuls.route(tokens, matrix)
            partials = torch.full((config.splits, tokens, out_features), torch.nan, device="cuda")
            matmuls.launch(matrix, matmuls.written(x[:tokens].contiguous(), config.format), partials, tokens, config)
            sums = partials[0]
            for split in partials[1:]:  # as the kernel after it adds them, where a block has not
                sums = sums + split
            seen = sums if seen is None else seen
            assert torch.equal(sums, seen[:tokens]), (out_features, tokens, config)


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q8_0], ids=str)
def test_one_massive_channel(matmuls: MatmulKernels, ggml_type: GGMLType) -> None:
    """Larger than a half can hold, in one token of a step: its sums are right, and so are the other tokens'."""
    matrix, exact = random_matrix(ggml_type, 640, 2048, 9)
    for tokens in (1, 2, 16, 64, 300):
        x = torch.randn(tokens, 2048, device="cuda")
        x[tokens // 2, 77] = 3e5
        config = matmuls.route(tokens, matrix)
        partials = torch.full((config.splits, tokens, 640), torch.nan, device="cuda")
        matmuls.launch(matrix, matmuls.written(x, config.format), partials, tokens, config)
        expected = x.double() @ exact.T
        errors = (partials.double().sum(0) - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(errors.max()) < 2e-2, (tokens, config)  # int8's rounding too


def test_results_repeat_and_the_splits_sum_in_any_launch(matmuls: MatmulKernels) -> None:
    matrix, _ = random_matrix(GGMLType.Q6_K, 640, 2048, 7)
    for tokens in (1, 16):
        config = matmuls.route(tokens, matrix)
        activations = matmuls.written(torch.randn(tokens, 2048, device="cuda"), config.format)
        seen = []
        for _ in range(5):
            partials = torch.full((config.splits, tokens, matrix.out_features), torch.nan, device="cuda")
            matmuls.launch(matrix, activations, partials, tokens, config)
            seen.append(partials)
        assert all(torch.equal(seen[0], other) for other in seen[1:])


def test_dependent_launches_in_a_graph_equal_plain_ones(matmuls: MatmulKernels) -> None:
    """A chain in which each matmul's input comes from the one before."""
    matrix, _ = random_matrix(GGMLType.Q4_K, 2048, 2048, 8)
    config = matmuls.route(1, matrix)
    start = torch.randn(1, 2048, device="cuda")

    def chain() -> torch.Tensor:
        x = start
        for _ in range(8):
            partials = torch.empty((config.splits, 1, 2048), device="cuda")
            matmuls.launch(matrix, matmuls.written(x, config.format), partials, 1, config)
            x = partials.sum(0)
        return x

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize(("tokens", "cols"), [(1, 64), (5, 160), (9, 4096)])
def test_written_activations_equal_the_reference(matmuls: MatmulKernels, tokens: int, cols: int) -> None:
    x = np.random.default_rng(cols).standard_normal((tokens, cols)).astype(np.float32)
    x[0] *= 1e6
    device = torch.from_numpy(x).cuda()
    codes, terms = int8_activations(x)
    int8 = matmuls.written(device, InputFormat("int8"))
    assert int(np.abs(int8.codes.cpu().numpy().astype(int) - codes).max()) <= 1  # a division's last bit
    np.testing.assert_allclose(int8.terms[..., 0].cpu().numpy(), terms[..., 0], rtol=1e-6)
    values, scales = half_activations(x, 16)
    half = matmuls.written(device, InputFormat("half", 16))
    assert np.array_equal(half.scales.cpu().numpy(), scales)
    assert np.array_equal(half.values.cpu().numpy().view(np.uint16), values.view(np.uint16))


@pytest.mark.parametrize("layout", REPACKED_LAYOUTS, ids=lambda each: each.name)
@pytest.mark.parametrize("shard", [False, True])
def test_repacking_equals_the_reference(layout: WeightLayout, shard: bool) -> None:
    """Matrices are repacked, and slices by columns, whose out_features lie apart in memory."""
    cols = max(320 // layout.block_size, 1) * layout.block_size
    parts = [random_raw(GGMLType[layout.name], tokens, cols * (1 + shard), tokens) for tokens in (128, 90)]
    if shard:
        parts = [part.slice_columns(cols, 2 * cols) for part in parts]
    got = Packer("cuda").pack(parts)
    expected = pack_by_threads(parts, "cuda")
    assert torch.equal(got.weights, expected.weights)
    assert torch.equal(got.block_scales, expected.block_scales)
    assert (got.out_features, got.in_features, got.format) == (
        expected.out_features,
        expected.in_features,
        expected.format,
    )
