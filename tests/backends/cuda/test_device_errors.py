"""Errors of torch, Triton, cuBLAS and the driver: memory, captures, kernels that can't run, lost contexts."""

from __future__ import annotations

import ast
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

from realizar.backends.cuda.device_errors import CaptureError, device_errors, translate  # noqa: E402
from realizar.errors import CapacityError, DeviceLostError, InvalidRequestError, KernelError  # noqa: E402

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call"
CASES: dict[str, tuple[Exception, type[Exception], str]] = {
    "memory": (torch.OutOfMemoryError(f"CUDA out of memory. Tried 2 GiB.{ADVICE}"), CapacityError, "2 GiB."),
    "memory that others hold": (
        torch.OutOfMemoryError("CUDA out of memory. Tried 2 MiB. GPU 0 has 1 MiB free. Process 10 has 690.00 MiB."),
        CapacityError, "1 MiB free.",
    ),
    "pinned memory": (RuntimeError(f"CUDA error: out of memory{ADVICE}"), CapacityError, "CUDA error: out of memory"),
    "cuBLAS": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        CapacityError, "ALLOC",
    ),
    "cuBLAS's handle": (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        CapacityError, "out of memory",
    ),
    "driver's memory": (KernelError("loading kernel norm: CUDA_ERROR_OUT_OF_MEMORY"), CapacityError, "kernel norm"),
    "Triton's memory": (RuntimeError("Triton Error [CUDA]: out of memory"), CapacityError, "out of memory"),
    "synchronising in a capture": (
        RuntimeError(f"CUDA error: operation not permitted when stream is capturing{ADVICE}"), CaptureError, "permitted"
    ),
    "after it": (
        RuntimeError(f"CUDA error: operation failed due to a previous error during capture{ADVICE}"),
        CaptureError, "previous error",
    ),
    "Triton in a capture": (
        RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"), CaptureError, "permitted"
    ),
    "driver in a capture": (
        KernelError("launching attend: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), CaptureError, "launching attend"
    ),
    "Triton's resources": (OutOfResources(300_000, 232_448, "shared memory"), KernelError, "Required: 300000"),
    "Triton's compiler": (
        CompilationError("def norm():\n    x = 1", ast.parse("x = 1").body[0], "no such thing as x"),
        KernelError, "this GPU: no such thing as x",
    ),
    "ptxas": (PTXASError("Internal Triton PTX codegen error\n`ptxas` stderr:\nno sm_99"), KernelError, "no sm_99"),
    "no C compiler": (
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        KernelError, "C compiler",
    ),
    "C compiler": (subprocess.CalledProcessError(1, ["gcc"]), KernelError, "gcc"),
    "a launch": (
        RuntimeError(f"CUDA error: too many resources requested for launch{ADVICE}"), KernelError, "refuses a launch"
    ),
    "address": (
        RuntimeError(f"CUDA error: an illegal memory access was encountered{ADVICE}"), DeviceLostError, "illegal memory"
    ),
    "Triton's address": (
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), DeviceLostError, "illegal memory"
    ),
    "driver's address": (KernelError("launching mma: CUDA_ERROR_ILLEGAL_ADDRESS"), DeviceLostError, "launching mma"),
    "device's assert": (RuntimeError(f"CUDA error: device-side assert triggered{ADVICE}"), DeviceLostError, "assert"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_error_becomes_ours_in_one_line(name: str) -> None:
    error, kind, part = CASES[name]
    ours = translate(error)
    assert type(ours) is kind
    assert part in str(ours)
    assert "\n" not in str(ours)
    with pytest.raises(kind), device_errors():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error"),
        RuntimeError("a mean over 3 earlier tokens is wanted, and 2 were seen"),
        KernelError("kernel attend does not compile for sm_90a: line 3"),
        InvalidRequestError("logit_bias names token id 7"),
        CapacityError("blocks of 8 tokens"),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert translate(error) is None
    with pytest.raises(type(error)) as raised, device_errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("code", "kind"), [(2, CapacityError), (901, CaptureError), (701, KernelError), (719, DeviceLostError)]
)
def test_torchs_error_code_says_more_than_its_text(code: int, kind: type[Exception]) -> None:
    """The text may be translated or new."""
    error = torch.AcceleratorError("something")
    error.error_code = code
    assert type(translate(error)) is kind
