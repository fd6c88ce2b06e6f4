"""`DecodeAttention`: the CUDA kernel for attention of single tokens: compiled at load, launched by each layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from realizar.backends.cuda.native.attend_source import AttendKernel
from realizar.backends.cuda.native.compiler import architecture, compile_sources
from realizar.backends.cuda.native.launcher import Kernel

_LOG = logging.getLogger(__name__)
_SIZES = "p" * 24 + "ffff" + "i" * 8


class DecodeAttention:
    """The attention kernels of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arch = architecture(torch.cuda.get_device_capability(device))
        self._kernels: dict[AttendKernel, Kernel] = {}

    def prepare(self, wanted: Iterable[AttendKernel]) -> None:
        """Compile and load kernels, in parallel where they are not on disk yet.

        Triton's kernel runs for shapes that this kernel does not support.

        Raises:
            KernelError: one does not compile, or the device refuses it.
        """
        wanted = list(dict.fromkeys(wanted))
        for kernel in wanted:
            if not kernel.supported:
                _LOG.debug("decode attention runs in Triton for %s", kernel)
        missing = [kernel for kernel in wanted if kernel not in self._kernels and kernel.supported]
        sources = [kernel.source() for kernel in missing]
        for kernel, source, cubin in zip(missing, sources, compile_sources(sources, self._arch), strict=True):
            self._kernels[kernel] = Kernel(cubin, source.name, kernel.shared_bytes)

    def ready(self, kernel: AttendKernel) -> bool:
        """True if the kernel was prepared."""
        return kernel in self._kernels

    def launch(
        self, kernel: AttendKernel, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float], integers: Sequence[int], dependent: bool,
    ) -> None:  # fmt: skip
        """Start a kernel; arguments in the order of attend.cu, None for an address that is not read.

        Raises:
            KernelError: the launch is refused.
        """
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        stream = int(torch.cuda.current_stream(self._device).cuda_stream)
        self._kernels[kernel].launch(
            grid, kernel.warps * 32, [*addresses, *numbers, *integers], _SIZES, stream, dependent
        )
