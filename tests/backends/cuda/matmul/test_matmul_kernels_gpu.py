"""Product kernels on a GPU against float64: every weight type, odd shapes, 1 to 130 rows, outputs poisoned before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.grouped_source import exact_weights, grouped_source
from realizar.backends.cuda.layouts.activations import half_activations, int8_activations
from realizar.backends.cuda.matmul.folded_norm import DeferredNorm
from realizar.backends.cuda.matmul.quantized import ActivationFormat, Activations, ProductConfig, Products
from realizar.backends.cuda.native.raw_layouts import REPACKED_LAYOUTS
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, Tiles, WgmmaTiles
from realizar.backends.cuda.weights.pack import PackedMatrix, pack_matrix
from realizar.backends.cuda.weights.pack_raw import Packer
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization import QUANTIZED_TYPES, BlockSource, WeightLayout, block_source, random_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 33, 64, 65, 130)
NORM_ROWS = (1, 2, 7, 8, 33, 64, 130)
FAMILIES = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.Q3_K, GGMLType.IQ4_NL, GGMLType.IQ2_XS)
COMPACT = (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K)
CASES = [(t, False) for t in QUANTIZED_TYPES] + [(t, True) for t in COMPACT]
_TOLERANCE = 1e-3  # weights rounded to halves: about 3e-4


@pytest.fixture(scope="module")
def products() -> Products:
    return Products("cuda")


def shape_for(ggml_type: GGMLType, number: int) -> tuple[int, int]:
    """Rows that end within a strip and columns that end within a chunk, where blocks allow it."""
    unit = ggml_type.block_size
    return 80 + 24 * (number % 4), unit * -(-(320 + 32 * (number % 5)) // unit)


def random_raw(ggml_type: GGMLType, rows: int, cols: int, seed: int) -> BlockSource:
    return block_source(ggml_type, random_blocks(ggml_type, rows, cols, np.random.default_rng(seed), 0.02), rows, cols)


def random_matrix(
    ggml_type: GGMLType, rows: int, cols: int, seed: int, compact: bool
) -> tuple[PackedMatrix, torch.Tensor]:
    source = random_raw(ggml_type, rows, cols, seed)
    return pack_matrix(source, "cuda", compact), torch.from_numpy(source.dequantize()).to("cuda", torch.float64)


def kernels(products: Products, rows: int) -> Iterator[ProductConfig]:
    """Every kernel that takes so many rows, with one split and several."""
    block = next((size for size in (8, 16, 32, 64, 128) if rows <= size), 128)
    half = ActivationFormat("half", block)
    found: list[tuple[Tiles, ActivationFormat]] = [(MmaSyncTiles(block, 1 + rows % 2, 3, 1), half)]
    if rows <= 7:
        found.append((MatvecTiles(rows, 4, 2, 1 + rows % 2, 1), ActivationFormat("int8", 1)))
    if products.capability == (9, 0):
        found.append((WgmmaTiles(block, 1, 1 + rows % 2, 3, 1 + rows // 8 % 2, 1), half))
    for tiles, form in found:
        for splits in (1, 3):
            yield ProductConfig(tiles, form, splits, dependent=rows % 2 == 0 and products.capability >= (9, 0))


def written(products: Products, x: torch.Tensor, form: ActivationFormat) -> Activations:
    return products.to_int8(x) if form.kind == "int8" else products.to_half(x, form.block_rows)


def random_norm(rows: int, parts: int) -> DeferredNorm:
    """Of rows of very different size; beyond them there is nothing to read."""
    squares = torch.rand((rows + 1, parts), device="cuda") + 0.1
    squares *= 10.0 ** torch.arange(-3, rows - 2, device="cuda").remainder(7)[:, None]
    squares[rows] = torch.nan
    return DeferredNorm(squares, 1234, 1e-2)


def relative_error(
    products: Products, matrix: PackedMatrix, exact: torch.Tensor, rows: int, config: ProductConfig,
    norm: DeferredNorm | None = None,
) -> float:  # fmt: skip
    """Of the summed splits, for a fresh input; nothing beside the output's place may be written."""
    x = torch.randn(rows, matrix.cols, device="cuda")
    beside = 4 if rows % 2 else 1  # output rows that begin at 16 bytes, and others
    place = slice(beside, beside + matrix.rows)
    partials = torch.full((config.splits, rows + 1, matrix.rows + 2 * beside), torch.nan, device="cuda")
    activations = replace(written(products, x, config.format), norm=norm)
    products.launch(matrix, activations, partials, rows, config, column=beside)
    inside = partials[:, :rows, place].clone()
    partials[:, :rows, place] = torch.nan
    assert bool(torch.isnan(partials).all())
    if config.format.kind == "int8":  # their rounding is the format's: compare with what the codes stand for
        groups = x.reshape(rows, -1, 16)
        scale = groups.abs().amax(2, keepdim=True) / 127
        x = (torch.round(groups / scale) * scale).reshape(rows, -1)
    reference = x.double() @ exact.T
    if norm is not None:
        reference /= (norm.squares[:rows].double().sum(1, keepdim=True) / norm.width + norm.eps).sqrt()
        errors = (inside.double().sum(0) - reference).norm(dim=1) / reference.norm(dim=1)
        return float(errors.nan_to_num(torch.inf).max())
    return float((inside.double().sum(0) - reference).norm() / reference.norm())


