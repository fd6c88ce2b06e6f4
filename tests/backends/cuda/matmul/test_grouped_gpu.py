"""Grouped matmuls over experts on a GPU against float64 on the same packed weights, their outputs poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from numpy.typing import NDArray

from backends.cuda.matmul.expert_stacks import expected_lists, random_choices, random_stack
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.cuda.matmul.experts import Pairs
from realizar.backends.cuda.matmul.grouped import GroupedBuffers, GroupedConfig, GroupedMatmuls
from realizar.backends.cuda.matmul.grouped_tiles import (
    BETWEEN_TOKENS,
    DIRECT_TOKENS,
    MOST_STAGES,
    TILE_TOKENS,
    StepTiles,
    fitted,
    most_tiles,
)
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.matmul.routing import ExpertsRead
from realizar.backends.cuda.matmul.tuning_table import ExpertShape
from realizar.backends.cuda.native.grouped.source import AnyTiles, DirectTiles, GroupedTiles, sum_words
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.checkpoint.ggml_types import GGMLType

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EXPERTS, PER_TOKEN = 6, 3
_TOLERANCE = 1.5e-3  # weights and activations rounded to halves
TYPES = [
    GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.Q5_0, GGMLType.MXFP4, GGMLType.Q3_K, GGMLType.IQ2_XS,
]  # fmt: skip


TYPES_AND_FLOATS = [*TYPES, GGMLType.BF16]
ACTIVATIONS: tuple[GatedActivation, ...] = ("silu", "gelu_tanh", "gelu", "clamped", "relu_squared")


DIRECT = {"2 x 4": (2, 4, 2, 2), "4 x 1": (4, 1, 1, 5), "1 x 8": (1, 8, 4, 1)}
"""Slots, parts, unroll and blocks of kernels whose warps read weights for themselves."""


class RetiledMatmuls(GroupedMatmuls):
    """Grouped matmuls with other tiles than those that are chosen for them."""

    def other(self, chosen: GroupedConfig) -> AnyTiles:
        """The tiles in place of the chosen ones."""
        raise NotImplementedError

    def route(
        self, step: StepTiles, stack: PackedExperts, activation: GatedActivation | None = None, tiled: bool = False,
        halves: bool = False,
    ) -> GroupedConfig:  # fmt: skip
        chosen = super().route(step, stack, activation, tiled, halves)
        return replace(chosen, tiles=self.other(chosen))


class DirectMatmuls(RetiledMatmuls):
    """Grouped matmuls without a ring."""

    numbers: tuple[int, int, int, int]

    def step(self, rows: int, per_token: int, shape: ExpertShape, shared: int = 0) -> StepTiles:
        step = super().step(rows, per_token, shape, shared)
        tokens = min(step.tokens, DIRECT_TOKENS)
        return replace(step, tokens=tokens, count=most_tiles(step.pairs, shape.experts, tokens))

    def other(self, chosen: GroupedConfig) -> DirectTiles:
        return DirectTiles(chosen.tiles.tokens, *self.numbers)


THREE_GROUPS_TOKENS = 64


class GatheringMatmuls(RetiledMatmuls):
    """Grouped matmuls whose gate and up find rows of x by their pairs, whatever the tiles."""

    def other(self, chosen: GroupedConfig) -> GroupedTiles:
        assert isinstance(chosen.tiles, GroupedTiles)
        return replace(chosen.tiles, laid=False)


class LaidMatmuls(RetiledMatmuls):
    """Grouped matmuls whose rows of gate and up are laid in tiles first; three warpgroups where they have registers."""

    def other(self, chosen: GroupedConfig) -> GroupedTiles:
        assert isinstance(chosen.tiles, GroupedTiles)
        if chosen.activation is None:
            return chosen.tiles
        tiles = replace(chosen.tiles, laid=True)
        if tiles.tokens > THREE_GROUPS_TOKENS:
            return tiles
        tiles = replace(tiles, groups=3, blocks=1, stages=MOST_STAGES)
        return fitted(tiles, chosen.format, True, self._tuning.shared_bytes)


KERNELS = ("wgmma", "mma_sync", *DIRECT)


def of_kind(kind: str) -> GroupedMatmuls:
    matmuls = MatmulKernels("cuda")
    if kind in DIRECT:
        direct = DirectMatmuls(matmuls)
        direct.numbers = DIRECT[kind]
        return direct
    if kind == "mma_sync":
        matmuls.tuning = replace(matmuls.tuning, wgmma=False)
    elif not matmuls.tuning.wgmma:
        pytest.skip("wgmma does not run here")
    return LaidMatmuls(matmuls) if kind == "wgmma, laid" else GatheringMatmuls(matmuls)


@pytest.fixture(scope="module", params=KERNELS)
def grouped(request: pytest.FixtureRequest) -> GroupedMatmuls:
    return of_kind(request.param)


@pytest.fixture(scope="module", params=[*KERNELS, "wgmma, laid"])
def chained(request: pytest.FixtureRequest) -> GroupedMatmuls:
    """For gate and up with down."""
    return of_kind(request.param)


@pytest.fixture(scope="module")
def matmuls() -> MatmulKernels:
    return MatmulKernels("cuda")


def tiles_of(grouped: GroupedMatmuls, rows: int, tokens: int, per_token: int = PER_TOKEN) -> StepTiles:
    """Tiles of a size that a test names, in place of what `step` would choose."""
    return StepTiles(rows * per_token, tokens, most_tiles(rows * per_token, EXPERTS, tokens))


def buffers_for(step: StepTiles, experts: int, width: int = 0, hidden: int = 0) -> GroupedBuffers:
    """Poisoned buffers for tiles of one size."""
    buffers = GroupedBuffers("cuda", 1, 1, ExpertShape(experts, 64, 64), True)
    buffers.slots = torch.full((step.places,), 12345678, dtype=torch.int32, device="cuda")
    buffers.work = torch.full((1 + step.count,), 12345678, dtype=torch.int32, device="cuda")
    buffers.sums = torch.full((sum_words(step.pairs, experts),), 12345678, dtype=torch.int32, device="cuda")
    buffers.gated, buffers.laid = (
        torch.full((step.places * cols,), torch.nan, dtype=torch.float16, device="cuda") for cols in (width, hidden)
    )
    return buffers


def on_device(chosen: NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(chosen)).cuda()


def sizes(grouped: GroupedMatmuls, number: int | None = None) -> tuple[int, ...]:
    """Places of tiles: all, or of a numbered case every other one."""
    every = tuple(sorted([*TILE_TOKENS, *BETWEEN_TOKENS])) if grouped._tuning.wgmma else TILE_TOKENS[:-1]
    if isinstance(grouped, DirectMatmuls):
        return tuple(each for each in every if each <= DIRECT_TOKENS)
    return every if number is None else every[number % 2 :: 2]


def sums_of(x: torch.Tensor, exact: torch.Tensor, chosen: NDArray[np.int32]) -> torch.Tensor:
    """float64 [pairs, out_features]: each pair's row times its expert, NaN where it goes nowhere."""
    flat = torch.from_numpy(chosen.reshape(-1)).cuda()
    found = torch.full((len(flat), exact.shape[1]), torch.nan, dtype=torch.float64, device="cuda")
    for expert in range(len(exact)):
        pairs = (flat == expert).nonzero()[:, 0]
        found[pairs] = x.double()[pairs // chosen.shape[1]] @ exact[expert].T
    return found


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Rows agree, and exactly those that go nowhere were left alone."""
    assert torch.equal(found.isnan().any(1), wanted.isnan().any(1))
    assert torch.equal(found.isnan().all(1), wanted.isnan().any(1))
    live = ~wanted.isnan().any(1)
    error = (found.double() - wanted)[live].norm(dim=1) / wanted[live].norm(dim=1)
    assert float(error.max()) < _TOLERANCE if len(error) else True


def some_choices(rows: int, seed: int) -> NDArray[np.int32]:
    """Choices with padding rows, an expert that nobody chooses, and numbers beyond the experts."""
    chosen = random_choices(rows, PER_TOKEN, EXPERTS, seed)
    chosen[chosen == 4] = EXPERTS + 3 if seed % 2 else -7
    if rows > 1:
        chosen[rows - rows // 5 :] = -1
    return chosen


SORTS = {
    "one row": random_choices(1, 8, 128),
    "one expert": np.full((200, 8), 5, np.int32),
    "128 by 8": random_choices(256, 8, 128),
    "skewed": random_choices(300, 4, 60, skew=1.5),
    "large": random_choices(4096, 8, 128),
    "nobody": np.full((64, 8), -1, np.int32),
    "beyond": random_choices(77, 3, 200) - 50,
    "a prompt's": random_choices(8192, 9, 128, skew=0.7),
    "a prompt's, most nowhere": np.where(np.arange(4096)[:, None] % 7 == 3, random_choices(4096, 8, 128), -1),
    "many experts": random_choices(50, 10, 1000),
    "a prompt's, many experts": random_choices(777, 10, 1000),
}


@pytest.mark.parametrize("case", SORTS)
@pytest.mark.parametrize("tokens", [8, 64])
def test_pairs_are_sorted_by_expert(matmuls: MatmulKernels, case: str, tokens: int) -> None:
    chosen = SORTS[case]
    experts = 1000 if case.endswith("many experts") else 128
    experts_read = ExpertsRead("cuda")
    grouped, pairs = GroupedMatmuls(matmuls, experts_read), chosen.size
    step = StepTiles(pairs, tokens, most_tiles(pairs, experts, tokens))
    buffers, device = buffers_for(step, experts), on_device(chosen)
    for _ in range(2):
        grouped.sort(device, step, experts, buffers)
    slots, work, starts = expected_lists(chosen, experts, tokens)
    assert np.array_equal(buffers.work[: len(work)].cpu().numpy(), work)
    assert np.array_equal(buffers.slots[: len(slots)].cpu().numpy(), slots)
    assert np.array_equal(buffers.starts.cpu().numpy(), starts)
    assert bool((buffers.slots[len(slots) :] == 12345678).all())
    assert bool((buffers.work[len(work) :] == 12345678).all())
    live = np.unique(chosen[(chosen >= 0) & (chosen < experts)])
    assert experts_read.average() == (len(live) or None)


def run_pairs(
    grouped: GroupedMatmuls, stack: PackedExperts, x: ActivationBuffer, chosen: NDArray[np.int32], step: StepTiles,
    weights: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Products of pairs, written over poison."""
    buffers, config = buffers_for(step, stack.count), grouped.route(step, stack)
    grouped.sort(on_device(chosen), step, stack.count, buffers)
    out = torch.full((chosen.size + 1, stack.out_features), torch.nan, device="cuda")
    grouped.launch_pairs(stack, x, chosen.shape[1], step, buffers, config, out, weights, bias)
    assert bool(out[-1].isnan().all())
    return out[:-1]


@pytest.mark.parametrize("ggml_type", TYPES_AND_FLOATS, ids=lambda v: v.name)
def test_rows_of_pairs(matmuls: MatmulKernels, grouped: GroupedMatmuls, ggml_type: GGMLType) -> None:
    """Every size of tile, with odd numbers of chunks, outputs that end within a strip, weights and biases."""
    cols = 2880 if ggml_type.block_size <= 32 else 1280
    stack, exact = random_stack(ggml_type, EXPERTS, 200, cols)
    for seed, tokens in enumerate(sizes(grouped, TYPES_AND_FLOATS.index(ggml_type))):
        for rows in (1, 37, 150):
            x = torch.randn(rows, cols, device="cuda")
            chosen = some_choices(rows, seed + rows)
            bias = torch.randn(EXPERTS, 200, device="cuda") if seed % 2 else None
            weights = torch.rand(chosen.size, device="cuda") + 0.5 if rows > 1 else None
            wanted = sums_of(x, exact, chosen)
            if bias is not None:
                flat = on_device(chosen).reshape(-1).clamp(0, EXPERTS - 1).long()
                wanted += bias.double()[flat]
            if weights is not None:
                wanted *= weights.double()[:, None]
            step = tiles_of(grouped, rows, tokens)
            found = run_pairs(
                grouped,
                stack,
                matmuls.written(x, InputFormat("half", 64 if rows > 9 else 8)),
                chosen,
                step,
                weights,
                bias,
            )
            check(found, wanted)


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0], ids=lambda v: v.name)
def test_rows_of_pairs_as_halves(matmuls: MatmulKernels, ggml_type: GGMLType) -> None:
    """The sums of floats, divided and rounded; those beyond the largest half are cut to it, and NaN stays one."""
    if not matmuls.tuning.wgmma:
        pytest.skip("wgmma does not run here")
    grouped, (stack, _) = GroupedMatmuls(matmuls), random_stack(ggml_type, EXPERTS, 204, 1280)
    for seed, (tokens, rows) in enumerate(((8, 3), (16, 30), (24, 37), (48, 90), (64, 150), (128, 300))):
        chosen, bias = some_choices(rows, seed), torch.randn(EXPERTS, 204, device="cuda")
        weights, values = torch.rand(chosen.size, device="cuda") + 0.5, torch.randn(rows, 1280, device="cuda")
        weights[:PER_TOKEN] *= 3e6
        x = matmuls.written(values, InputFormat("half", 64 if rows > 9 else 8))
        x.scales[rows // 2] = torch.nan
        step, flat = tiles_of(grouped, rows, tokens), on_device(chosen)
        buffers, found = buffers_for(step, EXPERTS), []
        grouped.sort(flat, step, EXPERTS, buffers)
        for dtype in (torch.float32, torch.float16):
            out = torch.full((chosen.size + 1, 204), -7.0, dtype=dtype, device="cuda")
            config = grouped.route(step, stack, halves=dtype == torch.float16)
            assert config.halves is (dtype == torch.float16)
            grouped.launch_pairs(stack, x, PER_TOKEN, step, buffers, config, out, weights, bias)
            found.append(out)
        live = torch.isin(flat.reshape(-1), torch.arange(EXPERTS, device="cuda"))
        wanted = (found[0][:-1] / HALF_FACTOR.value).clamp(-65504, 65504).half()
        close = torch.isclose(found[1][:-1].float(), wanted.float(), rtol=2**-10, atol=2**-24, equal_nan=True)
        assert bool(close[live].all())
        assert bool(found[1][:PER_TOKEN][live[:PER_TOKEN]].abs().max() == 65504) or not bool(live[:PER_TOKEN].any())
        assert bool((found[1][:-1][~live] == -7).all())
        assert bool((found[1][-1] == -7).all())


def gated_values(
    x: torch.Tensor, exact: torch.Tensor, chosen: NDArray[np.int32], activation: GatedActivation, bias: torch.Tensor
) -> torch.Tensor:
    """Of biases [experts, 2 * width], gate's before up's."""
    flat = on_device(chosen).reshape(-1).clamp(0, EXPERTS - 1).long()
    gate, up = (sums_of(x, exact, chosen) + bias.double()[flat]).chunk(2, dim=1)
    if activation == "clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "relu_squared":
        return torch.relu(gate) ** 2 * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def chain(
    grouped: GroupedMatmuls, stacks: tuple[PackedExperts, PackedExperts], x: ActivationBuffer, chosen: torch.Tensor,
    step: StepTiles, activation: GatedActivation, out: torch.Tensor, weights: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Callable[[], None]:  # fmt: skip
    """The kernels of a layer's experts, ready to be started."""
    gate_up, down = stacks
    buffers = buffers_for(step, gate_up.count, down.in_features, gate_up.in_features)
    first, second = grouped.route(step, gate_up, activation), grouped.route(step, down, tiled=True)
    grouped.prepare([first, second], gate_up.count)

    def start() -> None:
        grouped.sort(chosen, step, gate_up.count, buffers)
        grouped.launch_gated(gate_up, x, chosen.shape[1], step, buffers, first, biases[0])
        grouped.launch_pairs(down, None, 1, step, buffers, second, out, weights, biases[1])

    return start


@pytest.mark.parametrize("ggml_type", TYPES[:5], ids=lambda v: v.name)
def test_feed_forwards(matmuls: MatmulKernels, chained: GroupedMatmuls, ggml_type: GGMLType) -> None:
    """Gate, up and down of pairs, with biases: with two warpgroups the last item of gate and up ends early, down's in a
    strip, as do those of direct kernels whose slots do not divide its strips."""
    number = TYPES.index(ggml_type)
    activation = ACTIVATIONS[number]
    width, cols = 192 if ggml_type.block_size <= 32 else 256, 768
    gate_up, exact = random_stack(ggml_type, EXPERTS, 2 * width, cols, gated=True)
    down, exact_down = random_stack(GGMLType.Q8_0, EXPERTS, 300, width, seed=1)
    bias, bias_down = torch.randn(EXPERTS, 2 * width, device="cuda"), torch.randn(EXPERTS, 300, device="cuda")
    interleaved = bias.view(EXPERTS, 2, -1, 64).transpose(1, 2).reshape(EXPERTS, -1).contiguous()
    for seed, tokens in enumerate(sizes(chained, number + 1)):
        rows = (40, 1, 200, 90)[seed]
        x, chosen = torch.randn(rows, cols, device="cuda"), some_choices(rows, seed)
        weights = torch.rand(chosen.size, device="cuda") + 0.5
        out = torch.full((chosen.size, 300), torch.nan, device="cuda")
        step = tiles_of(chained, rows, tokens)
        half = matmuls.written(x, InputFormat("half", 1 if isinstance(chained, LaidMatmuls) else 32))
        biases = interleaved, bias_down
        chain(chained, (gate_up, down), half, on_device(chosen), step, activation, out, weights, biases)()
        inner = gated_values(x, exact, chosen, activation, bias)
        wanted = torch.full_like(out, torch.nan, dtype=torch.float64)
        for expert in range(EXPERTS):
            pairs = np.flatnonzero(chosen.reshape(-1) == expert)
            sums = inner[pairs] @ exact_down[expert].T + bias_down[expert].double()
            wanted[pairs] = sums * weights.double()[pairs, None]
        check(out, wanted)


@pytest.mark.parametrize("rows", [16, 300])
def test_a_graph_serves_other_counts(matmuls: MatmulKernels, chained: GroupedMatmuls, rows: int) -> None:
    """A captured layer with as many experts as real ones, replayed with routes of other rows: as launched plainly."""
    experts, per_token, cols, width = 128, 8, 512, 256
    gate_up, _ = random_stack(GGMLType.Q4_K, experts, 2 * width, cols, gated=True)
    down, _ = random_stack(GGMLType.Q6_K, experts, 256, width, seed=1)
    step = chained.step(rows, per_token, ExpertShape(experts, cols, width))
    chosen = on_device(random_choices(rows, per_token, experts))
    x, weights = torch.randn(rows, cols, device="cuda"), torch.rand(rows * per_token, device="cuda")
    out = torch.empty(rows * per_token, 256, device="cuda")
    run = chain(
        chained, (gate_up, down), matmuls.written(x, InputFormat("half", 64)), chosen, step, "silu", out, weights
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    for seed in range(4):
        choices = random_choices(rows, per_token, experts, seed, skew=seed * 0.7)
        choices[rows - seed * 4 :] = -1
        chosen.copy_(on_device(choices))
        run()
        torch.cuda.synchronize()
        wanted = out.clone()
        out.fill_(torch.nan)
        graph.replay()
        live = (rows - seed * 4) * per_token
        assert torch.equal(out[:live], wanted[:live])
        assert bool(out[live:].isnan().all())


FUSED: tuple[tuple[GGMLType, GGMLType, GatedActivation, tuple[int, int, int, int, int]], ...] = (
    (GGMLType.Q4_K, GGMLType.Q6_K, "silu", (128, 8, 512, 256, 40)),
    (GGMLType.Q4_K, GGMLType.Q8_0, "gelu", (257, 9, 256, 256, 64)),
    (GGMLType.MXFP4, GGMLType.MXFP4, "clamped", (32, 4, 192, 192, 64)),  # odd numbers of chunks
    (GGMLType.Q8_0, GGMLType.Q5_0, "relu_squared", (6, 3, 320, 64, 12)),
)
"""Formats, activation, and experts, those of a row, hidden size, width and rows, of steps of one launch."""


@pytest.mark.parametrize("others", [{}, {"strips": 1}, {"groups": 2, "blocks": 1}], ids=["chosen", "strip", "groups"])
@pytest.mark.parametrize(("first", "last", "activation", "numbers"), FUSED, ids=lambda v: str(getattr(v, "name", v)))
def test_one_launch_has_the_bits_of_three(
    matmuls: MatmulKernels, first: GGMLType, last: GGMLType, activation: GatedActivation,
    numbers: tuple[int, int, int, int, int], others: dict[str, int],
) -> None:  # fmt: skip
    """Replayed from a graph with other choices: rows and experts that go nowhere, experts of several tiles."""
    if not matmuls.tuning.wgmma:
        pytest.skip("wgmma does not run here")
    experts, per_token, hidden, width, rows = numbers
    gate_up, _ = random_stack(first, experts, 2 * width, hidden, gated=True)
    down, _ = random_stack(last, experts, 200, width, seed=1)
    biases = torch.randn(experts, 2 * width, device="cuda"), torch.randn(experts, 200, device="cuda")
    counts = [ExpertsRead("cuda") for _ in range(2)]
    apart, fused = (GroupedMatmuls(matmuls, each) for each in counts)
    step = fused.step(rows, per_token, ExpertShape(experts, hidden, width))
    chosen_for = fused.fuse(step, gate_up, down, activation)
    assert chosen_for is not None
    config = replace(chosen_for, tiles=replace(chosen_for.tiles, **others))
    fused.prepare([config], experts)
    x = matmuls.written(torch.randn(rows, hidden, device="cuda"), InputFormat("half", 16))
    chosen = on_device(random_choices(rows, per_token, experts))
    pairs = Pairs(chosen, torch.rand(rows * per_token, device="cuda"), per_token)
    out, wanted = (torch.empty(rows * per_token, 200, device="cuda") for _ in range(2))
    start = chain(apart, (gate_up, down), x, chosen, step, activation, wanted, pairs.weights, biases)
    buffers = buffers_for(step, experts, width)

    def run() -> None:
        fused.launch_fused((gate_up, down), biases, x, pairs, step, buffers, config, out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    for each in counts:
        each.counts.zero_()
    for seed in range(6):
        choices = random_choices(rows, per_token, experts, seed, skew=seed * 0.7)
        choices[choices == 4] = experts + 3 if seed % 2 else -7
        choices[rows - seed * (rows // 5) :] = -1
        chosen.copy_(on_device(choices))
        for memory in (out, wanted, buffers.gated):
            memory.fill_(torch.nan)
        start()
        graph.replay()
        assert torch.equal(out.nan_to_num(7e7), wanted.nan_to_num(7e7))
        assert not bool(buffers.progress.any())
    assert counts[0].average() == counts[1].average() != 0


def test_rows_do_not_depend_on_the_batch(matmuls: MatmulKernels, grouped: GroupedMatmuls) -> None:
    """All tiles give the same bits, alone and among others."""
    stack, _ = random_stack(GGMLType.Q4_K, EXPERTS, 256, 1280)
    x, chosen = torch.randn(150, 1280, device="cuda"), random_choices(150, PER_TOKEN, EXPERTS)
    seen: torch.Tensor | None = None
    for tokens in sizes(grouped):
        for rows in (150, 9, 1):
            half = matmuls.written(x[:rows].contiguous(), InputFormat("half", 16))
            found = run_pairs(grouped, stack, half, chosen[:rows], tiles_of(grouped, rows, tokens))
            seen = found if seen is None else seen
            assert torch.equal(found, seen[: rows * PER_TOKEN]), (tokens, rows)


@pytest.mark.parametrize(("tokens", "block_tokens"), [(8, 8), (40, 64), (128, 16)])
@pytest.mark.parametrize("cols", [64, 256, 300, 2880])
def test_rows_are_laid_in_tiles(matmuls: MatmulKernels, tokens: int, block_tokens: int, cols: int) -> None:
    """Each place has the halves of its pair's row, and places without a pair are left alone."""
    grouped = LaidMatmuls(matmuls)
    rows, padded = 150, -(-cols // 64) * 64
    chosen, step = some_choices(rows, tokens), tiles_of(grouped, rows, tokens)
    buffers = buffers_for(step, EXPERTS, 64, padded)
    stack, _ = random_stack(GGMLType.Q8_0, EXPERTS, 128, padded, gated=True)
    x = matmuls.written(torch.randn(rows, cols, device="cuda"), InputFormat("half", block_tokens))
    config = grouped.route(step, stack, "silu")
    grouped.sort(on_device(chosen), step, EXPERTS, buffers)
    grouped.launch_gated(stack, x, PER_TOKEN, step, buffers, config)
    slots, _, _ = expected_lists(chosen, EXPERTS, tokens)
    of_rows = x.values.permute(0, 3, 4, 1, 2, 5).flatten(0, 2)  # [rows, chunks, 8, 8]
    laid = buffers.laid.view(step.count, padded // 64, 8, tokens, 8).permute(0, 3, 1, 2, 4).flatten(0, 1)
    wanted = torch.full_like(laid, torch.nan)
    live = torch.from_numpy(np.flatnonzero(slots >= 0)).cuda()
    wanted[live] = of_rows[torch.from_numpy(slots[slots >= 0] // PER_TOKEN).cuda().long()]
    assert torch.equal(laid.nan_to_num(1e4), wanted.nan_to_num(1e4))
