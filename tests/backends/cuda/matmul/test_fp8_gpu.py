"""Matmuls in 8-bit floats on a Hopper GPU against float64 of rounded operands, and whole models against exact ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.fp8_cases import (  # noqa: E402
    FP8Values,
    awkward_rows,
    check_tokens,
    converted,
    poisoned,
    row_errors,
)
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.matmul import linears  # noqa: E402
from realizar.backends.cuda.matmul.fp8 import FP8_INPUT, decoded_bytes, launch_fp8, route_fp8  # noqa: E402
from realizar.backends.cuda.matmul.linears import launch_gated  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulKernels  # noqa: E402
from realizar.backends.cuda.weights.pack import PackedMatrix  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import pack_by_threads  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.quantization.block_source import BlockSource, block_source  # noqa: E402
from realizar.quantization.convert import QUANTIZED_TYPES  # noqa: E402
from realizar.quantization.random_blocks import random_blocks  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402

pytestmark = pytest.mark.gpu
Tensor = Any
TOKENS = (1, 7, 64, 128, 255, 256, 257, 513)
TYPES = (*QUANTIZED_TYPES, GGMLType.F16)
_SUMS = 1e-3  # relative: products of 128 columns are added with 14 bits or so


@pytest.fixture(scope="module")
def matmuls() -> MatmulKernels:
    return MatmulKernels("cuda")


def raw(ggml_type: GGMLType, out_features: int, cols: int, seed: int) -> BlockSource:
    data = random_blocks(ggml_type, out_features, cols, np.random.default_rng(seed), 0.02)
    return block_source(ggml_type, data, out_features, cols)


def rounded_weights(matmuls: MatmulKernels, matrix: PackedMatrix) -> Tensor:
    """float64 [out_features, cols]: weights as kernels of halves have them, rounded to e4m3 as the kernel scales them.

    A matmul of halves with rows of the identity gives them exactly.
    """
    cols = matrix.in_features
    config = matmuls.route(max(cols, 64), matrix)
    identity = torch.eye(max(cols, 64), cols, device="cuda")
    partials = torch.zeros((config.splits, len(identity), matrix.out_features), device="cuda")
    matmuls.launch(matrix, matmuls.written(identity, config.format), partials, len(identity), config)
    factors = 2.0**matrix.format.fp8_power / matrix.block_scales.double().repeat_interleave(64)
    factors = factors[: matrix.out_features, None]
    scaled = partials.sum(0)[:cols].T.double() * factors
    return scaled.clamp(-448, 448).float().to(torch.float8_e4m3fn).double() / factors


def multiplied(matmuls: MatmulKernels, matrices: list[PackedMatrix], x: FP8Values, beside: int) -> Tensor:
    """The sums [tokens, out_features], where nothing beside their places was written."""
    tokens, width = len(x.codes), sum(matrix.out_features for matrix in matrices)
    columns = np.cumsum([beside, *(matrix.out_features for matrix in matrices[:-1])]).tolist()
    partials = torch.full((1, tokens + 1, width + 2 * beside), torch.nan, device="cuda")
    launch_fp8(matmuls, matrices, x.buffer(), partials, tokens, columns)
    sums = partials[0, :tokens, beside : beside + width].clone()
    partials[0, :tokens, beside : beside + width] = torch.nan
    assert bool(partials.isnan().all())
    return sums.double()


def error(found: Tensor, expected: Tensor) -> float:
    """Relative; infinite where something was not written."""
    return float(((found - expected).norm() / expected.norm()).nan_to_num(torch.inf))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda ggml_type: ggml_type.name)
def test_every_type_multiplies(matmuls: MatmulKernels, ggml_type: GGMLType) -> None:
    """Output features that end within a strip, and with an odd number of strips."""
    source = raw(ggml_type, 152, 512, 1)
    matrix = pack_by_threads([source], "cuda")
    weights, x = rounded_weights(matmuls, matrix), torch.randn((130, 512), device="cuda")
    values = FP8Values.of(x)
    sums = multiplied(matmuls, [matrix], values, 4)
    assert error(sums, values.floats() @ weights.T) < _SUMS
    exact = x.double() @ torch.from_numpy(source.dequantize()).to("cuda", torch.float64).T
    assert 0.01 < error(sums, exact) < 0.08


SHAPES = (
    ("Q4_K", 64, 256), ("Q4_K", 640, 2048), ("Q8_0", 128, 64), ("Q8_0", 192, 192), ("Q8_0", 72, 2880),
    ("Q6_K", 320, 1024), ("F16", 130, 896),
)  # fmt: skip


@pytest.mark.parametrize(("name", "out_features", "cols"), SHAPES)
def test_shapes_and_numbers_of_tokens(matmuls: MatmulKernels, name: str, out_features: int, cols: int) -> None:
    """Columns that end within a group of scales; outputs that begin at 16 bytes and not; large first columns."""
    matrix = pack_by_threads([raw(GGMLType[name], out_features, cols, cols)], "cuda")
    weights = rounded_weights(matmuls, matrix)
    for tokens in TOKENS:
        x = torch.randn((tokens, cols), device="cuda")
        x[:, 0] *= 30
        values = FP8Values.of(x)
        sums = multiplied(matmuls, [matrix], values, 4 if tokens % 2 else 1)
        assert error(sums, values.floats() @ weights.T) < _SUMS, tokens


@pytest.mark.parametrize("tokens", [300, 2500])
def test_matrices_of_two_formats_in_one_launch(matmuls: MatmulKernels, tokens: int) -> None:
    """More blocks of tokens than run beside each other, and a number that does not fill the last of them."""
    matrices = [pack_by_threads([raw(GGMLType[name], 192, 1024, 3)], "cuda") for name in ("Q4_K", "Q6_K")]
    weights = torch.cat([rounded_weights(matmuls, matrix) for matrix in matrices])
    values = FP8Values.of(torch.randn((tokens, 1024), device="cuda"))
    sums = multiplied(matmuls, matrices, values, 4)
    assert error(sums, values.floats() @ weights.T) < _SUMS
    assert torch.equal(sums, multiplied(matmuls, matrices, values, 4))


GATED = (
    ("Q4_K", 128, 512, "silu"),
    ("Q4_K", 192, 256, "gelu_tanh"),
    ("Q8_0", 64, 192, "silu"),
    ("Q6_K", 640, 256, "silu"),
)


@pytest.mark.parametrize(("name", "width", "cols", "activation"), GATED)
def test_gated_epilogue(matmuls: MatmulKernels, name: str, width: int, cols: int, activation: Any) -> None:
    """The next matmul's input: scales of 128 columns, those of two blocks, and codes within a rounding."""
    matrix = pack_by_threads([raw(GGMLType[name], width, cols, seed) for seed in (1, 2)], "cuda", interleaved=True)
    weights = rounded_weights(matmuls, matrix).view(-1, 2, 64, cols)
    activated = torch.nn.functional.silu
    if activation == "gelu_tanh":
        activated = lambda x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
    for tokens in (1, 130, 256, 600):
        values, target = (
            FP8Values.of(4 * torch.randn((tokens, cols), device="cuda")),
            poisoned(tokens, width, matmuls.device),
        )
        launch_gated(matmuls, matrix, values.buffer(), target, tokens, route_fp8(matmuls, [matrix], activation))
        gate, up = (values.floats() @ weights[:, part].reshape(width, cols).T for part in (0, 1))
        exact, found = activated(gate) * up, FP8Values.read(target.codes, target.terms, tokens, width)
        padded = torch.zeros((tokens, *found.codes.shape[1:]), dtype=torch.float64, device="cuda")
        padded.view(tokens, -1)[:, :width] = exact
        scales = padded.abs().amax(2) / 448
        assert torch.allclose(found.scales.double(), scales, rtol=2e-3)
        limit = (padded.abs() / 15 + scales[..., None] * 0.2).flatten(1)[:, :width]  # and the error of sums
        assert float(((found.floats() - exact).abs() / limit).max().nan_to_num(torch.inf)) < 1, tokens


