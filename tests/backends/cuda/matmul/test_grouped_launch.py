"""Launches of grouped matmuls and their arguments, on a device that only records them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.cuda.matmul.recorded_launches import STREAM, RecordingKernel, matmuls_on, record_launches
from backends.cuda.matmul.stored_inputs import halves
from realizar.backends.cuda.layouts.fragments import fragment_format
from realizar.backends.cuda.matmul.experts import Pairs
from realizar.backends.cuda.matmul.fp8 import FP8_ROWS
from realizar.backends.cuda.matmul.grouped import GroupedBuffers, GroupedMatmuls
from realizar.backends.cuda.matmul.grouped_tiles import DECODED_PAIRS, FP8_PLACES
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, make_buffer
from realizar.backends.cuda.matmul.routing import ExpertsRead
from realizar.backends.cuda.matmul.tuning_table import ExpertLine, ExpertShape
from realizar.backends.cuda.native.grouped.source import DirectTiles, GroupedTiles, route_many_sources, route_source
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import KernelError
from realizar.quantization.ggml_layouts import GGML_LAYOUTS

EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 16, 4, 512, 320
SHAPE = ExpertShape(EXPERTS, HIDDEN, WIDTH)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> type[RecordingKernel]:
    class Fresh(RecordingKernel):
        launches: ClassVar[list[tuple[object, ...]]] = []

    record_launches(monkeypatch, Fresh)
    return Fresh


def stack(out_features: int, cols: int, ggml_type: GGMLType = GGMLType.Q8_0) -> PackedExperts:
    weight_format = fragment_format(GGML_LAYOUTS[ggml_type])
    size = weight_format.size_bytes(out_features, cols)
    scales = torch.zeros(EXPERTS * -(-out_features // 64))
    weights = torch.zeros(EXPERTS * size, dtype=torch.uint8)
    return PackedExperts(out_features, cols, weight_format, weights, scales, None, True, count=EXPERTS)


def half(rows: int, cols: int) -> ActivationBuffer:
    values = torch.zeros((-(-rows // 32), cols // 64, 8, 4, 8, 8), dtype=torch.float16)
    return halves(values, torch.ones(rows))


def test_arguments_of_a_feed_forward(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    experts_read = ExpertsRead("cpu")
    grouped = GroupedMatmuls(matmuls_on(monkeypatch), experts_read)
    rows = 6
    step = grouped.step(rows, PER_TOKEN, SHAPE)
    assert (step.pairs, step.tokens, step.count) == (24, 8, 17)
    buffers = GroupedBuffers("cpu", rows, PER_TOKEN, SHAPE, True)
    assert (len(buffers.slots), len(buffers.work), len(buffers.gated)) == (17 * 8, 18, 17 * 8 * WIDTH)
    gate_up, down, x = stack(2 * WIDTH, HIDDEN), stack(HIDDEN, WIDTH), half(rows, HIDDEN)
    configs = grouped.route(step, gate_up, "silu"), grouped.route(step, down, tiled=True)
    assert [(each.gathers, each.chunks) for each in configs] == [(True, 8), (False, 5)]
    grouped.prepare(configs, EXPERTS)
    chosen = torch.zeros(rows, PER_TOKEN, dtype=torch.int32)
    out, weights = torch.zeros(24, HIDDEN), torch.zeros(24)
    grouped.sort(chosen, step, EXPERTS, buffers)
    grouped.launch_gated(gate_up, x, PER_TOKEN, step, buffers, configs[0])
    grouped.launch_pairs(down, None, 1, step, buffers, configs[1], out, weights)
    (name, grid, threads, arguments, sizes, stream, dependent), first, last = kernel.launches
    lists = buffers.slots.data_ptr(), buffers.work.data_ptr()
    assert (name, grid, threads, sizes) == ("route_pairs", (1, 1, 1), 1024, "pppppii")
    counts = experts_read.counts.data_ptr()
    assert arguments == [chosen.data_ptr(), *lists, buffers.starts.data_ptr(), counts, 24, 8]
    assert (stream, dependent) == (STREAM, True)
    addresses = gate_up.weights.data_ptr(), gate_up.block_scales.data_ptr(), gate_up.weights.data_ptr(), 0
    inputs = x.values.data_ptr(), x.scales.data_ptr()
    assert first[1] == (min(132 * configs[0].tiles.blocks, 17 * 5), 1, 1)  # items of a gate's and an up's strip
    assert first[3] == [
        *addresses, buffers.gated.data_ptr(), 0, *inputs, *lists, gate_up.stride, 640, 8, PER_TOKEN, 32
    ]  # fmt: skip
    assert last[1] == (17 * 4, 1, 1)
    assert last[3][4:6] == [out.data_ptr(), weights.data_ptr()]
    assert last[3][6:] == [buffers.gated.data_ptr(), 0, *lists, down.stride, HIDDEN, 5, 1, 1]
    assert len(first[3]) == len(first[4]) == len(last[4])


def test_arguments_of_one_launch(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few pairs, where the Hopper kernel has a ring for both; what blocks tell each other begins at zero."""
    matmuls, rows = matmuls_on(monkeypatch), 6
    grouped = GroupedMatmuls(matmuls)
    step, buffers = grouped.step(rows, PER_TOKEN, SHAPE), GroupedBuffers("cpu", rows, PER_TOKEN, SHAPE, True)
    gate_up, down, x = stack(2 * WIDTH, HIDDEN), stack(HIDDEN, WIDTH, GGMLType.Q6_K), half(rows, HIDDEN)
    config = grouped.fuse(step, gate_up, down, "silu")
    assert config is not None
    assert (config.tiles.tokens, config.chunks, config.experts) == (8, (8, 5), EXPERTS)
    pairs = Pairs(torch.zeros(24, dtype=torch.int32), torch.zeros(24), PER_TOKEN)
    bias, out = torch.zeros(EXPERTS, HIDDEN), torch.zeros(24, HIDDEN)
    grouped.launch_fused((gate_up, down), (None, bias), x, pairs, step, buffers, config, out)
    ((name, grid, threads, arguments, sizes, stream, dependent),) = kernel.launches
    assert name == "grouped_fused_q8_f16_q6_f16_silu_tokens8"
    items = sum(
        tiles.items(each.out_features) for tiles, each in zip(config.tiles.matrices, (gate_up, down), strict=True)
    )
    assert (grid, threads) == ((min(132 * config.tiles.blocks, 17 * items), 1, 1), config.tiles.threads)
    assert arguments[3:7] == [0, gate_up.stride, 2 * WIDTH, 8]
    assert arguments[10:14] == [bias.data_ptr(), down.stride, HIDDEN, 5]
    memory = x.values, x.scales, buffers.gated, out, pairs.weights, pairs.chosen
    assert arguments[14:] == [*(each.data_ptr() for each in memory), 0, buffers.progress.data_ptr(), PER_TOKEN, 32, 24]
    assert (len(arguments), stream, dependent) == (len(sizes), STREAM, True)
    assert not buffers.progress.any()
    many = grouped.step(200, PER_TOKEN, SHAPE)
    assert grouped.fuse(many, gate_up, down, "silu") is None
    before = GroupedMatmuls(matmuls_on(monkeypatch, (8, 0)))
    assert before.fuse(before.step(rows, PER_TOKEN, SHAPE), gate_up, down, "silu") is None


