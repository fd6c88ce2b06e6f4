"""Capturing a graph, so that a capture that fails leaves stream, allocator and context as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from realizar.backends.cuda.device_errors import CaptureError, translate
from realizar.backends.cuda.native.launcher import checked, driver_module
from realizar.errors import DeviceLostError

_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory goes on to ask them, without end


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of captures, one for all models on a device: cuBLAS keeps 32 MiB for each stream that it ran on."""
    return torch.cuda.Stream(device)


@cache
def stream_of_most(device: torch.device, left: int) -> tuple[torch.cuda.Stream, int]:
    """A stream on all multiprocessors but `left` or a few more, and how many it has.

    A green context of the driver, which stays, as `native.launcher` keeps its modules. KernelError: it makes none.
    """
    driver, with_default = driver_module(), 1
    number = checked(driver.cuDeviceGet(device.index or 0), "finding the device")
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = checked(driver.cuDeviceGetDevResource(number, kind), "finding multiprocessors")
    status, _, _, rest = driver.cuDevSmResourceSplitByCount(1, whole, 0, left)
    checked((status,), "parting multiprocessors")
    parted = checked(driver.cuDevResourceGenerateDesc([rest], 1), "parting multiprocessors")
    context = checked(driver.cuGreenCtxCreate(parted, number, with_default), "making a context of multiprocessors")
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = checked(driver.cuGreenCtxStreamCreate(context, int(flags), 0), "making a stream of multiprocessors")
    return torch.cuda.ExternalStream(int(stream), device=device), int(rest.sm.smCount)


def failure_of(error: Exception) -> str:
    """One line that says why a capture failed; DeviceLostError where the device failed, not the capture."""
    ours = translate(error)
    if isinstance(ours or error, DeviceLostError):
        raise error
    return str(ours or f"{type(error).__name__}: {error}").splitlines()[0]


class GraphRecorder:
    """Records launches as graphs, on a stream and from a pool of memory that all of them share.

    `torch.cuda.graph` would leave the stream of the capture current when the end of a capture fails, and torch's
    allocators would go on to take that capture for running and its pool for taken.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Record on a stream, on whose multiprocessors the graphs will run; by default on one that has all of them."""
        self._device = device
        self._stream = stream or _stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None], *, goes_on: bool = False) -> torch.cuda.CUDAGraph:
        """Capture what `run` launches as a graph; nothing of it runs. It `goes_on` with what the one before left.

        Raises DeviceLostError where the device failed. After any other error the capture has been ended: the device can
        go on.
        """
        graph = torch.cuda.CUDAGraph()
        if not goes_on:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # the pool takes memory of its own
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with suppress(RuntimeError):  # the first error is the one to report
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            _failed.append(graph)
            self._recover()
            raise
        return graph

    def _recover(self) -> None:
        """Restore the allocator after a failed capture, and clear the error so that nothing meets it later.

        Later graphs get a pool of their own, as the allocator of pinned memory keeps this one. Raises DeviceLostError
        where nothing can run any more.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):  # raised where torch has ended it
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        for attempt in range(2):  # an error that the capture left is reported once, by whatever comes next
            try:
                torch.zeros(1, device=self._device)
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                ours = translate(error)
                if attempt or not isinstance(ours, CaptureError):
                    raise DeviceLostError(f"the GPU does not recover from a failed capture: {error}") from error
            else:
                return
