"""CUDA C++ as the backend chooses it for each card compiles there, within its shared memory and registers. No GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="the GPU backend needs triton")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from backends.cuda.native.compiled import resources_of  # noqa: E402
from realizar.backends.cuda.attention.decode import sized  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.backends.cuda.layouts.fragments import FLOATS, FragmentFormat, fragment_format  # noqa: E402
from realizar.backends.cuda.matmul.grouped_tiles import grouped_tiles  # noqa: E402
from realizar.backends.cuda.matmul.tuning_table import DeviceTuning  # noqa: E402
from realizar.backends.cuda.native.attend_source import AttendKernel  # noqa: E402
from realizar.backends.cuda.native.chunks.source import (  # noqa: E402
    AttendChunkKernel,
    SyncChunkKernel,
    chunk_rows,
    sync_rows,
    sync_shape,
)
from realizar.backends.cuda.native.compiler import Source, architecture, compile_sources  # noqa: E402
from realizar.backends.cuda.native.experts.source import (  # noqa: E402
    ChoiceShape,
    choice_source,
    expert_source,
    expert_sums_source,
    many_choices_source,
)
from realizar.backends.cuda.native.grouped.source import grouped_source, route_many_sources, route_source  # noqa: E402
from realizar.backends.cuda.native.raw_layouts import REPACKED_LAYOUTS  # noqa: E402
from realizar.backends.cuda.native.sampling.source import SELECT_BYTES, sampling_sources  # noqa: E402
from realizar.backends.cuda.native.scans.source import THREADS, ScanKernels  # noqa: E402
from realizar.backends.cuda.native.sources import MatvecTiles, Tiles, activations_source, matmul_source, repack_source  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.quantization.convert import QUANTIZED_TYPES  # noqa: E402
from realizar.quantization.float_tensors import e4m3_layout  # noqa: E402
from realizar.quantization.ggml_layouts import GGML_LAYOUTS  # noqa: E402

CARDS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB of a block's shared memory
PARTS = ("mat-vec", "tensor cores", "grouped", "experts", "attention", "helpers", "sampling")
HEADS = [(head, element) for head in (64, 80, 96, 128, 256, 512) for element in ("bf16", "f16", "int8", "fp8")]
WIDE = [(256, "bf16"), (512, "int8")]
Q4_K = fragment_format(GGML_LAYOUTS[GGMLType.Q4_K])
LAYOUTS = [*(GGML_LAYOUTS[each] for each in QUANTIZED_TYPES), e4m3_layout(128)]
FORMATS = [FLOATS, *dict.fromkeys(map(fragment_format, LAYOUTS))]
DIAGONAL = {(8, 0): "grouped", (8, 6): "experts", (8, 9): "tensor cores", (10, 0): "mat-vec", (12, 0): "attention"}


@dataclass(frozen=True, slots=True)
class Needed:
    """A kernel, and what its launches ask for."""

    source: Source
    threads: int
    shared_bytes: int = 0


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def kernels(capability: tuple[int, int], part: str, *, all_of_them: bool) -> Iterator[Needed]:
    """Those of a part of the backend; or a few, of the weights and heads that need the most."""
    shared, wgmma = CARDS[capability] << 10, capability == (9, 0)
    tuning = DeviceTuning(wgmma, 84, shared)
    formats = FORMATS if all_of_them else [Q4_K]
    if part == "attention":
        for head, element in HEADS if all_of_them else WIDE:
            yield from attention(capability, head, element)
    elif part == "helpers":
        yield Needed(activations_source(), 256)
        yield from (Needed(repack_source(each, fragment_format(each)), 256) for each in REPACKED_LAYOUTS)
        shape = ChoiceShape(2048, 128, 8)
        yield Needed(choice_source(shape, clusters=capability >= (9, 0)), 256)
        if capability == (9, 0):
            scan = ScanKernels(16, 48, 4, 8, tiled=True)
            for name, source in (scan.sources() | {"rows": scan.rows()}).items():
                yield Needed(source, THREADS[name], source.shared_bytes)
        if capability >= (9, 0):
            yield Needed(many_choices_source(shape, 16), 256, 4 * shape.many_floats(16))
        for sort in (route_source(128), *route_many_sources(128)):
            yield Needed(sort, 1024, sort.shared_bytes)
    elif part == "sampling":
        yield from (Needed(source, 1024, SELECT_BYTES) for source in sampling_sources())
    else:
        for weight_format in formats:
            yield from matmuls(part, tuning, weight_format)


def matmuls(part: str, tuning: DeviceTuning, weight_format: FragmentFormat) -> Iterator[Needed]:
    if part == "mat-vec" and weight_format.has_matvec:
        for tokens in (1, 2):
            tiles: Tiles = tuning.few_tokens(tokens, 4096, 4096, weight_format).tiles
            yield of_matmul(weight_format, tiles)
            yield Needed(matmul_source((weight_format,), tiles, "residual"), tiles.threads)
            gated = tuning.gated_few(tokens, 28672, 4096, weight_format)
            assert gated is not None
            yield Needed(matmul_source((weight_format,), gated, "silu"), gated.threads)
    elif part == "tensor cores":
        for tokens in (8, 64, 256):
            yield of_matmul(weight_format, tuning.many_tokens(tokens, 4096, 4096, weight_format).tiles)
            if (hopper := tuning.gated(tokens, 28672, 4096, weight_format)) is not None:
                shared = hopper.shared_bytes(weight_format)
                yield Needed(matmul_source((weight_format,), hopper, "silu"), hopper.threads, shared)
    elif part == "grouped":
        for tokens, gated_too in ((8, True), (64, False)):
            grouped = grouped_tiles(tokens, weight_format, gated_too, tuning.wgmma, tuning.shared_bytes)
            source = grouped_source(weight_format, grouped, not grouped.laid, "silu" if gated_too else None, 12)
            yield Needed(source, grouped.threads, grouped.shared_bytes(weight_format, gated_too))
    elif part == "experts" and weight_format.has_matvec:
        tiles = MatvecTiles(1, 2, 4, 2, 3)
        yield Needed(expert_source(weight_format, tiles, "silu"), tiles.threads)
        sums = MatvecTiles(1, 1, 24, 2, 1)
        yield Needed(expert_sums_source(weight_format, sums, 8), sums.threads)


def of_matmul(weight_format: FragmentFormat, tiles: Tiles) -> Needed:
    return Needed(matmul_source((weight_format,), tiles), tiles.threads, tiles.shared_bytes(weight_format))


def attention(capability: tuple[int, int], head: int, element: str) -> Iterator[Needed]:
    """Steps of few decodes, of long ones, and of many; and chunks where CUDA C++ attends them."""
    device = DeviceProfile(torch.device("cpu"), "a card", capability, 84, 1 << 34, CARDS[capability] << 10)
    whole = AttendKernel(head, 8, 1, False, 1, False, head, False, element, 32, "half", 8)
    for kind in (StepKind(1, 1, 0), StepKind(1, 1, 0, True), StepKind(64, 64, 0), StepKind(256, 256, 0)):
        kernel = sized(whole, kind, 2, device)
        yield Needed(kernel.source(), 32 * kernel.warps, kernel.shared_bytes)
    if rows := sync_rows(head, element, device.shared_bytes):
        for plain in (False, True):
            shape = sync_shape(head, device.shared_bytes, plain=plain)
            assert shape is not None
            sync = SyncChunkKernel(
                head, 8, rows // 8, element, 32, 0 if plain else 1000, cap=not plain, sinks=True, shape=shape
            )
            yield Needed(sync.source(), sync.threads, sync.shared_bytes)
    if capability == (9, 0) and (rows := chunk_rows(head, element)):
        chunk = AttendChunkKernel(head, 8, rows // 8, element, 32, window=1000, cap=True, sinks=True)
        yield Needed(chunk.source(), chunk.threads, chunk.shared_bytes)
        if head <= 256:
            for fixed in (replace(chunk, part=512), replace(chunk, tokens=1, part=512, alone=True)):
                yield Needed(fixed.source(), fixed.threads, fixed.shared_bytes)


def check_on(capability: tuple[int, int], needed: list[Needed], folder: Path) -> None:
    sources = [each.source for each in needed]
    for each, cubin in zip(needed, compile_sources(sources, architecture(capability)), strict=True):
        bounds = {name: int(most) for most, name in re.findall(r"__launch_bounds__\((\d+)\) (\w+)\(", each.source.text)}
        for name, usage in resources_of(cubin, folder).items():
            static = usage["SHARED"]
            if capability >= (9, 0):
                static -= min(static, 1024)  # what the device keeps for itself is counted there
            assert static + each.shared_bytes <= CARDS[capability] << 10, (name, each, usage)
            threads = bounds.get(name, each.threads)
            assert usage["REG"] * threads <= 65536, (name, each, usage)


@pytest.mark.parametrize(("capability", "part"), DIAGONAL.items(), ids=str)
def test_a_part_for_each_card(capability: tuple[int, int], part: str, tmp_path: Path) -> None:
    found = list(kernels(capability, part, all_of_them=False))
    check_on(capability, list({each.source: each for each in found}.values())[:2], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("capability", CARDS, ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_all_parts_for_all_cards(capability: tuple[int, int], part: str, tmp_path: Path) -> None:
    check_on(capability, list(kernels(capability, part, all_of_them=True)), tmp_path)
