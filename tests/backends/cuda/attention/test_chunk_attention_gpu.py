"""Hopper's attention of chunks against float64: fresh inputs, poisoned caches and outputs, shuffled blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from backends.cuda.matmul.fp8_cases import FP8Values  # noqa: E402
from backends.cuda.native.compiled import check_overlap, resources_of  # noqa: E402
from realizar.backends.cuda.attention.chunks import chunk_inputs  # noqa: E402
from realizar.backends.cuda.layouts.activations import half_order  # noqa: E402
from realizar.backends.cuda.matmul.fp8 import FP8_INPUT  # noqa: E402
from realizar.backends.cuda.matmul.inputs import InputFormat, make_buffer  # noqa: E402
from realizar.backends.cuda.native.chunks.source import (  # noqa: E402
    AttendChunkKernel,
    SyncChunkKernel,
    SyncShape,
    sync_shape,
)
from realizar.backends.cuda.native.compiler import architecture, compile_source  # noqa: E402
from realizar.backends.cuda.native.launcher import LoadedKernels  # noqa: E402
from realizar.quantization.microscaling import e4m3  # noqa: E402
from reference_model import nearest_e4m3  # noqa: E402
from wider import wider  # noqa: E402

PLAIN = AttendChunkKernel(128, 4, 32, "bf16", 32)
WIDE = AttendChunkKernel(256, 4, 32, "bf16", 32)
NARROW = AttendChunkKernel(64, 8, 24, "bf16", 32)
WIDEST = AttendChunkKernel(512, 8, 8, "bf16", 32)
CODED = AttendChunkKernel(128, 4, 32, "int8", 32)
FP8 = replace(CODED, kv_dtype="fp8")
SYNC = SyncChunkKernel(128, 4, 32, "bf16", 32)
EIGHT_WARPS, FEW_ROWS = SyncShape(128, 64, 8, 1, skips=False), SyncShape(64, 64, 4, 1)
SYNC_WIDE = SyncChunkKernel(256, 4, 32, "bf16", 32, shape=EIGHT_WARPS)
SYNC_NARROW = SyncChunkKernel(64, 8, 16, "bf16", 32, sinks=True, shape=SyncShape(128, 128, 4, 2, skips=False))
MOST_PARTS = 40
E4M3_SCALES = 0.7, 1.3  # of keys and of values
SPARE, SCALE = 5, 0.1  # tokens behind the step's, whose results nobody writes


@dataclass(frozen=True)
class Case:
    """A kernel, and its rows: tokens before the chunk, and of the chunk. A chunk of one is a decode: no tile has it."""

    kernel: AttendChunkKernel | SyncChunkKernel
    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    soft_cap: float = 0.0
    blocks: int = 3  # of the grid
    parts: int = 0  # into which contexts are cut in all

    @property
    def alone(self) -> bool:
        return isinstance(self.kernel, AttendChunkKernel) and self.kernel.alone

    @property
    def fixed(self) -> bool:
        return isinstance(self.kernel, AttendChunkKernel) and self.kernel.part > 0

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Rows and first tokens, those that see the most first, as `tiles_of` has them."""
        tokens = self.kernel.tokens
        found = [(past + first, row, first) for row, (past, n) in enumerate(self.rows) for first in range(0, n, tokens)]
        return [(row, first) for _, row, first in sorted(found, reverse=True) if self.rows[row][1] > 1]


