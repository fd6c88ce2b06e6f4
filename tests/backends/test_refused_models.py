"""Both backends refuse layers that they do not run by name, before a tensor is looked for, and so do their plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_spec import hybrid_spec
from realizar.backends import select
from realizar.backends.cpu.plan import plan_memory as plan_cpu_memory
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.cuda import supported
from realizar.backends.devices import THE_CPU, ChosenDevice
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import UnsupportedModelError
from realizar.models.generated.generate import generate_gguf
from realizar.models.spec import Experts, FeedForward
from resolving import resolved

EMPTY = Checkpoint(Path("hybrid.gguf"), "gguf", {}, {})
ON_CPU = "^hybrid: no layer has attention, which the CPU backend needs$"
ON_CUDA = "^hybrid: layer 1 has experts without a gate, which the CUDA backend does not run$"


def test_the_cpu_backend() -> None:
    spec = replace(hybrid_spec(), layers=hybrid_spec().layers[2:3])
    config = resolved(spec, None, EngineConfig(), "cpu")
    with pytest.raises(UnsupportedModelError, match=ON_CPU):
        CPUBackend().load(spec, EMPTY, config)
    with pytest.raises(UnsupportedModelError, match=ON_CPU):
        plan_cpu_memory(spec, EMPTY, config)


def test_the_cuda_backend() -> None:
    pytest.importorskip("torch", reason="the GPU backend needs torch")
    pytest.importorskip("triton", reason="the GPU backend needs triton")
    from realizar.backends.cuda.device import interpreter_device
    from realizar.backends.cuda.plan import plan_memory
    from realizar.backends.cuda.runner import CUDABackend

    spec = hybrid_spec()
    experts = spec.layers[1].feed_forward
    assert isinstance(experts, Experts)
    ungated = replace(spec.layers[1], feed_forward=replace(experts, gate=None))
    spec = replace(spec, layers=(spec.layers[0], ungated, *spec.layers[2:]))
    config = resolved(spec, None, EngineConfig(), "cuda")
    with pytest.raises(UnsupportedModelError, match=ON_CUDA):
        CUDABackend(device=interpreter_device()).load(spec, EMPTY, config)
    with pytest.raises(UnsupportedModelError, match=ON_CUDA):
        plan_memory(spec, EMPTY, config, 1 << 40)


def test_auto_is_the_cpu_for_what_it_alone_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine with a GPU, which keeps other models, and this one too where a GPU is asked for."""
    without = replace(supported.SUPPORTED, feed_forwards=frozenset({FeedForward}))
    monkeypatch.setattr(supported, "SUPPORTED", without)
    card = ChosenDevice("cuda", 0, "NVIDIA H200")
    monkeypatch.setattr(select, "choose_device", lambda wanted: card)
    for shape, device, chosen in (
        ("tiny-moe", "auto", THE_CPU), ("tiny-moe", "cuda", card), ("tiny", "auto", card),
    ):  # fmt: skip
        path = tmp_path / f"{shape}.gguf"
        generate_gguf(shape, path, "q8_0")
        caplog.clear()
        assert select.resolve_model(open_checkpoint(path), EngineConfig(device=device))[1].chosen == chosen
        assert ("which the CUDA backend does not run; the CPU runs it" in caplog.text) == (chosen == THE_CPU)