@pytest.mark.parametrize(("ggml_type", "compact"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_every_kernel_multiplies(products: Products, ggml_type: GGMLType, compact: bool) -> None:
    number = CASES.index((ggml_type, compact))
    matrix, exact = random_matrix(ggml_type, *shape_for(ggml_type, number), number, compact)
    wanted = [(rows, config) for rows in ROWS for config in kernels(products, rows)]
    products.prepare([(matrix.format, config) for _, config in wanted])
    for rows, config in wanted:
        error = relative_error(products, matrix, exact, rows, config)
        assert error < _TOLERANCE, (rows, config)  # NaN where something was not written


@pytest.mark.parametrize("group", [64, 128])
def test_every_kernel_multiplies_a_layout_of_no_ggml_type(products: Products, group: int) -> None:
    source = grouped_source(152, 5 * group, group)
    matrix = Packer("cuda").pack([source])
    exact = torch.from_numpy(exact_weights(source)).to("cuda")
    wanted = [(rows, config) for rows in ROWS for config in kernels(products, rows)]
    products.prepare([(matrix.format, config) for _, config in wanted])
    for rows, config in wanted:
        assert relative_error(products, matrix, exact, rows, config) < _TOLERANCE, (rows, config)


@pytest.mark.parametrize("parts", [8, 16, 40])
@pytest.mark.parametrize("ggml_type", FAMILIES, ids=lambda ggml_type: ggml_type.name)
def test_every_kernel_finishes_a_norm(products: Products, ggml_type: GGMLType, parts: int) -> None:
    """Each row's own factor; also by fewer warps than rows, and where outputs leave through shared memory."""
    matrix, exact = random_matrix(ggml_type, 256, 512, 9, False)
    wanted = [(rows, config) for rows in NORM_ROWS for config in kernels(products, rows)]
    wanted.append((7, ProductConfig(MatvecTiles(7, 4, 1, 1, 1), ActivationFormat("int8", 1), 2)))
    if products.capability == (9, 0):
        half, tiles = ActivationFormat("half", 128), (WgmmaTiles(128, 2, 2, 4, 1, 1), WgmmaTiles(128, 1, 1, 3, 2, 1))
        wanted += [(rows, ProductConfig(tile, half, 1, True)) for rows in (128, 131) for tile in tiles]
    products.prepare([(matrix.format, config) for _, config in wanted])
    for rows, config in wanted:
        error = relative_error(products, matrix, exact, rows, config, random_norm(rows, parts))
        assert error < _TOLERANCE, (rows, config)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0])
def test_routes_multiply(ggml_type: GGMLType, invariant: bool) -> None:
    products = Products("cuda", batch_invariant=invariant)
    matrix, exact = random_matrix(ggml_type, 1088, 2048, 5, False)
    for rows in (1, 2, 3, 8, 17, 64, 100, 300):
        config = products.route(rows, matrix)
        assert config.format == products.activation_format(rows)
        assert relative_error(products, matrix, exact, rows, config) < _TOLERANCE