CASES = {
    "128-gqa4": Case(PLAIN, ((0, 1), (0, 2), (5, 31), (100, 33), (0, 128), (700, 65), (31, 1), (0, 129))),
    "128-gqa1-f16": Case(AttendChunkKernel(128, 1, 128, "f16", 64), ((0, 257), (77, 130)), kv_heads=3),
    "128-gqa7": Case(AttendChunkKernel(128, 7, 18, "bf16", 16), ((0, 90), (77, 30)), kv_heads=1),
    "128-gqa16-large blocks": Case(AttendChunkKernel(128, 16, 8, "bf16", 256), ((300, 20),), kv_heads=1),
    "128-window-cap-sinks": Case(
        replace(PLAIN, window=130, cap=True, sinks=True), ((0, 300), (500, 60)), soft_cap=8.0
    ),
    "128-wider window": Case(replace(PLAIN, window=300), ((0, 400), (500, 60))),
    "128-window of one": Case(replace(PLAIN, window=1), ((0, 40), (200, 60))),
    "64-gqa8-window-sinks": Case(replace(NARROW, window=128, sinks=True), ((0, 150), (400, 70))),
    "64-gqa1": Case(AttendChunkKernel(64, 1, 192, "f16", 32), ((0, 200), (130, 5)), kv_heads=3),
    "64-two warpgroups": Case(replace(NARROW, tokens=16), ((0, 50), (130, 5))),
    "72-gqa1": Case(AttendChunkKernel(72, 1, 128, "f16", 32), ((0, 150), (60, 20))),
    "80-gqa4-window-sinks": Case(
        AttendChunkKernel(80, 4, 32, "bf16", 16, window=60, sinks=True), ((0, 150), (200, 20))
    ),
    "96-gqa2-cap": Case(AttendChunkKernel(96, 2, 64, "bf16", 32, cap=True), ((0, 150), (60, 200)), soft_cap=9.0),
    "120-gqa3": Case(AttendChunkKernel(120, 3, 42, "bf16", 32), ((0, 150), (60, 200))),
    "192-gqa2": Case(AttendChunkKernel(192, 2, 64, "f16", 32), ((0, 100), (60, 20))),
    "256-gqa4": Case(WIDE, ((0, 70), (200, 40), (63, 2))),
    "256-one warpgroup-window-cap": Case(
        AttendChunkKernel(256, 2, 32, "bf16", 16, window=99, cap=True), ((0, 50), (150, 40)), soft_cap=20.0
    ),
    "128-int8": Case(CODED, ((0, 1), (0, 2), (5, 31), (100, 33), (0, 128), (700, 65), (31, 1), (0, 129))),
    "128-int8-window-cap-sinks": Case(
        replace(CODED, window=300, cap=True, sinks=True), ((0, 400), (500, 60)), soft_cap=8.0
    ),
    "128-int8-large blocks": Case(AttendChunkKernel(128, 1, 64, "int8", 256), ((300, 80), (0, 257)), kv_heads=3),
    "64-int8-window-sinks": Case(
        AttendChunkKernel(64, 8, 16, "int8", 32, window=128, sinks=True), ((0, 150), (400, 70))
    ),
    "72-int8": Case(AttendChunkKernel(72, 1, 128, "int8", 32), ((0, 150), (60, 20))),
    "80-int8-small blocks": Case(AttendChunkKernel(80, 4, 32, "int8", 16), ((0, 150), (200, 20))),
    "192-int8": Case(AttendChunkKernel(192, 2, 64, "int8", 32), ((0, 100), (60, 20))),
    "256-int8": Case(replace(WIDE, kv_dtype="int8"), ((0, 70), (200, 40), (63, 2))),
    "128-fp8": Case(FP8, ((0, 1), (0, 2), (5, 31), (100, 33), (0, 128), (700, 65), (31, 1), (0, 129))),
    "128-fp8-window-cap-sinks": Case(
        replace(FP8, window=300, cap=True, sinks=True), ((0, 400), (500, 60)), soft_cap=8.0
    ),
    "80-fp8-small blocks": Case(AttendChunkKernel(80, 4, 32, "fp8", 16), ((0, 150), (200, 20))),
    "256-fp8": Case(replace(WIDE, kv_dtype="fp8"), ((0, 70), (200, 40), (63, 2))),
    "512-fp8": Case(replace(WIDEST, kv_dtype="fp8", block_size=16), ((0, 20), (150, 9))),
    "128-fp8-parts": Case(FP8, ((5000, 40),), kv_heads=1, blocks=12, parts=10),
    "256-fp8-alone": Case(AttendChunkKernel(256, 4, 1, "fp8", 32, part=512, alone=True), ((1100, 1), (99, 1))),
    "128-parts": Case(PLAIN, ((4500, 40), (0, 50), (3000, 1), (2000, 33)), blocks=20, parts=8),
    "128-int8-parts-cap-sinks": Case(
        replace(CODED, cap=True, sinks=True), ((5000, 40),), kv_heads=1, soft_cap=8.0, blocks=12, parts=10
    ),
    "128-parts of a window": Case(
        replace(PLAIN, window=2500), ((4500, 40), (0, 9)), kv_heads=1, blocks=9, parts=6
    ),
    "64-parts-sinks": Case(replace(NARROW, sinks=True), ((3100, 30),), kv_heads=1, blocks=8, parts=8),
    "256-parts": Case(WIDE, ((2500, 20),), kv_heads=1, blocks=2, parts=2),
    "512-gqa8": Case(WIDEST, ((0, 20), (150, 9), (63, 2), (40, 1))),
    "512-window-cap-sinks": Case(
        AttendChunkKernel(512, 4, 16, "f16", 64, window=99, cap=True, sinks=True), ((0, 30), (200, 20)),
        soft_cap=20.0,
    ),
    "512-int8": Case(replace(WIDEST, kv_dtype="int8", block_size=16), ((0, 20), (150, 9))),
    "512-parts": Case(WIDEST, ((4200, 8),), kv_heads=1, blocks=4, parts=4),
    "128-fixed": Case(replace(PLAIN, part=512), ((0, 700), (1300, 40), (200, 1))),
    "128-alone": Case(
        replace(PLAIN, tokens=1, part=512, alone=True), ((0, 1), (1300, 1), (200, 3), (511, 1), (512, 1)), blocks=2
    ),
    "64-alone-gqa20-sinks-window": Case(
        AttendChunkKernel(64, 20, 1, "f16", 32, window=700, sinks=True, part=512, alone=True), ((3, 1), (2300, 1)),
        blocks=1,
    ),
    "256-int8-alone-cap": Case(
        AttendChunkKernel(256, 4, 1, "int8", 32, cap=True, part=512, alone=True), ((1100, 1), (99, 1)), soft_cap=9.0
    ),
    "256-int8-one warpgroup-window": Case(
        AttendChunkKernel(256, 2, 32, "int8", 16, window=99), ((0, 50), (150, 40))
    ),
}  # fmt: skip
SYNC_CASES = {
    "128-gqa4": Case(SYNC, CASES["128-gqa4"].rows),
    "128-gqa1-f16": Case(SyncChunkKernel(128, 1, 128, "f16", 64), ((0, 257), (77, 130)), kv_heads=3),
    "128-gqa7-small blocks": Case(SyncChunkKernel(128, 7, 18, "bf16", 16), ((0, 90), (77, 30)), kv_heads=1),
    "128-gqa16-large blocks": Case(SyncChunkKernel(128, 16, 8, "bf16", 256), ((300, 20),), kv_heads=1),
    "128-window-cap-sinks": Case(replace(SYNC, window=130, cap=True, sinks=True), ((0, 300), (500, 60)), soft_cap=8.0),
    "128-window of one": Case(replace(SYNC, window=1), ((0, 40), (200, 60))),
    "128-eight warps": Case(replace(SYNC, block_size=16, shape=EIGHT_WARPS), ((0, 129), (700, 65))),
    "64-gqa8-window-sinks": Case(
        SyncChunkKernel(64, 8, 16, "bf16", 32, window=128, sinks=True), ((0, 150), (400, 70))
    ),
    "64-gqa8-sinks": Case(SYNC_NARROW, ((0, 290), (400, 70))),
    "64-gqa1-f16": Case(SyncChunkKernel(64, 1, 128, "f16", 32), ((0, 200), (130, 5)), kv_heads=3),
    "80-gqa4-window-sinks": Case(
        SyncChunkKernel(80, 4, 32, "bf16", 16, window=60, sinks=True), ((0, 150), (200, 20))
    ),
    "96-gqa2-cap": Case(SyncChunkKernel(96, 2, 64, "bf16", 32, cap=True), ((0, 150), (60, 200)), soft_cap=9.0),
    "192-gqa2": Case(SyncChunkKernel(192, 2, 64, "f16", 32, shape=EIGHT_WARPS), ((0, 100), (60, 20))),
    "256-gqa4": Case(SYNC_WIDE, ((0, 70), (200, 40), (63, 2))),
    "256-four warps-window-cap": Case(
        SyncChunkKernel(256, 2, 32, "bf16", 16, window=99, cap=True, shape=FEW_ROWS), ((0, 50), (150, 40)),
        soft_cap=20.0,
    ),
}  # fmt: skip
ALL_CASES = CASES | {f"mma.sync {name}": case for name, case in SYNC_CASES.items()}
KERNELS = [
    PLAIN, WIDE, NARROW, WIDEST, CODED, replace(WIDE, tokens=16), replace(PLAIN, window=1000, cap=True),
    replace(NARROW, window=128), replace(CODED, window=1000, cap=True), replace(WIDE, kv_dtype="int8"),
    replace(WIDEST, kv_dtype="int8"), FP8, replace(FP8, window=1000, cap=True), replace(WIDE, kv_dtype="fp8"),
    replace(WIDEST, kv_dtype="fp8"), replace(WIDE, part=512), replace(PLAIN, tokens=1, part=512, alone=True),
    replace(PLAIN, in_fp8=True), replace(WIDE, in_fp8=True),
]  # fmt: skip


