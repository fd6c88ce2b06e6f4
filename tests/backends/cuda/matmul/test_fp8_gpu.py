"""Matmuls in 8-bit floats on a Hopper GPU against float64 of rounded operands, and whole models against exact ones."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.expert_stacks import random_choices, random_stack  # noqa: E402
from backends.cuda.matmul.fp8_cases import (  # noqa: E402
    SHARES,
    FP8Values,
    Share,
    awkward_rows,
    check_tokens,
    converted,
    e4m3_source,
    poisoned,
    row_errors,
)
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR  # noqa: E402
from realizar.backends.cuda.matmul import fp8  # noqa: E402
from realizar.backends.cuda.matmul.fp8 import (  # noqa: E402
    FP8_INPUT,
    FP8_ROWS,
    decoded_bytes,
    laid_bytes,
    launch_fp8,
    route_fp8,
    stored_weights,
)
from realizar.backends.cuda.matmul.grouped import GroupedBuffers, GroupedMatmuls  # noqa: E402
from realizar.backends.cuda.matmul.grouped_tiles import StepTiles  # noqa: E402
from realizar.backends.cuda.matmul.linears import launch_gated  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels  # noqa: E402
from realizar.backends.cuda.matmul.tuning_table import ExpertShape  # noqa: E402
from realizar.backends.cuda.weights import pack_raw  # noqa: E402
from realizar.backends.cuda.weights.experts import PackedExperts  # noqa: E402
from realizar.backends.cuda.weights.pack import PackedMatrix  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import Packer, pack_by_threads  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT  # noqa: E402
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
    config = route_fp8(matmuls, tokens, matrices, None)
    partials = torch.full((config.splits, tokens + 1, width + 2 * beside), torch.nan, device="cuda")
    launch_fp8(matmuls, matrices, x.buffer(), partials, tokens, config, columns)
    sums = partials[:, :tokens, beside : beside + width].clone()
    partials[:, :tokens, beside : beside + width] = torch.nan
    assert bool(partials.isnan().all())
    return sums.double().sum(0)


def interleaved(weights: Tensor) -> Tensor:
    """[strips, 2, 64, cols] of gate above up."""
    return weights.view(2, -1, 64, weights.shape[1]).transpose(0, 1)


def as_halves(matmuls: MatmulKernels, matrix: PackedMatrix, tokens: int) -> MatmulConfig:
    return dataclasses.replace(route_fp8(matmuls, tokens, [matrix], None), halves=True)


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


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("out_features", "cols"), [(296, 640), (520, 704), (48, 64), (640, 4096)])
def test_numbers_of_eight_bits_stay_as_they_are(
    matmuls: MatmulKernels, share: Share, out_features: int, cols: int
) -> None:
    """Where 64 output features have a scale in common, or each has one; else they are rounded once more. Strips and
    chunks that do not fill a tile, rows beyond a pair of tiles, and columns in splits."""
    source = e4m3_source(share, out_features, cols, np.random.default_rng(1))
    weights = torch.from_numpy(source.dequantize()).to("cuda", torch.float64)
    matrix = pack_by_threads([source], "cuda")
    assert (stored_weights(matrix) is None) == (share == "own" and cols > 64)
    for tokens in (1, 64, 130, 600):
        values = FP8Values.of(torch.randn((tokens, cols), device="cuda"))
        found = error(multiplied(matmuls, [matrix], values, 4), values.floats() @ weights.T)
        assert found < _SUMS if stored_weights(matrix) else 0.01 < found < 0.04, tokens


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("share", SHARES)
def test_the_device_packs_as_the_host_does(share: Share, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces, of matrices one below the other and interleaved."""
    monkeypatch.setattr(pack_raw, "_PIECE_BYTES", 1 << 16)
    rng = np.random.default_rng(3)
    parts = [e4m3_source(share, rows, 640, rng) for rows in (320, 320 if gated else 150)]
    found, expected = Packer("cuda").pack(parts, interleaved=gated), pack_by_threads(parts, "cuda", interleaved=gated)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.block_scales, expected.block_scales)


@pytest.mark.parametrize("share", ["block", "feature"])
def test_several_matrices_of_eight_bits_and_halves(matmuls: MatmulKernels, share: Share) -> None:
    """Several in a launch, and the sums of one as halves, are those that each has alone."""
    rng = np.random.default_rng(2)
    matrices = [pack_by_threads([e4m3_source(share, rows, 1024, rng)], "cuda") for rows in (640, 128, 192)]
    values = FP8Values.of(torch.randn((2500, 1024), device="cuda"))
    apart = [multiplied(matmuls, [matrix], values, 4) for matrix in matrices]
    assert torch.equal(multiplied(matmuls, matrices, values, 4), torch.cat(apart, 1))
    halves = torch.empty((1, 2500, 640), device="cuda", dtype=torch.float16)
    launch_fp8(matmuls, matrices[:1], values.buffer(), halves, 2500, as_halves(matmuls, matrices[0], 2500), [0])
    assert torch.equal(halves[0], (apart[0] / HALF_FACTOR.value).half())


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