@pytest.mark.parametrize("cols", [64, 700, 14336])
def test_tokens_as_torch_rounds_them(cols: int) -> None:
    """Tokens equal torch's but for quotients that the device rounds the other way."""
    x = awkward_rows(cols, torch.device("cuda"))
    check_tokens(converted(x), x, ulps=1)


def test_a_graph_gives_the_same_bits(matmuls: MatmulKernels) -> None:
    matrix = pack_by_threads([raw(GGMLType.Q4_K, 256, 512, 1)], "cuda")
    values, partials = (
        FP8Values.of(torch.randn((300, 512), device="cuda")).buffer(),
        torch.empty((1, 300, 256), device="cuda"),
    )
    launch_fp8(matmuls, [matrix], values, partials, 300, [0])
    once, graph = partials.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_fp8(matmuls, [matrix], values, partials, 300, [0])
    partials.fill_(torch.nan)
    matmuls.decoded_weights.fill_(0x7F)
    graph.replay()
    assert torch.equal(partials, once)
    assert route_fp8(matmuls, [matrix], None).format == FP8_INPUT
    assert decoded_bytes([matrix]) == 256 * 512 + 256


RECIPE = Recipe(
    64, 8, 2, hidden_size=512, feed_forward_size=1024, vocab_size=320, weights="Q4_K", windows=(None, 100),
    context_length=1024,
)  # fmt: skip
MODELS = {
    "gated": RECIPE,
    "mixed": dataclasses.replace(RECIPE, weights="Q6_K", parts=("biases", "qk_norm"), activation="gelu_tanh"),
    "post_norms": dataclasses.replace(RECIPE, weights="Q8_0", parts=("post_norms", "sinks"), windows=(None,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, chunks beside a decode, and few single tokens: as far from exact as FP8 is, and no farther."""
    monkeypatch.setattr(linears, "LEAST_TOKENS", 128)
    recipe = MODELS[name]
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        max_running=2, max_step_tokens=640, kv_cache_bytes=256 << 20, context_length=1024, prompt_dtype="fp8"
    )
    runner = GPURunner(spec, checkpoint, config)
    requests = [runner.request(row, random_tokens(recipe, 600, row), first=64 * row) for row in range(2)]
    first, second = requests
    runner.step([(first, 500)])
    runner.step([(first, 1), (second, 300)])
    runner.step([(first, 1), (second, 1)])
    exact = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    for request in requests:
        errors = row_errors(request.values(), exact.logits(request.token_ids[: request.computed]))
        assert 0.02 < errors.mean() <= 0.2
        assert errors.max() <= 0.45
    runner.close()