@pytest.mark.parametrize("kernel", wider(KERNELS, PLAIN, CODED, replace(PLAIN, in_fp8=True)))
def test_matmuls_run_beside_the_softmax(
    kernel: AttendChunkKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_overlap(kernel.source(), kernel.keys // 2, tmp_path)


CARDS = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10, "sm_120a": 99 << 10}
ON_CARDS = [
    (arch, replace(kernel, shape=shape, tokens=shape.rows // kernel.group))
    for arch, shared_bytes in CARDS.items()
    for kernel in (
        SYNC,
        replace(SYNC, window=1000, cap=True, sinks=True),
        replace(SYNC, group=7),
        SYNC_NARROW,
        SYNC_WIDE,
    )
    if (shape := sync_shape(kernel.head, shared_bytes, plain=not kernel.window)) is not None
]


@pytest.mark.parametrize(("arch", "kernel"), wider(ON_CARDS, ON_CARDS[1]))
def test_mma_sync_spills_nothing(
    arch: str, kernel: SyncChunkKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (usage,) = resources_of(compile_source(kernel.source(), arch), tmp_path).values()
    assert usage["STACK"] == usage["LOCAL"] == 0, usage


class Twin:
    """Inputs of a case in the element type of its kernel, and what float64 makes of them."""

    def __init__(self, case: Case, seed: int) -> None:
        rng, kernel = np.random.default_rng(seed), case.kernel
        self.case, self.heads = case, case.kv_heads * kernel.group
        self.tokens = sum(count for _, count in case.rows)
        self.dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kernel.element]
        self.query = self._rounded(rng.standard_normal((self.tokens + SPARE, self.heads, kernel.head)))
        kept = {"int8": lambda values: dequantized(*quantized(values)), "fp8": in_e4m3}.get(
            kernel.kv_dtype, self._rounded
        )
        self.cached = [  # keys and values of each row [2, tokens, KV heads, head]
            kept(rng.standard_normal((2, past + count, case.kv_heads, kernel.head))) for past, count in case.rows
        ]
        self.sinks = rng.standard_normal(self.heads).astype(np.float32)
        self.starts = np.cumsum([0, *(count for _, count in case.rows)])[:-1]
        blocks = [-(-sum(row) // kernel.block_size) for row in case.rows]
        self.blocks = rng.permutation(sum(blocks) + 1)  # one is nobody's
        self.table = np.full((len(blocks), max(blocks) + 1), -77, np.int32)  # what nobody may follow
        ends = np.cumsum(blocks)
        for row, (count, end) in enumerate(zip(blocks, ends, strict=True)):
            self.table[row, :count] = self.blocks[end - count : end]

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return torch.tensor(values).to(self.dtype).double().numpy()

    def cache(self, which: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys or values in their blocks, and scales of codes.

        They are no numbers where no token is, nor in blocks that no token of the step sees.
        """
        case, size = self.case, self.case.kernel.block_size
        held = np.full((len(self.blocks), case.kv_heads, size, case.kernel.head), np.nan)
        for row, (past, _) in enumerate(case.rows):
            first = max(0, past - case.kernel.window + 1) if case.kernel.window else 0
            self.table[row, : first // size] = -77
            for at, values in enumerate(self.cached[row][which]):
                if at >= first // size * size:
                    held[self.table[row, at // size], :, at % size] = values
        if case.kernel.kv_dtype == "fp8":
            codes = nearest_e4m3(held / E4M3_SCALES[which])
            return torch.tensor(codes, device="cuda"), torch.tensor([E4M3_SCALES[which]], device="cuda")
        if not case.kernel.coded:
            return torch.tensor(held).to("cuda", self.dtype), torch.zeros(0)
        codes, scales = quantized(held)
        return torch.tensor(codes, device="cuda"), torch.tensor(scales, device="cuda")

    @cached_property
    def expected(self) -> np.ndarray:
        """float64 [tokens, heads * head]."""
        case, rows = self.case, []
        for row, (past, count) in enumerate(case.rows):
            heads = []
            at = np.arange(past, past + count)[:, None] - np.arange(past + count)
            unseen = (at < 0) | (at >= case.kernel.window if case.kernel.window else False)
            for head in range(self.heads):
                k, v = self.cached[row][:, :, head // case.kernel.group]
                scores = self.query[self.starts[row] :, head][:count] @ k.T * SCALE
                if case.soft_cap:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                scores[unseen] = -np.inf
                top = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - top)
                sink = np.exp(self.sinks[head] - top) if case.kernel.sinks else 0.0
                heads.append(weights @ v / (weights.sum(axis=1, keepdims=True) + sink))
            rows.append(np.concatenate(heads, axis=1))
        return np.concatenate(rows)


def quantized(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes like `values`, and float16 scales [..., head / 32]: NaN where one of theirs is no number."""
    head = values.shape[-1]
    padded = np.concatenate([values, np.zeros((*values.shape[:-1], -head % 32))], axis=-1)
    groups = padded.reshape(*values.shape[:-1], -1, 32)
    scales = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
    codes = np.nan_to_num(np.rint(groups / scales[..., None].astype(np.float64)))
    return codes.reshape(padded.shape)[..., :head].astype(np.int8), scales


def dequantized(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return codes * np.repeat(scales.astype(np.float64), 32, axis=-1)[..., : codes.shape[-1]]


def in_e4m3(values: np.ndarray) -> np.ndarray:
    """Keys and values [2, ...] as a cache with their scales has them."""
    return np.stack(
        [e4m3()[nearest_e4m3(each / scale)] * scale for each, scale in zip(values, E4M3_SCALES, strict=True)]
    )


def single_tokens(twin: Twin) -> torch.Tensor:
    """As `StepArrays` has decodes: rows, tokens, contexts, positions; and one that is none."""
    alone = [(row, twin.starts[row], past + 1, past) for row, (past, n) in enumerate(twin.case.rows) if n == 1]
    return ints([*alone, (-1, 0, 0, 0)])


def attended(
    twin: Twin, times: int = 1, block_tokens: int = 0, most_parts: int = MOST_PARTS, in_fp8: bool = False
) -> np.ndarray:
    """float32 [tokens + SPARE, heads * head] from the device, the same each time; NaN where nothing was written.

    With `block_tokens` float16 values in blocks of so many tokens, as matmuls read them; `in_fp8`: float64 of 8-bit
    floats and their scales.
    """
    case, kernel = twin.case, twin.case.kernel
    if in_fp8 and isinstance(kernel, AttendChunkKernel):
        kernel = replace(kernel, in_fp8=True)
    width = twin.heads * kernel.head
    query = torch.tensor(twin.query).to("cuda", twin.dtype).view(-1, width)
    (keys, key_scales), (values, value_scales) = twin.cache(0), twin.cache(1)
    read = chunk_inputs(kernel, query, (keys, values, key_scales, value_scales), twin.heads)
    tiles = [*case.tiles, (-1, 0), (-1, 0)]
    pasts, counts = np.array(case.rows).T
    out, next_tile = torch.full((len(query), width), torch.nan, device="cuda"), ints([0])
    arrivals, rows = ints([0] * MOST_PARTS * kernel.warps), len(case.rows)
    each = (rows * width, 2 * rows * twin.heads) if case.alone else (kernel.part_floats, 1)
    handed, states = (torch.zeros(MOST_PARTS, n, device="cuda") for n in each)
    halves = make_buffer(InputFormat("half", block_tokens or 8), width, len(query), out.device)
    floats = make_buffer(FP8_INPUT, width, len(query), out.device)
    scales = np.full(len(halves.scales), np.nan, np.float32)
    scales[: twin.tokens] = np.repeat([1.0 if (n == 1) == case.alone else np.nan for _, n in case.rows], counts)
    tensors = [
        single_tokens(twin) if case.alone else ints([row for row, _ in tiles]),
        ints([first for _, first in tiles]), ints(twin.starts), ints(counts),
        ints(pasts + counts), ints(twin.table), ints([twin.table.shape[1]]),
        torch.tensor(twin.sinks, device="cuda"), out,
    ]  # fmt: skip
    addresses = [*(floats.addresses if in_fp8 else halves.addresses if block_tokens else (0, 0))]
    addresses += [each.data_ptr() for each in (next_tile, handed, states, arrivals)]
    order = FP8_INPUT.block_tokens if in_fp8 else block_tokens, halves.chunks
    numbers = SCALE, case.soft_cap, kernel.window, len(tiles), case.kv_heads, 0, width, *order, most_parts, int(in_fp8)
    grid = kernel.grid(len(tiles), case.kv_heads, case.blocks)
    if case.alone:
        grid = len(tensors[0]), case.kv_heads, case.blocks
    kernels, found = LoadedKernels(architecture(torch.cuda.get_device_capability())), []
    for _ in range(times):
        for filled in (out, halves.values, halves.scales, handed, states):
            filled.fill_(torch.nan)
        floats.codes.fill_(0x7F)  # NaN
        kernels[kernel.source()].launch(
            grid, kernel.threads, [*read, *(each.data_ptr() for each in tensors), *addresses, *numbers],
            kernel.sizes, int(torch.cuda.current_stream().cuda_stream), dependent=False,
        )  # fmt: skip
        torch.cuda.synchronize()
        assert not next_tile.any()
        assert not arrivals.any()
        used = handed.isnan().logical_not().any(dim=1)
        assert case.fixed or int(used.sum()) == (case.parts if most_parts else 0)
        read_back = FP8Values.read(floats.codes, floats.terms, len(query), width).floats()
        found.append((read_back if in_fp8 else halves.values if block_tokens else out).cpu().numpy())
        assert np.array_equal(halves.scales.cpu().numpy(), scales if block_tokens else scales * np.nan, equal_nan=True)
    assert all(np.array_equal(each, found[0], equal_nan=True) for each in found)
    return found[0]


def ints(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.int32), device="cuda")


def needs_card(kernel: AttendChunkKernel | SyncChunkKernel) -> None:
    """Hopper's instructions run there alone, mma.sync on any."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if found < (8, 0) or (isinstance(kernel, AttendChunkKernel) and found != (9, 0)):
        pytest.skip("no card that runs the kernel")
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL_CASES)
def test_attention_of_chunks(name: str) -> None:
    needs_card(ALL_CASES[name].kernel)
    twin = Twin(ALL_CASES[name], 3)
    found = attended(twin, times=3)
    # Of weights in that type; an int8 cache's keys and values are rounded to it, too.
    rounded = {"bf16": 3e-3, "f16": 4e-4, "int8": 8e-4, "fp8": 4e-4}[twin.case.kernel.kv_dtype]
    for start, (_, count) in zip(twin.starts, twin.case.rows, strict=True):
        rows = slice(start, start + count)
        if (count == 1) != twin.case.alone:
            assert np.isnan(found[rows]).all()
        else:
            error = np.linalg.norm(found[rows] - twin.expected[rows]) / np.linalg.norm(twin.expected[rows])
            assert error <= rounded, (rows, error)
    assert np.isnan(found[twin.tokens :]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in ALL_CASES.items() if case.kernel.head % 64 == 0])
def test_results_as_halves(name: str) -> None:
    """The same results in the matmuls' order; those beyond what a half can hold are cut, and NaN stays NaN."""
    needs_card(ALL_CASES[name].kernel)
    twin = Twin(ALL_CASES[name], 3)
    twin.cached[-1][1, :, 0, 0] = 1e5 if twin.case.kernel.element == "bf16" else np.nan
    found = attended(twin)
    for block_tokens in (8, 96, 128):
        rows = np.full((-(-len(found) // block_tokens) * block_tokens, found.shape[1]), np.nan, np.float16)
        rows[: len(found)] = np.clip(found, -65504, 65504)
        halves = attended(twin, 2, block_tokens)
        assert np.array_equal(halves, half_order(rows, block_tokens), equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel.head % 128 == 0])
def test_results_as_8_bit_floats(name: str) -> None:
    """The same results as torch rounds them, but for ties, which texts of few keys have; nothing else is written."""
    needs_card(PLAIN)
    twin = Twin(CASES[name], 3)
    wanted = FP8Values.of(torch.from_numpy(attended(twin))).floats().numpy()
    found, there = attended(twin, 2, in_fp8=True), np.isfinite(wanted)
    assert np.array_equal(np.isfinite(found), there)
    least = 1e-5 * np.abs(wanted[there]).max()  # of the smallest floats the next one is twice as large
    assert np.allclose(found[there], wanted[there], rtol=0.13, atol=least)
    assert np.linalg.norm(found[there] - wanted[there]) <= 0.02 * np.linalg.norm(wanted[there])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "window"),
    [(PLAIN, 0), (PLAIN, 150), (PLAIN, 300), (CODED, 0), (CODED, 150), (FP8, 0), (WIDEST, 0), (SYNC, 0), (SYNC, 150)],
)
def test_a_tokens_bits_are_its_contexts_alone(form: AttendChunkKernel | SyncChunkKernel, window: int) -> None:
    """A prompt in one chunk, and in ragged chunks beside another row."""
    needs_card(form)
    kernel = replace(form, window=window)
    whole = Twin(Case(kernel, ((0, 500),)), 4)
    expected = attended(whole)
    for first, last in [*pairwise((0, 33, 100, 101 + kernel.keys, 500)), (128, 499)]:
        part = Twin(Case(kernel, ((first, last - first), (77, 60))), 5)
        part.cached[0] = whole.cached[0][:, :last]
        part.query[: last - first] = whole.query[first:last]
        found = attended(part)[: last - first]
        assert np.array_equal(found.view(np.uint32), expected[first:last].view(np.uint32)), (first, last)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [
        PLAIN, replace(PLAIN, window=700, cap=True, sinks=True), replace(PLAIN, window=150), NARROW, WIDE, CODED,
        replace(WIDE, kv_dtype="int8"), FP8, AttendChunkKernel(80, 7, 18, "f16", 16, sinks=True),
    ],
)  # fmt: skip
def test_a_token_alone_has_the_bits_that_it_has_in_a_chunk(form: AttendChunkKernel) -> None:
    """Contexts are cut at fixed places; blocks of threads share them, or not."""
    needs_card(form)
    kernel, soft_cap = replace(form, part=512), 9.0 if form.cap else 0.0
    whole = Twin(Case(kernel, ((600, 1000),), soft_cap=soft_cap), 6)
    ragged = Twin(Case(kernel, ((900, 333), (0, 70)), soft_cap=soft_cap), 7)
    ragged.cached[0], ragged.query[:333], ragged.sinks = whole.cached[0][:, :1233], whole.query[300:633], whole.sinks
    chunk = attended(whole)
    assert np.array_equal(attended(ragged)[:333].view(np.uint32), chunk[300:633].view(np.uint32))
    positions = 600, 900, 1023, 1024, 1400, 1599
    for blocks in (1, 2, 5):
        case = Case(replace(kernel, tokens=1, alone=True), tuple((p, 1) for p in positions), 2, soft_cap, blocks)
        alone = Twin(case, 8)
        alone.sinks = whole.sinks
        for row, position in enumerate(positions):
            alone.cached[row], alone.query[row] = whole.cached[0][:, : position + 1], whole.query[position - 600]
        found = attended(alone, 2)
        for row, position in enumerate(positions):
            assert np.array_equal(found[row].view(np.uint32), chunk[position - 600].view(np.uint32)), (blocks, position)
