"""`CUDADriver`: what sleeping needs of the driver, called through `cuda.bindings`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from realizar.backends.cuda.native.launcher import checked, driver_module


class CUDADriver:
    """Memory of one GPU by addresses, in bytes. Copies and zeros are started, and done after `synchronize`.

    The device's context must be current. Every method raises KernelError where the driver refuses, with its status in
    the text.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = driver = driver_module()
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index or 0
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device.index or 0
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._stream = torch.cuda.Stream(device)

    @cached_property
    def granularity_bytes(self) -> int:
        """Sizes of segments are multiples of it."""
        kind = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(checked(self._driver.cuMemGetAllocationGranularity(self._properties, kind), "asking for pages"))

    def reserve(self, size_bytes: int) -> int:
        """Addresses without memory; returns the first."""
        return int(checked(self._driver.cuMemAddressReserve(size_bytes, 0, 0, 0), "reserving addresses"))

    def release(self, address: int, size_bytes: int) -> None:
        """Give addresses back that have no memory."""
        checked(self._driver.cuMemAddressFree(address, size_bytes), "giving addresses back")

    def map(self, address: int, size_bytes: int) -> object:
        """Put new memory at reserved addresses; returns its handle."""
        driver = self._driver
        handle: Any = checked(driver.cuMemCreate(size_bytes, self._properties, 0), f"allocating {size_bytes} bytes")
        try:
            checked(driver.cuMemMap(address, size_bytes, 0, handle, 0), "mapping memory")
        except BaseException:
            driver.cuMemRelease(handle)
            raise
        try:
            checked(driver.cuMemSetAccess(address, size_bytes, [self._access], 1), "opening mapped memory")
        except BaseException:
            self.unmap(address, size_bytes, handle)
            raise
        return handle

    def unmap(self, address: int, size_bytes: int, handle: object) -> None:
        """Take the memory away again, and free it."""
        checked(self._driver.cuMemUnmap(address, size_bytes), "unmapping memory")
        checked(self._driver.cuMemRelease(handle), "freeing memory")

    def zero(self, address: int, size_bytes: int) -> None:
        """Start to fill memory with zeros."""
        checked(self._driver.cuMemsetD8Async(address, 0, size_bytes, self._stream.cuda_stream), "clearing memory")

    def copy_to_host(self, host_address: int, address: int, size_bytes: int) -> None:
        """Start a copy to pinned memory."""
        stream = self._stream.cuda_stream
        checked(self._driver.cuMemcpyDtoHAsync(host_address, address, size_bytes, stream), "copying to the host")

    def copy_to_device(self, address: int, host_address: int, size_bytes: int) -> None:
        """Start a copy from pinned memory."""
        stream = self._stream.cuda_stream
        checked(self._driver.cuMemcpyHtoDAsync(address, host_address, size_bytes, stream), "copying to the GPU")

    def mark(self) -> object:
        """An event behind all that was started, to wait for once."""
        driver = self._driver
        event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), "making an event")
        checked(driver.cuEventRecord(event, self._stream.cuda_stream), "recording an event")
        return event

    def wait(self, event: Any) -> None:
        """Wait until all that was started before `mark` gave the event is done."""
        checked(self._driver.cuEventSynchronize(event), "waiting for a copy")
        checked(self._driver.cuEventDestroy(event), "freeing an event")

    def synchronize(self) -> None:
        """Wait for all that was started, and for every kernel."""
        torch.cuda.synchronize(self._device)

    def pin(self, host_address: int, size_bytes: int) -> None:
        """Lock the host's pages, so that the GPU copies them by itself."""
        checked(self._driver.cuMemHostRegister(host_address, size_bytes, 0), "pinning memory of the host")

    def unpin(self, host_address: int) -> None:
        """Unlock what was pinned from this address on."""
        checked(self._driver.cuMemHostUnregister(host_address), "unpinning memory of the host")