@pytest.mark.parametrize("second", [GGMLType.Q6_K, GGMLType.Q3_K, GGMLType.IQ4_XS])
def test_matrices_of_two_formats_share_a_grid(products: Products, second: GGMLType) -> None:
    cols = 1024
    pairs = [random_matrix(t, out, cols, out, False) for t, out in ((GGMLType.Q4_K, 320), (second, 200))]
    matrices, exact = [pair[0] for pair in pairs], torch.cat([pair[1] for pair in pairs])
    for rows in (1, 2, 8, 40, 128, 300):
        x = torch.randn(rows, cols, device="cuda")
        configs = products.route_merged(rows, matrices)
        assert len(set(configs)) == 1
        partials = torch.full((configs[0].splits, rows, 520), torch.nan, device="cuda")
        activations = written(products, x, configs[0].format)
        products.launch_merged(matrices, activations, partials, rows, configs[0])
        alone = torch.full_like(partials, torch.nan)
        for matrix, column in zip(matrices, (0, 320), strict=True):
            products.launch(matrix, activations, alone, rows, configs[0], column=column)
        assert torch.equal(partials, alone)
        reference = x.double() @ exact.T
        assert float((partials.double().sum(0) - reference).norm() / reference.norm()) < 2e-2  # int8's rounding too


def test_rows_do_not_depend_on_the_batch() -> None:
    products = Products("cuda", batch_invariant=True)
    matrix, _ = random_matrix(GGMLType.Q4_K, 576, 4096, 6, False)
    x = torch.randn(200, 4096, device="cuda")

    def sums(rows: int) -> torch.Tensor:
        config = products.route(rows, matrix)
        partials = torch.empty((config.splits, rows, matrix.rows), device="cuda")
        products.launch(matrix, written(products, x[:rows].contiguous(), config.format), partials, rows, config)
        return partials[:, :1]

    alone = sums(1)
    for rows in (2, 8, 9, 33, 64, 65, 200):
        assert torch.equal(sums(rows), alone)


def test_results_repeat_and_the_splits_sum_in_any_launch(products: Products) -> None:
    matrix, _ = random_matrix(GGMLType.Q6_K, 640, 2048, 7, False)
    for rows in (1, 16):
        config = products.route(rows, matrix)
        activations = written(products, torch.randn(rows, 2048, device="cuda"), config.format)
        seen = []
        for _ in range(5):
            partials = torch.full((config.splits, rows, matrix.rows), torch.nan, device="cuda")
            products.launch(matrix, activations, partials, rows, config)
            seen.append(partials)
        assert all(torch.equal(seen[0], other) for other in seen[1:])


def test_dependent_launches_in_a_graph_equal_plain_ones(products: Products) -> None:
    """A chain in which each product's input comes from the one before."""
    matrix, _ = random_matrix(GGMLType.Q4_K, 2048, 2048, 8, False)
    config = products.route(1, matrix)
    start = torch.randn(1, 2048, device="cuda")

    def chain() -> torch.Tensor:
        x = start
        for _ in range(8):
            partials = torch.empty((config.splits, 1, 2048), device="cuda")
            products.launch(matrix, written(products, x, config.format), partials, 1, config)
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


@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (5, 160), (9, 4096)])
def test_written_activations_equal_the_reference(products: Products, rows: int, cols: int) -> None:
    x = np.random.default_rng(cols).standard_normal((rows, cols)).astype(np.float32)
    x[0] *= 1e6
    device = torch.from_numpy(x).cuda()
    codes, terms = int8_activations(x)
    int8 = products.to_int8(device)
    assert int(np.abs(int8.codes.cpu().numpy().astype(int) - codes).max()) <= 1  # a division's last bit
    np.testing.assert_allclose(int8.terms[..., 0].cpu().numpy(), terms[..., 0], rtol=1e-6)
    values, scales = half_activations(x, 16)
    half = products.to_half(device, 16)
    assert np.array_equal(half.row_scales.cpu().numpy(), scales)
    assert np.array_equal(half.values.cpu().numpy().view(np.uint16), values.view(np.uint16))


@pytest.mark.parametrize("layout", REPACKED_LAYOUTS, ids=lambda each: each.name)
@pytest.mark.parametrize("shard", [False, True])
def test_repacking_equals_the_reference(layout: WeightLayout, shard: bool) -> None:
    """Of matrices, and of slices by columns, whose rows lie apart in memory."""
    cols = max(320 // layout.block_size, 1) * layout.block_size
    parts = [random_raw(GGMLType[layout.name], rows, cols * (1 + shard), rows) for rows in (128, 90)]
    if shard:
        parts = [part.columns(cols, 2 * cols) for part in parts]
    seen: list[int] = []
    got = Packer("cuda").pack(parts, uploaded=seen.append)
    expected = pack_matrix(parts, "cuda")
    assert torch.equal(got.weights, expected.weights)
    assert torch.equal(got.block_scales, expected.block_scales)
    assert (got.rows, got.cols, got.format) == (expected.rows, expected.cols, expected.format)
    assert sum(seen) == sum(part.size_bytes for part in parts)
