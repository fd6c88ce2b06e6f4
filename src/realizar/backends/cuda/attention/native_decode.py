"""`DecodeAttention`: the CUDA kernel for attention of single tokens: compiled at load, launched by each layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from realizar.backends.cuda.native.attend_source import AttendKernel
from realizar.backends.cuda.native.compiler import architecture, compile_source, compile_sources
from realizar.backends.cuda.native.launcher import Kernel
from realizar.errors import KernelError

_LOG = logging.getLogger(__name__)
_SIZES = "p" * 24 + "ffff" + "i" * 8


class DecodeAttention:
    """The attention kernels of one device.

    A kernel that fails to compile is reported once; `ready` is False for it, and Triton's kernel runs in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arch = architecture(torch.cuda.get_device_capability(device))
        self._kernels: dict[AttendKernel, Kernel | None] = {}

    def prepare(self, wanted: Iterable[AttendKernel]) -> None:
        """Compile and load kernels, in parallel where they are not on disk yet.

        Triton's kernel runs for shapes that this kernel does not support.
        """
        wanted = list(dict.fromkeys(wanted))
        for kernel in wanted:
            if not kernel.supported:
                _LOG.debug("decode attention runs in Triton for %s", kernel)
        missing = [kernel for kernel in wanted if kernel not in self._kernels and kernel.supported]
        try:
            compile_sources([kernel.source() for kernel in missing], self._arch)
        except KernelError as error:
            _LOG.debug("an attention kernel does not compile: %s", error)  # the loop says which one
        for kernel in missing:
            source = kernel.source()
            try:
                self._kernels[kernel] = Kernel(compile_source(source, self._arch), source.name, kernel.shared_bytes)
            except KernelError as error:
                _LOG.warning("%s; the Triton kernel is used instead", error)
                self._kernels[kernel] = None

    def ready(self, kernel: AttendKernel) -> bool:
        """True if the kernel was prepared, and compiled."""
        return self._kernels.get(kernel) is not None

    def launch(
        self, kernel: AttendKernel, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float], integers: Sequence[int], dependent: bool,
    ) -> None:  # fmt: skip
        """Start a kernel; arguments in the order of attend.cu, None for an address that is not read.

        Raises:
            KernelError: the launch is refused.
        """
        loaded = self._kernels[kernel]
        assert loaded is not None
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        stream = int(torch.cuda.current_stream(self._device).cuda_stream)
        loaded.launch(grid, kernel.warps * 32, [*addresses, *numbers, *integers], _SIZES, stream, dependent)
