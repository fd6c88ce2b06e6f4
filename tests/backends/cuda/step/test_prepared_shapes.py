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
from realizar.backends.cuda.shapes import (  # noqa: E402
    chunk_shapes,
    least_holding,
    mixed_shapes,
    padded_rows,
    padded_tokens,
)
from realizar.backends.cuda.step_arrays import StepShape, StepSizes  # noqa: E402
from realizar.models.parts import Linear  # noqa: E402
from realizar.models.spec import Attention  # noqa: E402


class Native:
    """A stand-in for `DecodeAttention` that compiles nothing."""

    def __init__(self, _device: object) -> None:
        self.prepared: set[object] = set()

    def prepare(self, wanted: Iterable[object]) -> None:
        self.prepared |= set(wanted)

    def ready(self, kernel: object) -> bool:
        return kernel in self.prepared


class Arguments:
    """Stand-in for the arguments of a decode's kernel: matmuls are split by tokens as on a card."""

    def rotated_constants(self, _rotation: object, _linear: object, shape: StepShape) -> dict[str, Any]:
        splits = 8 if shape.tokens <= 16 else 4 if shape.tokens <= 64 else 2 if shape.tokens <= 256 else 1
        return {
            "SPLITS": splits, "BIAS": False, "NORM": 0, "NORM_BIAS": False, "ROTARY": 64, "INTERLEAVED": False,
            "VALUE_NORM": False,
            "GROWTH": False,
            "STORED": False,
        }  # fmt: skip

    def direct(self, _attention: object, _reader: object, _shape: StepShape) -> None:
        return None


def shapes_of_steps(sizes: StepSizes) -> set[StepShape]:
    """Shapes of steps with a chunk and any number of decodes, with graphs and without."""
    found, graphs = set(), chunk_shapes(sizes)
    for decodes in range(sizes.rows):
        for tokens in range(decodes + 2, sizes.tokens + 1):
            tiles = -(-(tokens - decodes) // sizes.tile_tokens)
            shape = StepShape(padded_tokens(tokens, sizes.tokens), padded_rows(decodes, sizes.rows), tiles)
            found |= {shape, least_holding(shape, graphs) or shape}
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
    binder.bind(BoundDecode(SimpleNamespace(attention=attention), None, None))  # type: ignore[arg-type]
    mixed = mixed_shapes(sizes)
    binder.prepare(mixed)
    native: Any = binder._native
    kinds = {binder.kind(shape) for shape in mixed}
    for shape in shapes_of_steps(sizes):
        assert StepShape(shape.tokens, shape.decodes, 1) in mixed
        if shape.decodes:
            assert native.ready(binder._kernel(binder._bound[0], shape)), shape
        assert binder.kind(shape) in kinds
    native.prepared.clear()  # Triton's in their place
    kinds = {binder.kind(shape) for shape in mixed}
    assert {binder.kind(shape) for shape in shapes_of_steps(sizes)} <= kinds
