"""Errors of torch, Triton and the driver as ours: too little memory, a failed capture, a kernel that can't run, a lost
context.

Only the last ends the process: everything else leaves the context usable. A CUDA error is known by torch's error code
where torch gives one, and else by its text, which is that of `cudaGetErrorString` or the name of the driver's status.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from triton.errors import TritonError

from realizar.errors import CapacityError, DeviceLostError, KernelError, RealizarError, StepError
from realizar.outputs import RowError

_LOG = logging.getLogger(__name__)

_MEMORY_CODES = frozenset({2})
_MEMORY_TEXTS = (
    "out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # it allocates, and says no more when that fails
)
_CAPTURE_CODES = frozenset(range(900, 909))  # cudaErrorStreamCaptureUnsupported .. cudaErrorStreamCaptureWrongThread
_CAPTURE_TEXTS = (
    "stream is capturing",
    "error during capture",
    "separate capture sequences",
    "capture was not ended in the same stream",
    "capturing stream",
    "dependency created on uncaptured work",
    "thread-local capture sequence",
    "CUDA_ERROR_STREAM_CAPTURE",
    "CUDA_ERROR_CAPTURED_EVENT",
)
_REFUSED_CODES = frozenset({1, 9, 98, 200, 209, 218, 222, 701, 801})
_REFUSED_TEXTS = (
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "device kernel image is invalid",
    "no kernel image is available",
    "PTX was compiled with an unsupported toolchain",
    "a PTX JIT compilation failed",
    "too many resources requested for launch",
    "operation not supported",
)
_LOST_STATUSES = (  # of the driver, in a KernelError
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
)
_OTHERS = re.compile(r" Process \d+ has| Including non-PyTorch")  # torch lists every process on the card
_OF_THE_DEVICE = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS", "HIP error")
_TOOLCHAIN = ("Failed to find C compiler", "PassManager::run failed", "libcuda.so cannot found")


class CaptureError(RealizarError):
    """A graph could not be captured; the context can be used, and so can the launches one by one."""


class _ErrorsAsOurs:
    """A context that raises an error as another one. A step enters some: of generators they took it several times as
    long.
    """

    __slots__ = ("_device", "_ours_of")

    def __init__(self, device: torch.device | None, ours_of: Callable[[Exception], RealizarError | None]) -> None:
        self._device = torch.cuda.device(device if device is not None and device.type == "cuda" else -1)
        self._ours_of = ours_of

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: object) -> None:
        self._device.__exit__(kind, error, frames)
        if not isinstance(error, Exception) or (ours := self._ours_of(error)) is None:
            return
        try:
            raise ours from error
        finally:
            del ours  # an error whose frames hold it keeps what those frames hold, such as half a model


def device_errors(device: torch.device | None = None) -> AbstractContextManager[None]:
    """A context in which an error of the device is raised as one of ours.

    A GPU is the current one within: any thread may step a model, and each has a current GPU of its own.
    """
    return _ErrorsAsOurs(device, translate)


def step_errors(device: torch.device) -> AbstractContextManager[None]:
    """As `device_errors`, around a part of a step: a launch that is refused or raises costs the step, and no more.

    Raises StepError: a kernel does not compile, the device refuses to launch it, or its launch raised something else.
    """
    return _ErrorsAsOurs(device, _error_of_step)


def _error_of_step(error: Exception) -> RealizarError | None:
    ours = translate(error)
    if isinstance(known := ours or error, KernelError | CaptureError):
        return StepError(str(known))
    if isinstance(known, RealizarError):
        return ours
    _LOG.error("a launch raised an error", exc_info=error)
    return StepError(f"a launch raised {type(error).__name__}: {_first_line(error)}")


def translate(error: Exception) -> RealizarError | None:
    """A device's error as one of ours; None for one that is not the device's, or is one of ours already.

    Returns:
        CapacityError: memory of the device, or pinned memory of the host, does not suffice.
        CaptureError: something can't be done while a graph is captured.
        KernelError: a kernel does not compile, or the device refuses to launch it.
        DeviceLostError: a kernel or a copy failed otherwise: nothing more can run in this process.
    """
    if isinstance(error, KernelError):  # of a driver's status, which may be no matter of the kernel
        return _known(error) or (_lost(error) if _has(str(error), _LOST_STATUSES) else None)
    if isinstance(error, torch.OutOfMemoryError):
        return _no_memory(error)
    if isinstance(error, TritonError):
        return KernelError(f"a Triton kernel does not compile for this GPU: {_last_line(error)}")
    if isinstance(error, subprocess.CalledProcessError):  # Triton compiles its launchers with the system's C compiler
        return KernelError(f"Triton's launcher does not compile: {error}")
    text = str(error)
    if isinstance(error, RuntimeError | AssertionError) and any(part in text for part in _TOOLCHAIN):
        return KernelError(f"a Triton kernel does not compile here: {_first_line(error)}")
    is_of_torch = isinstance(error, RuntimeError) and _has(text, _OF_THE_DEVICE)
    if not is_of_torch and not isinstance(error, torch.AcceleratorError):
        return None
    if (known := _known(error)) is not None:
        return known
    if getattr(error, "error_code", None) in _REFUSED_CODES or _has(text, _REFUSED_TEXTS):
        return KernelError(f"the GPU refuses a launch: {_first_line(error)}")
    return _lost(error)


def row_error(error: Exception, where: str) -> RowError:
    """An error of `where` as that of one row; it is raised again if it is the device's."""
    if translate(error) is not None:
        raise error
    _LOG.error("%s of a row failed", where, exc_info=error)
    return RowError.of(error, where)


def _known(error: Exception) -> RealizarError | None:
    """Too little memory, or what can't be captured; None for anything else."""
    text, code = str(error), getattr(error, "error_code", None)
    if code in _MEMORY_CODES or _has(text, _MEMORY_TEXTS):
        return _no_memory(error)
    if code in _CAPTURE_CODES or _has(text, _CAPTURE_TEXTS):
        return CaptureError(f"a graph can't be captured: {_first_line(error)}")
    return None


def _lost(error: Exception) -> DeviceLostError:
    _keep_tensors_of_the_host()
    return DeviceLostError(f"the GPU's context is lost: {_first_line(error)}")


def _keep_tensors_of_the_host() -> None:
    """Let none that is alive be freed: torch asks the device before it takes pinned memory back, and the error that a
    lost context answers with ends the process there and then.
    """
    kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.device.type == "cpu"]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _no_memory(error: Exception) -> CapacityError:
    text = _OTHERS.split(_first_line(error), 1)[0]
    return CapacityError(f"the GPU is out of memory: {text}")


def _has(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
