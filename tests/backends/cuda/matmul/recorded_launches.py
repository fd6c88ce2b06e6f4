"""A device that only records launches of matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from realizar.backends.cuda.device import Family
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.native import launcher
from realizar.backends.cuda.native.compiler import Source
from realizar.errors import KernelError

STREAM = 7  # the handle of the current one


class RecordingKernel:
    """Stands in for a loaded kernel."""

    launches: ClassVar[list[tuple[object, ...]]] = []
    refused = ""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        if self.refused and self.refused in name:
            raise KernelError(f"kernel {name} does not fit", name)
        self.name, self.shared_bytes = name, shared_bytes

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[int],
        sizes: str,
        stream: int,
        dependent: bool,
    ) -> None:
        self.launches.append((self.name, grid, threads, list(arguments), sizes, stream, dependent))


def record_launches(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
    """Have kernels loaded as of this kind, without being compiled."""

    def compile_all(sources: Sequence[Source], arch: str, compiled: object = None) -> list[bytes]:
        return [b"" for _ in sources]

    monkeypatch.setattr(launcher, "Kernel", kind)
    monkeypatch.setattr(launcher, "compile_sources", compile_all)


def matmuls_on(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] = (9, 0),
    invariant: bool = False,
    without: frozenset[Family] = frozenset(),
) -> MatmulKernels:
    properties = SimpleNamespace(
        name="NVIDIA H200" if capability == (9, 0) else "NVIDIA A100-SXM4-80GB",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        shared_memory_per_block_optin=227 * 1024,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))
    return MatmulKernels("cpu", batch_invariant=invariant, without=without)
