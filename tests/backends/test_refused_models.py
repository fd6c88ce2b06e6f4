"""Both backends refuse layers that they do not run by name, before a tensor is looked for, and so do their plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_spec import hybrid_spec
from realizar.backends.cpu.plan import plan_memory as plan_cpu_memory
from realizar.backends.cpu.runner import CPUBackend
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.errors import UnsupportedModelError
from resolving import resolved

EMPTY = Checkpoint(Path("hybrid.gguf"), "gguf", {}, {})
ON_CPU = "^hybrid: layer 2 has a short convolution, which the CPU backend does not run$"
ON_CUDA = "^hybrid: layers 1, 4 have a mixture of experts, which the CUDA backend does not run$"


def test_the_cpu_backend() -> None:
    config = resolved(hybrid_spec(), None, EngineConfig(), "cpu")
    with pytest.raises(UnsupportedModelError, match=ON_CPU):
        CPUBackend().load(hybrid_spec(), EMPTY, config)
    with pytest.raises(UnsupportedModelError, match=ON_CPU):
        plan_cpu_memory(hybrid_spec(), EMPTY, config)


def test_the_cuda_backend() -> None:
    pytest.importorskip("torch", reason="the GPU backend needs torch")
    pytest.importorskip("triton", reason="the GPU backend needs triton")
    from realizar.backends.cuda.device import interpreter_device
    from realizar.backends.cuda.plan import plan_memory
    from realizar.backends.cuda.runner import CUDABackend

    config = resolved(hybrid_spec(), None, EngineConfig(), "cuda")
    with pytest.raises(UnsupportedModelError, match=ON_CUDA):
        CUDABackend(device=interpreter_device()).load(hybrid_spec(), EMPTY, config)
    with pytest.raises(UnsupportedModelError, match=ON_CUDA):
        plan_memory(hybrid_spec(), EMPTY, config, 1 << 40)