@pytest.mark.parametrize("out_features", [128, 896])
def test_sums_leave_as_halves(matmuls: MatmulKernels, out_features: int) -> None:
    """Each is that of the same matmul in float32, rounded, and nothing else is written."""
    matrix = pack_by_threads([raw(GGMLType.Q4_K, out_features, 1024, 2)], "cuda")
    values = FP8Values.of(torch.randn((300, 1024), device="cuda"))
    floats = multiplied(matmuls, [matrix], values, 4)
    halves = torch.full((1, 301, out_features + 16), torch.nan, device="cuda", dtype=torch.float16)
    launch_fp8(matmuls, [matrix], values.buffer(), halves, 300, as_halves(matmuls, matrix, 300), [8])
    assert torch.equal(halves[0, :300, 8:-8], (floats / HALF_FACTOR.value).half())
    halves[0, :300, 8:-8] = torch.nan
    assert bool(halves.isnan().all())


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
    ("block", 320, 640, "silu"),
    ("feature", 192, 704, "silu"),
    ("Q4_K", 128, 512, "silu"),
    ("Q4_K", 192, 256, "gelu_tanh"),
    ("Q8_0", 64, 192, "silu"),
    ("Q6_K", 640, 256, "silu"),
)


@pytest.mark.parametrize(("name", "width", "cols", "activation"), GATED)
def test_gated_epilogue(matmuls: MatmulKernels, name: str, width: int, cols: int, activation: Any) -> None:
    """The next matmul's input: scales of 128 columns, those of two blocks, and codes within a rounding."""
    rng = np.random.default_rng(1)
    made = [
        e4m3_source(name, width, cols, rng) if name in SHARES else raw(GGMLType[name], width, cols, seed)
        for seed in (1, 2)
    ]
    matrix = pack_by_threads(made, "cuda", interleaved=True)
    weights = rounded_weights(matmuls, matrix).view(-1, 2, 64, cols)
    if name in ("block", "feature"):
        weights = interleaved(torch.from_numpy(np.concatenate([each.dequantize() for each in made])).cuda().double())
    activated = torch.nn.functional.silu
    if activation == "gelu_tanh":
        activated = lambda x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
    for tokens in (1, 130, 256, 600):
        values, target = (
            FP8Values.of(4 * torch.randn((tokens, cols), device="cuda")),
            poisoned(tokens, width, matmuls.device),
        )
        launch_gated(matmuls, matrix, values.buffer(), target, tokens, route_fp8(matmuls, tokens, [matrix], activation))
        gate, up = (values.floats() @ weights[:, part].reshape(width, cols).T for part in (0, 1))
        exact, found = activated(gate) * up, FP8Values.read(target.codes, target.terms, tokens, width)
        padded = torch.zeros((tokens, *found.codes.shape[1:]), dtype=torch.float64, device="cuda")
        padded.view(tokens, -1)[:, :width] = exact
        scales = padded.abs().amax(2) / 448
        assert torch.allclose(found.scales.double(), scales, rtol=2e-3)
        limit = (padded.abs() / 15 + scales[..., None]).flatten(1)[:, :width]  # and the error of sums
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
    config = route_fp8(matmuls, 300, [matrix], None)
    launch_fp8(matmuls, [matrix], values, partials, 300, config, [0])
    once, graph = partials.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_fp8(matmuls, [matrix], values, partials, 300, config, [0])
    partials.fill_(torch.nan)
    matmuls.decoded_weights.fill_(0x7F)
    graph.replay()
    assert torch.equal(partials, once)
    assert config.format == FP8_INPUT
    assert decoded_bytes([matrix]) == 256 * 512 + 256


HIDDEN, WIDTH, EXPERTS = 576, 320, 6


