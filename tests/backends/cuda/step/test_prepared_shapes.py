"""Loading compiles the kernels of every shape that a step can have, on every GPU."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends.cuda.attention import decode  # noqa: E402
from realizar.backends.cuda.attention.decode import BoundDecode, DecodeBinder  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.backends.cuda.shapes import (  # noqa: E402
    chunk_kinds,
    least_holding,
    mixed_kinds,
    padded_rows,
    padded_tokens,
)
from realizar.backends.cuda.step_arrays import StepSizes  # noqa: E402
from realizar.models.parts import Linear  # noqa: E402
from realizar.models.spec import Attention  # noqa: E402


class Native:
    """A stand-in for `DecodeAttention` that compiles nothing."""

    def __init__(self, _device: object, _capability: object) -> None:
        self.prepared: set[object] = set()

    def prepare(self, wanted: Iterable[object]) -> None:
        self.prepared |= set(wanted)

    def ready(self, kernel: object) -> bool:
        return kernel in self.prepared


class Arguments:
    """Stand-in for the arguments of a decode's kernel: matmuls are split by tokens as on a card."""

    def rotated_constants(self, _rotation: object, _linear: object, kind: StepKind) -> dict[str, Any]:
        splits = 8 if kind.tokens <= 16 else 4 if kind.tokens <= 64 else 2 if kind.tokens <= 256 else 1
        return {
            "SPLITS": splits, "BIAS": False, "NORM": 0, "NORM_BIAS": False, "ROTARY": 64, "INTERLEAVED": False,
            "VALUE_NORM": False,
            "GROWTH": False,
            "STORED": False,
        }  # fmt: skip

    def direct(self, _attention: object, _reader: object, _kind: StepKind) -> None:
        return None


def kinds_of_steps(sizes: StepSizes) -> set[StepKind]:
    """Shapes of steps with a chunk and any number of decodes, with graphs and without."""
    found, graphs = set(), chunk_kinds(sizes)
    for decodes in range(sizes.rows):
        for tokens in range(decodes + 2, sizes.tokens + 1):
            tiles = -(-(tokens - decodes) // sizes.tile_tokens)
            kind = StepKind(padded_tokens(tokens, sizes.tokens), padded_rows(decodes, sizes.rows), tiles)
            found |= {kind, least_holding(kind, graphs) or kind}
    return found


@pytest.mark.parametrize("rows", [1, 20, 100])
@pytest.mark.parametrize(("processors", "heads", "kv_heads"), [(132, 32, 8), (108, 24, 2), (46, 9, 3), (20, 16, 16)])
def test_decodes_beside_chunks(
    rows: int, processors: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "DecodeAttention", Native)
    sizes = StepSizes(max(176, -(-rows // 16) * 16), rows, 32, 64, 1, 40, 16)
    device = DeviceProfile(torch.device("cuda", 0), "none", (9, 0), processors, 1 << 34, 227 << 10)
    linear = Linear("weight", 64, 64)
    attention = Attention(heads, kv_heads, 64, 0.125, linear, linear, linear, linear)
    kv = SimpleNamespace(dtype="bf16", block_size=32)
    binder = DecodeBinder(Arguments(), SimpleNamespace(), kv, device, 1024)  # type: ignore[arg-type]
    merged: Any = SimpleNamespace(chosen_by=())
    bound = BoundDecode(SimpleNamespace(attention=attention), merged, merged)  # type: ignore[arg-type]
    binder.bind(bound)
    mixed = mixed_kinds(sizes)
    binder.prepare(mixed)
    native: Any = binder._native
    kernels = {binder.kernels_of(kind) for kind in mixed}
    for kind in kinds_of_steps(sizes):
        assert StepKind(kind.tokens, kind.decodes, 1) in mixed
        if kind.decodes:
            assert native.ready(binder._kernel(bound, kind)), kind
        assert binder.kernels_of(kind) in kernels
    native.prepared.clear()  # Triton's in their place
    kernels = {binder.kernels_of(kind) for kind in mixed}
    assert {binder.kernels_of(kind) for kind in kinds_of_steps(sizes)} <= kernels
