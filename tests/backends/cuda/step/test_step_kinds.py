"""The kernels, formats and epilogues that steps of some kinds choose on an H200, on a device that runs none."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.matmul.recorded_launches import matmuls_on  # noqa: E402
from realizar.backends.cuda.device import interpreter_device  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.backends.cuda.layouts.fragments import fragment_format  # noqa: E402
from realizar.backends.cuda.matmul.linears import MergedLinear  # noqa: E402
from realizar.backends.cuda.weights.pack import PackedMatrix  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.quantization.ggml_layouts import GGML_LAYOUTS  # noqa: E402

KINDS = (
    StepKind(1, 1), StepKind(1, 1, long=True), StepKind(2, 2), StepKind(8, 8), StepKind(64, 64), StepKind(256, 256),
    StepKind(64, 8, 18), StepKind(2048, 64, 40),
)  # fmt: skip


def _packed(rows: int, cols: int, interleaved: bool = False) -> PackedMatrix:
    layout = fragment_format(GGML_LAYOUTS[GGMLType.Q4_K])
    return PackedMatrix(rows, cols, layout, torch.zeros(1), torch.zeros(1), None, interleaved)


def _way(linear: MergedLinear, kind: StepKind) -> str:
    (form,) = linear.input_formats(kind)
    config = linear.route(kind)
    assert config is not None
    epilogue = "gated" if linear.is_gated(kind) else "residual" if linear.adds_residual(kind) else "none"
    assert (config.epilogue is None) is (epilogue == "none")
    return f"{form.kind} {config.tiles.kind} {config.tiles.tokens} {linear.splits(kind)} {epilogue}"


def test_a_kind_chooses_a_matmul_with_its_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer of an 8B; what rows do beside does not matter to matmuls, and their number does."""
    matmuls, device = matmuls_on(monkeypatch), interpreter_device()
    qkv = MergedLinear([_packed(rows, 4096) for rows in (4096, 1024, 1024)], None, device, matmuls)
    gate_up = MergedLinear([_packed(28672, 4096, True)], None, device, matmuls, "silu")
    down = MergedLinear([_packed(4096, 14336)], None, device, matmuls, adds_residual=True)
    assert {kind: [_way(linear, kind) for linear in (qkv, gate_up, down)] for kind in KINDS} == {
        KINDS[0]: ["int8 matvec 1 1 none", "int8 matvec 1 1 gated", "int8 matvec 1 1 residual"],
        KINDS[1]: ["int8 matvec 1 1 none", "int8 matvec 1 1 gated", "int8 matvec 1 1 residual"],
        KINDS[2]: ["int8 matvec 2 1 none", "int8 matvec 2 1 gated", "int8 matvec 2 1 residual"],
        KINDS[3]: ["half wgmma 8 8 none", "half wgmma 8 1 gated", "half wgmma 8 12 none"],
        KINDS[4]: ["half wgmma 64 2 none", "half wgmma 64 1 gated", "half wgmma 64 4 none"],
        KINDS[5]: ["half wgmma 128 1 none", "half wgmma 128 1 gated", "half wgmma 128 2 none"],
        KINDS[6]: ["half wgmma 64 2 none", "half wgmma 64 1 gated", "half wgmma 64 4 none"],
        KINDS[7]: ["half wgmma 128 1 none", "half wgmma 128 1 gated", "half wgmma 128 1 none"],
    }
