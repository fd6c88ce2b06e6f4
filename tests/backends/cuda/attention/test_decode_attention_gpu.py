"""The CUDA kernel for attention of single tokens against float64: fresh inputs, poisoned outputs, shuffled blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from realizar.backends.cuda.attention.decode import DecodeAttention  # noqa: E402
from realizar.backends.cuda.native.attend_source import AttendKernel  # noqa: E402
from realizar.backends.cuda.native.compiler import compile_sources  # noqa: E402
from wider import wider  # noqa: E402

PLAIN = AttendKernel(128, 4, 3, False, 0, False, 128, False, "bf16", 16, "f32", 1, bulk=False)
INT8 = replace(PLAIN, element="int8", runs=1, bulk=True)
FP8 = replace(INT8, element="fp8")
NAN_BYTE = 0x7F  # of e4m3
LONG = replace(PLAIN, splits=1, runs=1, bulk=True)


@dataclass(frozen=True)
class Case:
    """A kernel, and what it runs on: contexts of the rows (0 is no row), parts of the grid."""

    kernel: AttendKernel
    contexts: tuple[int, ...]
    parts: int = 1
    kv_heads: int = 2
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


CASES = {
    "bf16-128-gqa4": Case(PLAIN, (1, 2, 64, 0, 65, 300)),
    "parts": Case(PLAIN, (1, 500, 129, 128, 1000), parts=7),
    "64 parts-int8 rows": Case(replace(LONG, out="int8"), (9000, 3), parts=64),
    "half rows": Case(replace(PLAIN, out="half", block_tokens=8), (40, 0, 700, 7, 64, 63, 1, 2, 3), parts=3),
    "int8-window-sinks": Case(INT8, (500, 20, 333), 4, window=130, sinks=True),
    "f16-64-gqa3-cap-norm": Case(
        replace(PLAIN, head=64, group=3, rotary=64, norm=1, bias=True, element="f16", interleaved=True, cap=True),
        (77, 1, 260), parts=2, soft_cap=8.0,
    ),
    "80-gqa1-partial rope": Case(replace(PLAIN, head=80, group=1, rotary=32), (150, 33), kv_heads=3),
    "96-gqa6-layer norm": Case(replace(PLAIN, head=96, group=6, rotary=96, norm=2, norm_bias=True), (50, 129)),
    "256-gqa2-no rope": Case(replace(PLAIN, head=256, group=2, rotary=0, splits=8), (64, 200), parts=2),
    "128-gqa8": Case(replace(PLAIN, group=8, out="half", block_tokens=16), (111, 222), parts=2),
    "8 warps-2 stages": Case(
        replace(PLAIN, warps=8, resident=16, stages=2, block_size=32, out="int8"), (1, 16, 17, 33, 200, 700)
    ),
    "8 warps-parts": Case(
        replace(LONG, warps=8, resident=16, out="half", block_tokens=8), (1100, 3), parts=9
    ),
    "8 warps-64 parts": Case(replace(LONG, warps=8, resident=16, out="int8"), (9000, 3), parts=64),
    "8 warps-gqa1-parts": Case(replace(PLAIN, group=1, warps=8, resident=16), (700, 90), parts=5),
    "int8-4 runs": Case(replace(INT8, head=96, rotary=64, group=5, runs=4), (300, 18), parts=2),
    "2 warps-window": Case(replace(PLAIN, warps=2, resident=16, block_size=64), (95, 300, 60), parts=2, window=77),
    "int8-2 stages": Case(
        replace(INT8, head=96, rotary=64, group=5, warps=8, resident=16, stages=2),
        (40, 530), parts=3, window=400,
    ),
    "copy engine-4 runs": Case(replace(PLAIN, warps=2, resident=16, bulk=True), (1, 2, 64, 0, 65, 300)),
    "copy engine-96-parts-window": Case(
        replace(PLAIN, head=96, rotary=96, group=3, bulk=True, block_size=32), (95, 900), parts=3, window=700
    ),
    "int8 by lanes-64-gqa8-sinks": Case(
        replace(PLAIN, element="int8", head=64, group=8, rotary=64, runs=1, stages=2), (500, 20), sinks=True
    ),
    "64-gqa8-window-sinks": Case(
        replace(PLAIN, head=64, group=8, rotary=64, warps=2, resident=16, out="half", block_tokens=16),
        (500, 20, 129, 128, 0, 127), window=128, sinks=True,
    ),
    "growth": Case(replace(PLAIN, norm=1, growth=True), (1, 65, 0, 300), parts=2),
    "stored": Case(replace(PLAIN, norm=1, stored=True), (1, 65, 0, 64, 300), parts=2),
    "stored-512-gqa8": Case(
        replace(PLAIN, head=512, group=8, rotary=512, norm=1, out="half", block_tokens=8, stored=True),
        (700, 1, 16), parts=3, kv_heads=1,
    ),
    "stored-int8-window": Case(replace(INT8, warps=2, resident=16, stored=True), (500, 20, 333), 4, window=130),
    "int8-64-gqa1": Case(replace(INT8, head=64, group=1, rotary=64, out="int8"), (90, 1, 64)),
    "fp8": Case(FP8, (1, 2, 64, 0, 65, 300)),
    "fp8-window-sinks-cap": Case(replace(FP8, cap=True), (500, 20, 333), 4, window=130, sinks=True, soft_cap=8.0),
    "fp8-64-gqa8": Case(replace(FP8, head=64, group=8, rotary=64, out="int8"), (90, 1, 64)),
    "fp8 by lanes-72": Case(
        replace(FP8, head=72, group=7, rotary=64, bulk=False), (500, 20), parts=2
    ),
    "fp8-2 stages-parts": Case(replace(FP8, warps=8, resident=16, stages=2), (1100, 3, 700), parts=9),
    "fp8-4 runs": Case(replace(FP8, head=96, rotary=64, group=5, runs=4), (300, 18), parts=2),
    "fp8-stored-256": Case(
        replace(FP8, head=256, group=2, rotary=64, warps=2, resident=16, stored=True), (500, 20, 333), 4, window=130
    ),
}  # fmt: skip


@pytest.mark.parametrize("arch", wider(["sm_80", "sm_90a", "sm_100a"], "sm_90a"))
def test_kernels_compile(arch: str, tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forms = "half rows", "f16-64-gqa3-cap-norm", "copy engine-4 runs", "growth", "stored"
    names = *forms, "int8-2 stages", "fp8-2 stages-parts", "fp8 by lanes-72"
    kernels = [CASES[name].kernel for name in names]
    assert all(kernel.supported for kernel in kernels)
    for cubin in compile_sources([kernel.source() for kernel in kernels], arch):
        assert b"attend_" in cubin
    assert not replace(PLAIN, group=16).supported
    assert not replace(PLAIN, block_size=24).supported
    assert not replace(PLAIN, element="f32").supported


class Twin:
    """Inputs of a case and what float64 makes of them."""

    def __init__(self, case: Case, seed: int) -> None:
        rng, kernel = np.random.default_rng(seed), case.kernel
        self.case, self.heads = case, case.kv_heads * kernel.group
        rows, head, size = len(case.contexts), kernel.head, kernel.block_size
        self.width = (self.heads + 2 * case.kv_heads) * head
        self.partials = rng.standard_normal((kernel.splits, rows, self.width)).astype(np.float32)
        if kernel.stored:
            self.partials[..., self.heads * head :] = np.nan  # no kernel may read them
        self.bias = rng.standard_normal(self.width).astype(np.float32)
        self.norms = [rng.standard_normal(head).astype(np.float32) for _ in range(4)]
        self.sinks = rng.standard_normal(self.heads).astype(np.float32)
        most = max(case.contexts)
        angles = rng.standard_normal((most + 1, max(1, kernel.rotary // 2))).astype(np.float32)
        self.cosine, self.sine = np.cos(angles), np.sin(angles)
        self.query_scales = rng.uniform(0.5, 2.0, most + 1).astype(np.float32)
        per_row = -(-most // size)
        self.table = rng.permutation(rows * per_row).astype(np.int32).reshape(rows, per_row)
        self.old = rng.standard_normal((2, rows * per_row, case.kv_heads, size, head)).astype(np.float32)

    def vectors(self, row: int) -> np.ndarray:
        """float64 queries, key and value heads of a row; queries and keys are rotated."""
        kernel, head = self.case.kernel, self.case.kernel.head
        x = self.partials[:, row].astype(np.float64).sum(axis=0)
        x = (x + self.bias if kernel.bias else x).reshape(-1, head)
        rotated = x[: self.heads + self.case.kv_heads]
        if kernel.norm:
            rotated = rotated - rotated.mean(axis=1, keepdims=True) if kernel.norm == 2 else rotated
            rotated = rotated / np.sqrt((rotated**2).mean(axis=1, keepdims=True) + 1e-5)
            which = np.arange(len(rotated)) >= self.heads
            rotated = rotated * np.where(which[:, None], self.norms[1], self.norms[0])
            if kernel.norm_bias:
                rotated = rotated + np.where(which[:, None], self.norms[3], self.norms[2])
        if kernel.rotary:
            half, position = kernel.rotary // 2, self.case.contexts[row] - 1
            first = slice(0, 2 * half, 2) if kernel.interleaved else slice(0, half)
            second = slice(1, 2 * half, 2) if kernel.interleaved else slice(half, 2 * half)
            c, s = self.cosine[position, :half], self.sine[position, :half]
            rotated = rotated.copy()
            a, b = rotated[:, first].copy(), rotated[:, second].copy()
            rotated[:, first], rotated[:, second] = a * c - b * s, b * c + a * s
        if kernel.growth:
            scales = np.where(np.arange(len(rotated)) < self.heads, self.query_scales[self.case.contexts[row] - 1], 1.0)
            rotated = rotated * scales[:, None]
        return np.concatenate([rotated, x[len(rotated) :]])

    def attended(self, row: int, cached: np.ndarray) -> np.ndarray:
        """float64 [heads, head]; `cached` float64 [2, context, KV heads, head] with the new key and value."""
        case, length = self.case, self.case.contexts[row]
        seen = slice(max(0, length - case.window) if case.window else 0, length)
        out = []
        for index, q in enumerate(self.vectors(row)[: self.heads]):
            k, v = cached[:, seen, index // case.kernel.group]
            scores = k @ q * 0.1
            if case.soft_cap:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            weights = np.exp(scores - scores.max())
            whole = weights.sum() + (np.exp(self.sinks[index] - scores.max()) if case.sinks else 0.0)
            out.append(weights @ v / whole)
        return np.array(out)


@dataclass(frozen=True)
class Device:
    """Inputs and outputs of a case's kernel on a GPU, the outputs poisoned."""

    partials: torch.Tensor
    cache: list[torch.Tensor]
    scales: list[torch.Tensor]
    out: torch.Tensor
    out_scale: torch.Tensor
    terms: torch.Tensor
    partial: torch.Tensor
    state: torch.Tensor
    arrivals: torch.Tensor

    @staticmethod
    def of(twin: Twin) -> Device:
        case, kernel = twin.case, twin.case.kernel
        rows, width = len(case.contexts), twin.heads * kernel.head
        out_rows = -(-rows // kernel.block_tokens) * kernel.block_tokens
        dtype = {"f32": torch.float32, "int8": torch.int8, "half": torch.float16}[kernel.out]
        cache, scales = stored(floats(twin.old), kernel.element)
        spoil(twin, scales if kernel.element == "int8" else cache)
        return Device(
            partials=floats(twin.partials), cache=cache, scales=scales,
            out=torch.full((out_rows, width), 77 if dtype == torch.int8 else torch.nan, dtype=dtype, device="cuda"),
            out_scale=poison(out_rows), terms=torch.zeros(rows, width // 8, device="cuda"),
            partial=poison(rows * case.parts * width), state=poison(rows * case.parts * twin.heads * 2),
            arrivals=torch.zeros(rows * case.kv_heads, dtype=torch.int32, device="cuda"),
        )  # fmt: skip

    def launch(self, twin: Twin, attention: DecodeAttention) -> None:
        case, kernel = twin.case, twin.case.kernel
        size, head = kernel.block_size, kernel.head
        lasts = [(row, n, (n - 1) // size, (n - 1) % size) for row, n in enumerate(case.contexts)]
        slots = [twin.table[row, block] * size + place if n else -1 for row, n, block, place in lasts]
        decodes = [(row, row, n, n - 1) if n else (-1,) * 4 for row, n in enumerate(case.contexts)]
        tensors = [
            self.partials, floats(twin.bias), floats(twin.cosine), floats(twin.sine), floats(twin.query_scales),
            *map(floats, twin.norms), *self.cache, *self.scales, ints(slots),
            floats(twin.sinks) if case.sinks else None, self.partial, self.state, self.arrivals, ints(decodes),
            ints(twin.table), ints([twin.table.shape[1]]), self.out, self.out_scale, self.terms,
        ]  # fmt: skip
        integers = [
            self.partials.stride(0), self.partials.stride(1), twin.heads * head, (twin.heads + case.kv_heads) * head,
            case.kv_heads, case.window, 0, twin.heads * head,
        ]  # fmt: skip
        grid = case.kv_heads, len(case.contexts), case.parts
        attention.launch(kernel, grid, tensors, [1e-5, 1e-6, 0.1, case.soft_cap], integers, dependent=False)
        torch.cuda.synchronize()


def ints(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.int32), device="cuda")


def floats(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.ascontiguousarray(values, np.float32), device="cuda")


def poison(count: int) -> torch.Tensor:
    return torch.full((count,), torch.nan, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_attention_of_tokens(name: str) -> None:
    case = CASES[name]
    kernel, twin = case.kernel, Twin(case, 3)
    made = Device.of(twin)  # and the context that kernels are loaded into
    attention = DecodeAttention(torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_capability())
    attention.prepare([kernel])
    assert attention.ready(kernel)
    for _ in range(2):  # counters are left as they were
        made.launch(twin, attention)
    assert not made.arrivals.any()
    held = restored(made.cache, made.scales, kernel.element).cpu().numpy().astype(np.float64)
    found = written_tokens(kernel, made.out, made.out_scale, made.terms, len(case.contexts), twin.heads * kernel.head)
    for row, length in enumerate(case.contexts):
        if length:
            check_row(twin, row, found[row], held)
        else:
            assert kernel.out != "f32" or bool(made.out[row].isnan().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", [PLAIN, INT8, FP8], ids=lambda kernel: kernel.element)
@pytest.mark.parametrize("newest", [False, True])
def test_what_is_no_number_is_seen_by_its_row_alone(kernel: AttendKernel, newest: bool) -> None:
    """A value of the cache, or of the token itself, and what the cache then has of it."""
    twin = Twin(Case(kernel, (300, 70)), 4)
    column = (twin.heads + twin.case.kv_heads) * kernel.head  # of the first value
    if newest:
        twin.partials[0, 0, column] = np.nan
    made = Device.of(twin)
    if not newest:
        held = made.scales[1] if kernel.element == "int8" else made.cache[1]
        held[twin.table[0, 2], 0, 5, 0] = NAN_BYTE if kernel.element == "fp8" else torch.nan
    attention = DecodeAttention(torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_capability())
    attention.prepare([kernel])
    made.launch(twin, attention)
    found = made.out.view(2, twin.case.kv_heads, kernel.group, kernel.head)
    assert found[0, 0, :, 0].isnan().all()
    assert found[0, 1].isfinite().all()
    assert found[1].isfinite().all()
    held = restored(made.cache, made.scales, kernel.element)
    block, place = divmod(299, kernel.block_size)
    assert bool(held[1, twin.table[0, block], 0, place, 0].isnan()) is newest


def check_row(twin: Twin, row: int, found: np.ndarray, held: np.ndarray) -> None:
    """The new key and value are in the cache, and the result is that of all that the cache holds."""
    case, kernel = twin.case, twin.case.kernel
    size = kernel.block_size
    places = [(twin.table[row, i // size], i % size) for i in range(case.contexts[row])]
    cached = np.array([[held[which, block, :, at] for block, at in places] for which in range(2)])
    newest = twin.vectors(row)[twin.heads :].reshape(2, case.kv_heads, kernel.head)
    if kernel.stored:
        newest = twin.old[:, places[-1][0], :, places[-1][1]]
    assert np.abs(cached[:, -1] - newest).max() <= (0.064 if kernel.element == "fp8" else 0.02) * np.abs(newest).max()
    expected = twin.attended(row, cached).reshape(-1)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    rounded = {"bf16": 4e-3, "f16": 1e-3, "int8": 1e-3, "fp8": 1e-3}[kernel.element]  # queries and weights in that type
    assert error <= rounded + (0.01 if kernel.out == "int8" else 0.0), (row, error)


def spoil(twin: Twin, tensors: list[torch.Tensor]) -> None:
    """NaN wherever no row may look: beyond its last token, and before its window."""
    size, window = twin.case.kernel.block_size, twin.case.window
    for row, length in enumerate(twin.case.contexts):
        unseen = set(range(twin.table.shape[1] * size)) - set(range(max(0, length - window) if window else 0, length))
        for at in unseen:
            for tensor in tensors:
                none = NAN_BYTE if tensor.dtype == torch.uint8 else torch.nan
                tensor[twin.table[row, at // size], :, at % size] = none


def stored(values: torch.Tensor, element: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values as a cache holds them, and their scales."""
    if element == "fp8":
        scales = [torch.full((1,), each, device="cuda") for each in (0.75, 1.5)]
        codes = [(part / scale).to(torch.float8_e4m3fn) for part, scale in zip(values, scales, strict=True)]
        return [each.view(torch.uint8).contiguous() for each in codes], scales
    if element != "int8":
        kept = values.to({"bf16": torch.bfloat16, "f16": torch.float16}[element])
        return [kept[0].contiguous(), kept[1].contiguous()], [torch.zeros(1, device="cuda")] * 2
    groups = values.unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(dim=-1) / 127).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(-2)
    return [codes[0].contiguous(), codes[1].contiguous()], [scales[0].contiguous(), scales[1].contiguous()]


def restored(cache: list[torch.Tensor], scales: list[torch.Tensor], element: str) -> torch.Tensor:
    if element == "fp8":
        parts = [part.view(torch.float8_e4m3fn).float() * scale for part, scale in zip(cache, scales, strict=True)]
        return torch.stack(parts)
    both = torch.stack([part.float() for part in cache])
    if element != "int8":
        return both
    return (both.unflatten(-1, (-1, 32)) * torch.stack(scales).float()[..., None]).flatten(-2)


def written_tokens(
    kernel: AttendKernel, out: torch.Tensor, out_scale: torch.Tensor, terms: torch.Tensor, rows: int, width: int
) -> np.ndarray:
    """float64 [rows, width] of what the next matmul reads."""
    if kernel.out == "f32":
        return out.double().cpu().numpy()
    if kernel.out == "int8":
        codes = out.double().unflatten(-1, (-1, 16))
        both = terms.double().reshape(rows, -1, 2)
        sums = codes.sum(dim=-1) * both[..., 0]
        assert torch.allclose(sums, both[..., 1], rtol=1e-5, atol=1e-5)
        return (codes * both[..., :1]).flatten(-2).cpu().numpy()
    blocks = out.reshape(-1, width // 64, 4, 2, kernel.block_tokens // 8, 8, 4, 2)  # 4s, 1s; eights, row; 16s, 2s
    values = blocks.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(-1, width).double()
    return (values * out_scale.double()[:, None]).cpu().numpy()
