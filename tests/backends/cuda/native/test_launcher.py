"""Launches as the driver gets them, with a driver that starts nothing."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from realizar.backends.cuda.native import launcher  # noqa: E402
from realizar.errors import KernelError  # noqa: E402

FUNCTION = 77  # a handle


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of dynamic shared memory that the function is allowed, call by call."""
    monkeypatch.setattr(launcher, "_most_shared", {})
    return []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, allowed: list[int]) -> list[tuple[Any, ...]]:
    """The arguments of `cuLaunchKernelEx`, call by call; a grid without blocks is refused."""
    calls: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> tuple[Any]:
        calls.append(arguments)
        wrong = arguments[0].gridDimX == 0
        return (driver.CUresult.CUDA_ERROR_INVALID_VALUE if wrong else driver.CUresult.CUDA_SUCCESS,)

    def allow(_function: int, _attribute: object, size_bytes: int) -> tuple[Any]:
        allowed.append(size_bytes)
        return (driver.CUresult.CUDA_SUCCESS,)

    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchAttributeValue")
    values = {name: getattr(driver, name) for name in (*names, "CUfunction_attribute")}
    fake = SimpleNamespace(cuLaunchKernelEx=launch, cuFuncSetAttribute=allow, **values)
    monkeypatch.setattr(launcher, "driver_module", lambda: fake)
    monkeypatch.setattr(launcher, "_function", lambda *_: FUNCTION)
    return calls


def test_each_launch_has_its_own_configuration(started: list[tuple[Any, ...]]) -> None:
    """The attribute of dependent launch is made once, and only launches that ask for it have it."""
    kernel = launcher.Kernel(b"", "kernel", 1000)
    for blocks, dependent in ((3, True), (4, False), (5, True)):
        kernel.launch((blocks, 2, 1), 64 * blocks, [blocks, 7, 0.5], "pif", 99, dependent)
    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    for (config, function, (values, types), extra), blocks in zip(started, (3, 4, 5), strict=True):
        assert (function, extra) == (FUNCTION, 0)
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (blocks, 2, 1)
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64 * blocks, 1, 1)
        assert (config.sharedMemBytes, int(config.hStream)) == (1000, 99)
        assert (values, types) == ((blocks, 7, 0.5), (ctypes.c_void_p, ctypes.c_int, ctypes.c_float))
        found = [(each.id, each.value.programmaticStreamSerializationAllowed) for each in config.attrs]
        assert config.numAttrs == len(found)
        assert found == ([] if blocks == 4 else [(kind, 1)])


def test_a_refused_launch_names_its_kernel(started: list[tuple[Any, ...]]) -> None:
    with pytest.raises(KernelError, match="launching kernel: CUDA_ERROR_INVALID_VALUE"):
        launcher.Kernel(b"", "kernel", 0).launch((0, 1, 1), 32, [], "", 0, False)
    assert len(started) == 1


def test_kernels_of_one_function_keep_the_most_shared_memory(
    started: list[tuple[Any, ...]], allowed: list[int]
) -> None:  # fmt: skip
    """One with less must not take it from one that was loaded before; none is asked for where there is none."""
    for size_bytes in (0, 512, 96, 512, 100_000, 0):
        launcher.Kernel(b"", "kernel", size_bytes)
    assert allowed == [512, 100_000]
