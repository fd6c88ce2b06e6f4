"""Kernels that a card refuses: a load goes on without their family, and with `auto` on the CPU; each says so once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from random_models import Recipe, random_model  # noqa: E402
from realizar.backends import select  # noqa: E402
from realizar.backends.cuda import runner as runner_module  # noqa: E402
from realizar.backends.cuda.device import SLOWER, DeviceProfile, Family, interpreter_device, refused_family  # noqa: E402
from realizar.backends.cuda.layouts.fragments import fragment_format  # noqa: E402
from realizar.backends.cuda.matmul.grouped_tiles import grouped_tiles  # noqa: E402
from realizar.backends.cuda.native.attend_source import AttendKernel  # noqa: E402
from realizar.backends.cuda.native.experts.source import ChoiceShape, choice_source, expert_source  # noqa: E402
from realizar.backends.cuda.native.grouped.source import (  # noqa: E402
    grouped_source,
    lay_source,
    route_many_sources,
    route_source,
)
from realizar.backends.cuda.native.sampling.source import sampling_sources  # noqa: E402
from realizar.backends.cuda.native.scans.source import ScanKernels  # noqa: E402
from realizar.backends.cuda.native.sources import (  # noqa: E402
    Epilogue,
    MatvecTiles,
    MmaSyncTiles,
    Tiles,
    WgmmaTiles,
    activations_source,
    matmul_source,
    repack_source,
)
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine import loading  # noqa: E402
from realizar.engine.loading import load_core  # noqa: E402
from realizar.errors import KernelError  # noqa: E402
from realizar.quantization.ggml_layouts import GGML_LAYOUTS  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from resolving import resolved  # noqa: E402
from step_inputs import stepped  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

Q4_K = fragment_format(GGML_LAYOUTS[GGMLType.Q4_K])
RECIPE = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="Q8_0", windows=(None,))


def of_matmul(tiles: Tiles, epilogue: Epilogue | None = None) -> str:
    return matmul_source((Q4_K,), tiles, epilogue).name


def of_grouped(*, wgmma: bool) -> str:
    return grouped_source(Q4_K, grouped_tiles(16, Q4_K, True, wgmma, 227 << 10), True, "silu", 32).name


def test_every_kernel_has_a_family() -> None:
    matvec, wgmma = MatvecTiles(1, 2, 2, 2, 7), WgmmaTiles(16, 2, 2, 4, 1, 1)
    kernels: dict[str, Family] = {
        of_matmul(matvec): "mat-vec",
        of_matmul(matvec, "residual"): "epilogues",
        of_matmul(matvec, "gelu_tanh"): "epilogues",
        of_matmul(wgmma): "wgmma",
        of_matmul(wgmma, "silu"): "epilogues",
        of_matmul(MmaSyncTiles(16, 2, 4, 1)): "matmuls",
        of_grouped(wgmma=False): "matmuls",
        of_grouped(wgmma=True): "wgmma",
        expert_source(Q4_K, matvec, "silu").name: "matmuls",
        choice_source(ChoiceShape(64, 6, 3), clusters=False).name: "matmuls",
        route_source(8).name: "matmuls",
        **{source.name: "matmuls" for source in route_many_sources(8)},
        lay_source(8).name: "matmuls",
        activations_source().name: "matmuls",
        repack_source(GGML_LAYOUTS[GGMLType.Q4_K], Q4_K).name: "repack",
        AttendKernel(64, 4, 1, False, 0, False, 64, False, "bf16", 32, "int8", 1).source().name: "attention",
        ScanKernels(2, 4, 4, 8, tiled=False).sources()["states"].name: "scans",
        **{source.name: "sampling" for source in sampling_sources()},
    }
    assert {name: refused_family(name, frozenset()) for name in kernels} == kernels
    assert set(kernels.values()) == set(SLOWER)


class Card:
    """A card that refuses kernels, as `load_model` meets it; `loads` are the families that each load went without."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.loads: list[frozenset[Family]] = []

    def load_model(self, *arguments: Any, **options: Any) -> str:
        device = next(each for each in arguments if isinstance(each, DeviceProfile))
        self.loads.append(device.without)
        for kernel in self.refused:
            if refused_family(kernel, frozenset()) not in device.without:
                raise KernelError(f"kernel {kernel} does not compile for sm_99: no such thing", kernel)
        return "a model"


