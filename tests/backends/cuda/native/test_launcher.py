"""Launches as the driver gets them, with a driver that starts nothing."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from realizar.backends.cuda.native import launcher  # noqa: E402
from realizar.errors import KernelError  # noqa: E402


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of `cuLaunchKernelEx`, call by call; a grid without blocks is refused."""
    calls: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> tuple[Any]:
        calls.append(arguments)
        wrong = arguments[0].gridDimX == 0
        return (driver.CUresult.CUDA_ERROR_INVALID_VALUE if wrong else driver.CUresult.CUDA_SUCCESS,)

    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchAttributeValue")
    fake = SimpleNamespace(cuLaunchKernelEx=launch, **{name: getattr(driver, name) for name in names})
    monkeypatch.setattr(launcher, "driver_module", lambda: fake)
    monkeypatch.setattr(launcher, "_function", lambda _cubin, name: name)
    return calls


def test_each_launch_has_its_own_configuration(started: list[tuple[Any, ...]]) -> None:
    """The attribute of dependent launch is made once, and only launches that ask for it have it."""
    kernel = launcher.Kernel(b"", "kernel", 1000)
    for blocks, dependent in ((3, True), (4, False), (5, True)):
        kernel.launch((blocks, 2, 1), 64 * blocks, [blocks, 7, 0.5], "pif", 99, dependent)
    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    for (config, function, (values, types), extra), blocks in zip(started, (3, 4, 5), strict=True):
        assert (function, extra) == ("kernel", 0)
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