def test_many_pairs_are_sorted_by_many_blocks(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Two launches of as many blocks as the pairs ask for; a block sorts 4,096."""
    grouped, rows = GroupedMatmuls(matmuls_on(monkeypatch)), 1025
    step, buffers = grouped.step(rows, PER_TOKEN, SHAPE), GroupedBuffers("cpu", rows, PER_TOKEN, SHAPE, True)
    chosen = torch.zeros(rows, PER_TOKEN, dtype=torch.int32)
    grouped.sort(chosen, step, EXPERTS, buffers)
    first, second = kernel.launches
    assert [(each[0], each[1], each[2]) for each in (first, second)] == [
        ("count_pairs", (2, 1, 1), 1024), ("place_pairs", (2, 1, 1), 1024)
    ]  # fmt: skip
    assert len(buffers.sums) == 3 * EXPERTS + 1
    lists = buffers.slots.data_ptr(), buffers.work.data_ptr(), buffers.starts.data_ptr()
    between = buffers.sums.data_ptr(), buffers.arrivals.data_ptr()
    assert first[3] == second[3] == [chosen.data_ptr(), *lists, 0, *between, rows * PER_TOKEN, step.tokens]
    grouped.sort(chosen[:-1], grouped.step(rows - 1, PER_TOKEN, SHAPE), EXPERTS, buffers)
    assert kernel.launches[-1][0] == "route_pairs"


def test_rows_that_are_laid_in_tiles(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gate and up's line says so, for steps of its pairs alone, or tiles are large: a kernel lays rows before it,
    and it reads them with the scales of the rows."""
    matmuls = matmuls_on(monkeypatch)
    lines = [
        ExpertLine(pairs, SHAPE, gated, GroupedTiles("wgmma", 24, 2, 1, 4, 2, gated and pairs == 160), 0.01)
        for pairs in (160, 320)
        for gated in (True, False)
    ]
    matmuls.tuning = replace(matmuls.tuning, expert_lines=tuple(lines))
    grouped, gate_up, x = GroupedMatmuls(matmuls), stack(2 * WIDTH, HIDDEN), half(40, HIDDEN)
    step, other = grouped.step(40, PER_TOKEN, SHAPE), grouped.step(41, PER_TOKEN, SHAPE)
    buffers = GroupedBuffers("cpu", 80, PER_TOKEN, SHAPE, True, lines)
    config = grouped.route(step, gate_up, "silu")
    assert (step.tokens, config.gathers, grouped.route(other, gate_up, "silu").gathers) == (24, False, True)
    assert grouped.route(step, stack(HIDDEN, WIDTH), tiled=True).gathers is False
    assert (len(buffers.laid), step.count) == (step.places * HIDDEN, 22)
    assert len(GroupedBuffers("cpu", 80, PER_TOKEN, SHAPE, True, lines[2:]).laid) == 0
    large = GroupedMatmuls(matmuls_on(monkeypatch)).step(200, PER_TOKEN, SHAPE)  # by rule
    assert (large.tokens, grouped.route(large, gate_up, "silu").gathers) == (128, False)
    assert len(GroupedBuffers("cpu", 200, PER_TOKEN, SHAPE, True, lines).laid) == large.places * HIDDEN
    assert len(GroupedBuffers("cpu", 200, PER_TOKEN, SHAPE, False).laid) == 0
    grouped.prepare([config], EXPERTS)
    grouped.launch_gated(gate_up, x, PER_TOKEN, step, buffers, config)
    (name, grid, threads, arguments, sizes, stream, dependent), last = kernel.launches
    assert (name, grid, threads, sizes, stream, dependent) == (
        "lay_rows",
        (22, 2, 1),
        24 * 8,
        "ppppppiii",
        STREAM,
        True,
    )
    lists = buffers.slots.data_ptr(), buffers.work.data_ptr()
    assert arguments == [x.values.data_ptr(), buffers.laid.data_ptr(), *lists, 0, 0, 8, PER_TOKEN, 32]
    assert last[3][6:8] == [buffers.laid.data_ptr(), x.scales.data_ptr()]
    assert last[3][-2:] == [PER_TOKEN, 32]


def test_experts_in_8_bit_floats(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """From as many pairs of each expert on as pay for decoding all of them: rows are laid with their scales, and what
    gate and up leave has its scales behind the codes of all places."""
    grouped, rows = (
        GroupedMatmuls(matmuls_on(monkeypatch), fp8_pairs=DECODED_PAIRS),
        DECODED_PAIRS * EXPERTS // PER_TOKEN,
    )
    assert not grouped.step(rows - 1, PER_TOKEN, SHAPE).in_fp8
    step = grouped.step(rows, PER_TOKEN, SHAPE)
    buffers = GroupedBuffers("cpu", rows, PER_TOKEN, SHAPE, True, fp8_pairs=DECODED_PAIRS)
    assert (step.tokens, step.in_fp8) == (FP8_PLACES, True)
    gate_up, down = stack(2 * WIDTH, HIDDEN), stack(HIDDEN, WIDTH)
    x, out, weights = make_buffer(FP8_ROWS, HIDDEN, rows, torch.device("cpu")), torch.zeros(1), torch.zeros(1)
    configs = grouped.route(step, gate_up, "silu"), grouped.route(step, down, tiled=True, halves=True)
    grouped.launch_gated(gate_up, x, PER_TOKEN, step, buffers, configs[0])
    grouped.launch_pairs(down, None, 1, step, buffers, configs[1], out, weights)
    lay, decode, first, decode_down, last = kernel.launches
    assert (lay[0], lay[1]) == ("lay_rows", (step.count, 1, 1))
    laid, gated = buffers.laid.data_ptr(), buffers.gated.data_ptr()
    laid_scales, gated_scales = laid + step.places * HIDDEN, gated + step.places * 384
    lists = [buffers.slots.data_ptr(), buffers.work.data_ptr()]
    assert lay[3] == [x.codes.data_ptr(), laid, *lists, x.terms.data_ptr(), laid_scales, 4, PER_TOKEN, 1]
    at = grouped._matmuls.decoded_weights.data_ptr()
    scales, down_scales = at + EXPERTS * 3 * 4 * 32768, at + EXPERTS * 2 * 3 * 32768
    addresses = gate_up.weights.data_ptr(), gate_up.block_scales.data_ptr(), gate_up.weights.data_ptr()
    assert (decode[1], decode[3]) == ((2, 6, EXPERTS), [*addresses, at, scales, gate_up.stride, 10, 8])
    assert (decode_down[1], decode_down[3][3:]) == ((2, 4, EXPERTS), [at, down_scales, down.stride, 8, 5])
    assert (first[0], first[1]) == ("experts_fp8_silu", (132, 1, 1))
    assert first[3] == [at, scales, 0, gated, gated_scales, 0, laid, laid_scales, *lists, 2 * WIDTH, 8]
    assert last[0] == "experts_fp8_halves"
    outputs = [0, out.data_ptr(), 0, weights.data_ptr()]
    assert last[3] == [at, down_scales, *outputs, gated, gated_scales, *lists, HIDDEN, 5]
    for each in kernel.launches:
        assert len(each[3]) == len(each[4])
    assert 2 * len(buffers.laid) >= step.places * (HIDDEN + 16)
    assert 2 * len(buffers.gated) >= step.places * (384 + 12)


def test_rows_of_pairs_and_biases(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices without an activation read rows of tokens, or of pairs."""
    grouped = GroupedMatmuls(matmuls_on(monkeypatch, (8, 0)))
    shape = replace(SHAPE, width=0)
    step, buffers = grouped.step(40, PER_TOKEN, shape), GroupedBuffers("cpu", 40, PER_TOKEN, shape, False)
    matrix, bias, out = stack(200, HIDDEN), torch.zeros(EXPERTS, 200), torch.zeros(160, 200)
    config = grouped.route(step, matrix)
    assert (config.tiles.kind, config.gathers, config.activation) == ("mma_sync", True, None)
    for share in (PER_TOKEN, 1):
        grouped.launch_pairs(matrix, half(160, HIDDEN), share, step, buffers, config, out, None, bias)
        arguments = kernel.launches[-1][3]
        assert arguments[3] == bias.data_ptr()
        assert arguments[-2:] == [share, 32]
        assert kernel.launches[-1][-1] is False  # no dependent launch before compute capability 9.0


def test_kernels_that_read_weights_for_themselves(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Measured ones run where their activations fit the shared memory, and have no block without an item."""
    matmuls, gate_up, down = matmuls_on(monkeypatch), stack(2 * WIDTH, HIDDEN), stack(HIDDEN, WIDTH)
    shape, tiles = ExpertShape(EXPERTS, HIDDEN, WIDTH), DirectTiles(8, 2, 4, 3, 2)
    lines = [ExpertLine(24, shape, gated, tiles, 0.01) for gated in (True, False)]
    matmuls.tuning = replace(matmuls.tuning, expert_lines=tuple(lines))
    grouped = GroupedMatmuls(matmuls)
    step, buffers = grouped.step(6, PER_TOKEN, SHAPE), GroupedBuffers("cpu", 6, PER_TOKEN, SHAPE, True)
    configs = grouped.route(step, gate_up, "silu"), grouped.route(step, down, tiled=True)
    assert [each.tiles for each in configs] == [tiles, tiles]
    assert [each.sources[-1].shared_bytes for each in configs] == [8 * 8 * 128, 5 * 8 * 128]
    grouped.launch_gated(gate_up, half(6, HIDDEN), PER_TOKEN, step, buffers, configs[0])
    _, grid, threads, arguments, *_ = kernel.launches[-1]
    assert (grid, threads) == ((min(2 * 132, 17 * 10), 1, 1), 256)
    assert arguments[-4:] == [640, 8, PER_TOKEN, 32]
    small = replace(matmuls.tuning, shared_bytes=40 << 10)
    matmuls.tuning = small
    assert GroupedMatmuls(matmuls).route(step, gate_up, "silu").tiles.kind == "wgmma"


def test_kernels_are_loaded_once(kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = GroupedMatmuls(matmuls_on(monkeypatch))
    made: list[tuple[str, int]] = []

    class Counting(kernel):  # type: ignore[misc,valid-type]
        def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
            super().__init__(cubin, name, shared_bytes)
            made.append((name, shared_bytes))

    record_launches(monkeypatch, Counting)
    matrix = stack(2 * WIDTH, HIDDEN)
    configs = [grouped.route(grouped.step(rows, PER_TOKEN, SHAPE), matrix, "gelu") for rows in (5, 8, 100)]
    assert configs[0] == configs[1] != configs[2]
    for _ in range(2):
        grouped.prepare(configs, EXPERTS)
    shared = [each.sources[-1].shared_bytes for each in (configs[2], configs[0])]
    assert sorted(size for _, size in made) == sorted(
        [*shared, *(each.shared_bytes for each in (route_source(EXPERTS), *route_many_sources(EXPERTS))), 0]
    )  # rows laid: none


def test_a_kernel_that_does_not_fit_is_an_error(
    kernel: type[RecordingKernel], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    grouped = GroupedMatmuls(matmuls_on(monkeypatch))
    kernel.refused = "grouped"
    config = grouped.route(grouped.step(8, PER_TOKEN, SHAPE), stack(2 * WIDTH, HIDDEN), "silu")
    with pytest.raises(KernelError, match="does not fit"):
        grouped.prepare([config], EXPERTS)