def load_on(card: Card, monkeypatch: pytest.MonkeyPatch) -> CUDABackend:
    monkeypatch.setattr(runner_module, "load_model", card.load_model)
    spec, checkpoint = random_model(RECIPE)
    backend = CUDABackend(device=interpreter_device())
    backend.load(spec, checkpoint, resolved(spec, checkpoint, EngineConfig(), "cuda"))
    return backend


def test_a_load_goes_on_without_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = Card("wgmma_q4_f16_tokens16", "attend_64_warps4")
    backend = load_on(card, monkeypatch)
    assert card.loads == [frozenset(), {"wgmma"}, {"wgmma", "attention"}]
    assert backend.device.without == {"wgmma", "attention"}
    assert [record.message for record in caplog.records] == [
        "kernel wgmma_q4_f16_tokens16 does not compile for sm_99: no such thing; mma.sync multiplies and attends",
        "kernel attend_64_warps4 does not compile for sm_99: no such thing; Triton attends",
    ]


def test_what_fails_in_spite_of_that_takes_all_matmuls_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(Card):
        def load_model(self, *arguments: Any, **options: Any) -> str:
            super().load_model(*arguments, **options)
            if "matmuls" not in self.loads[-1]:
                raise KernelError("launching matvec_q4: CUDA_ERROR_INVALID_VALUE", "matvec_q4_tokens1")
            return "a model"

    card = Stubborn()
    load_on(card, monkeypatch)
    assert card.loads == [frozenset(), {"mat-vec"}, {"mat-vec", "matmuls"}]


@pytest.mark.parametrize("kernel", [None, "matvec_q4_tokens1"])
def test_a_kernel_without_a_slower_road_ends_the_load(monkeypatch: pytest.MonkeyPatch, kernel: str | None) -> None:
    """Triton's have none, nor has one that fails where all was given up."""

    class Refusing(Card):
        def load_model(self, *_arguments: Any, **_options: Any) -> str:
            raise KernelError("no kernel runs", kernel)

    with pytest.raises(KernelError, match=r"^no kernel runs$"):
        load_on(Refusing(), monkeypatch)


class Refusing:
    """A backend of a GPU on which no load succeeds."""

    def load(self, *_arguments: Any) -> None:
        raise KernelError("a Triton kernel does not compile for this GPU: no such thing")

    def shutdown(self) -> None:
        """There is nothing to free."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, make = select.choose_device, loading.make_backend

    def make_refusing(device: ChosenDevice, *arguments: Any, **options: Any) -> Any:
        return Refusing() if device.kind == "cuda" else make(device, *arguments, **options)

    card = ChosenDevice("cuda", 0, "H900")
    monkeypatch.setattr(select, "choose_device", lambda wanted: choose(wanted) if wanted == "cpu" else card)
    monkeypatch.setattr(loading, "make_backend", make_refusing)


@pytest.mark.usefixtures("gpu")
def test_auto_goes_on_to_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_model(tmp_path / "model.gguf")
    config = EngineConfig(threads=1, max_running=2, max_step_tokens=16, context_length=64)
    core = load_core(open_checkpoint(tmp_path / "model.gguf"), config, may_sleep=True)
    core.add(Request("a", (1, 2, 3), SamplingParams(temperature=0), 2))
    outputs = []
    while core.has_work:
        outputs += stepped(core)
    assert [output.error for output in outputs] == [None, None]
    core.close()
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.message == (
        "the model runs on the CPU, as its kernels fail on cuda:0, H900:"
        " a Triton kernel does not compile for this GPU: no such thing"
    )


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_asked_for_by_name_is_not_replaced(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model.gguf")
    with pytest.raises(KernelError, match="no such thing"):
        load_core(open_checkpoint(tmp_path / "model.gguf"), EngineConfig(device="cuda", context_length=64))