def laid_values(rows: Tensor, step: StepTiles, cols: int) -> FP8Values:
    """What lies in tiles, in the order of places."""
    codes, scales = laid_bytes(cols)
    data, groups = rows.view(torch.uint8), codes // 128
    both = data[: step.places * (codes + scales)].split([step.places * codes, step.places * scales])
    tiles = both[0].view(-1, 2 * groups, 4, step.tokens // 8, 8, 16)
    return FP8Values.read(tiles, both[1].view(torch.float32).view(-1, groups, step.tokens), step.places, cols)


def expert_weights(matmuls: MatmulKernels, stack: PackedExperts) -> Tensor:
    """float64 [experts, out_features, in_features], as `rounded_weights`."""
    return torch.stack([rounded_weights(matmuls, stack.part(each, each + 1)) for each in range(stack.count)])


def by_expert(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Each row times its expert."""
    found = x.new_zeros((len(x), weights.shape[1]))
    for expert, matrix in enumerate(weights):
        found[experts == expert] = x[experts == expert] @ matrix.T
    return found


@pytest.mark.parametrize(
    ("name", "activation"),
    [("Q4_K", "silu"), ("Q6_K", "gelu"), ("MXFP4", "clamped"), ("block", "silu"), ("feature", "clamped")],
)
@pytest.mark.parametrize("halves", [True, False])
def test_experts(matmuls: MatmulKernels, name: str, activation: Any, halves: bool) -> None:
    """Tiles of 128 places with few rows and with many, an expert without any, rows that go nowhere, and chunks and
    output features that do not fill a tile; a graph gives the same bits."""
    hidden, width = (HIDDEN, WIDTH) if name == "MXFP4" else (512, 256)
    grouped = GroupedMatmuls(matmuls, fp8_pairs=1)
    made = partial(e4m3_source, name) if name in SHARES else GGMLType[name]
    gate_up, up_weights = random_stack(made, EXPERTS, 2 * width, hidden, gated=True)
    down, down_weights = random_stack(made, EXPERTS, hidden, width, seed=1)
    if name in SHARES:
        up_weights = torch.stack([interleaved(each).reshape(-1, hidden) for each in up_weights])
    else:
        up_weights, down_weights = expert_weights(matmuls, gate_up), expert_weights(matmuls, down)
    biases = [torch.randn(EXPERTS, each.out_features, device="cuda") * 0.1 for each in (gate_up, down)]
    up_bias, down_bias = biases if activation == "clamped" else (None, None)
    shape = ExpertShape(EXPERTS, hidden, width)
    buffers = GroupedBuffers("cuda", 1500, 2, shape, True, fp8_pairs=1)
    for rows in (40, 1500):
        chosen = random_choices(rows, 2, EXPERTS, rows, 0.7)
        chosen[chosen == 4] = -1
        step, flat = grouped.step(rows, 2, shape), torch.from_numpy(chosen).cuda()
        values = FP8Values.of(2 * torch.randn((rows, hidden), device="cuda"))
        configs = grouped.route(step, gate_up, activation), grouped.route(step, down, tiled=True, halves=halves)
        grouped.prepare(configs, EXPERTS)
        weights, x = torch.rand(rows * 2, device="cuda") + 0.5, values.buffer(FP8_ROWS)
        out = torch.empty(rows * 2, hidden, device="cuda", dtype=torch.float16 if halves else torch.float32)

        def run() -> None:
            grouped.sort(flat, step, EXPERTS, buffers)  # noqa: B023
            grouped.launch_gated(gate_up, x, 2, step, buffers, configs[0], up_bias)  # noqa: B023
            grouped.launch_pairs(down, None, 1, step, buffers, configs[1], out, weights, down_bias)  # noqa: B023

        for each in (buffers.laid, buffers.gated, out):
            each.fill_(torch.nan)
        run()
        once, graph = out.clone(), torch.cuda.CUDAGraph()
        pairs = buffers.slots[: int(buffers.work[0]) * step.tokens].long()
        live = pairs >= 0
        pairs, activated = pairs[live], laid_values(buffers.gated, step, width).floats()[: len(live)][live]
        assert sorted(pairs.tolist()) == (flat.view(-1) >= 0).nonzero()[:, 0].tolist()
        experts = flat.view(-1)[pairs].long()
        bias = 0 if up_bias is None else up_bias.double()[experts]
        sums = by_expert(values.floats()[pairs // 2], up_weights, experts) + bias
        gate, up = (each.flatten(1) for each in sums.view(len(pairs), -1, 2, 64).unbind(2))
        exact = ACTIVATIONS[activation](gate, up)
        largest = exact.abs().amax(1, keepdim=True)
        assert bool(((activated - exact).abs() <= exact.abs() / 15 + largest / 500).all())
        assert error(activated, exact) < 0.04
        sums = by_expert(activated, down_weights, experts)
        sums = (sums + (0 if down_bias is None else down_bias.double()[experts])) * weights.double()[pairs, None]
        assert error(out[pairs].double() * (HALF_FACTOR.value if halves else 1), sums) < _SUMS
        out[pairs] = torch.nan
        assert bool(out.isnan().all())
        with torch.cuda.graph(graph):
            run()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.nan_to_num(7), once.nan_to_num(7))


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


ACTIVATIONS = {
    "silu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "gelu": lambda gate, up: torch.nn.functional.gelu(gate) * up,
    "clamped": clamped,
}


RECIPE = Recipe(
    64, 8, 2, hidden_size=512, feed_forward_size=1024, vocab_size=320, weights="Q4_K", windows=(None, 100),
    context_length=1024,
)  # fmt: skip
MODELS = {
    "gated": RECIPE,
    "mixed": dataclasses.replace(RECIPE, weights="Q6_K", parts=("biases", "qk_norm"), activation="gelu_tanh"),
    "post_norms": dataclasses.replace(RECIPE, weights="Q8_0", parts=("post_norms", "sinks"), windows=(None,)),
    "mixture": dataclasses.replace(  # all experts, so that none flips; then a dense layer
        RECIPE, experts=3, per_token=3, feed_forward_size=512, parts=("shared", "shared_gate")
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, chunks beside a decode, and few single tokens: as far from exact as FP8 is, and no farther."""
    monkeypatch.setattr(fp8, "LEAST_TOKENS", 128)
    monkeypatch.setattr(fp8, "DECODED_PAIRS", 128)
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
