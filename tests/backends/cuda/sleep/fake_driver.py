"""`FakeDriver`: a GPU's memory as arrays of the host, which come and go at addresses that stay."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cuda.sleep.driver import CUDADriver
from realizar.backends.cuda.sleep.load_memory import Segments
from realizar.errors import KernelError

PAGE = 4096


def device_bytes(segments: Segments) -> int:
    """Memory on the GPU now."""
    return sum(each.size_bytes for each in segments._segments.values() if each.handle is not None)


def host_bytes(segments: Segments) -> int:
    return 0 if segments._host is None else segments._host.size_bytes


class FakeDriver(CUDADriver):
    """Every rule of the driver that a mistake would break is checked.

    Attributes:
        memory: by address of their segments. pinned: sizes by address.
        limit_bytes: of the device. fails: names of calls that fail the next time.
    """

    granularity_bytes = PAGE

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.reserved: dict[int, int] = {}
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.pinned: dict[int, int] = {}
        self.fails: set[str] = set()
        self.log: list[str] = []
        self._next = 1 << 20
        self._started: list[tuple[str, int, int, int]] = []
        self._marks = 0

    def reserve(self, size_bytes: int) -> int:
        address, self._next = self._next, self._next + size_bytes + PAGE
        self.reserved[address] = size_bytes
        return address

    def release(self, address: int, size_bytes: int) -> None:
        assert self.reserved.pop(address) == size_bytes
        assert address not in self.memory

    def map(self, address: int, size_bytes: int) -> object:
        self._fail("map")
        assert self.reserved[address] == size_bytes
        assert address not in self.memory
        assert size_bytes % PAGE == 0
        if sum(each.size for each in self.memory.values()) + size_bytes > self.limit_bytes:
            raise KernelError(f"allocating {size_bytes} bytes: CUDA_ERROR_OUT_OF_MEMORY")
        self.memory[address] = np.full(size_bytes, 0xEE, np.uint8)  # whatever was there before
        return address

    def unmap(self, address: int, size_bytes: int, handle: object) -> None:
        on_the_way = [
            start for _, start, _, size in self._started if start < address + size_bytes and address < start + size
        ]
        assert not on_the_way, "memory is taken away while it is copied"
        assert handle == address
        assert self.memory.pop(address).size == size_bytes

    def zero(self, address: int, size_bytes: int) -> None:
        self._started.append(("zero", address, 0, size_bytes))

    def copy_to_host(self, host_address: int, address: int, size_bytes: int) -> None:
        self._check_pinned(host_address, size_bytes)
        self._started.append(("save", address, host_address, size_bytes))

    def copy_to_device(self, address: int, host_address: int, size_bytes: int) -> None:
        self._check_pinned(host_address, size_bytes)
        self._started.append(("load", address, host_address, size_bytes))

    def mark(self) -> object:
        self._marks += 1
        self._started.append(("mark", self._marks, 0, 0))
        return self._marks

    def wait(self, event: object) -> None:
        number = next(at for at, (kind, mark, _, _) in enumerate(self._started) if (kind, mark) == ("mark", event))
        self._do(self._started[:number])
        del self._started[: number + 1]

    def synchronize(self) -> None:
        self._do(self._started)
        self._started.clear()

    def _do(self, started: list[tuple[str, int, int, int]]) -> None:
        for kind, address, host_address, size in started:
            if kind == "mark":
                continue
            device = self._range(address, size)
            if kind == "zero":
                device[:] = 0
                continue
            host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(host_address))
            target, source = (host, device) if kind == "save" else (device, host)
            target[:] = source

    def pin(self, host_address: int, size_bytes: int) -> None:
        self._fail("pin")
        assert host_address not in self.pinned
        self.pinned[host_address] = size_bytes
        self.log.append("pin")

    def unpin(self, host_address: int) -> None:
        assert not self._started, "memory is unpinned while it is copied"
        del self.pinned[host_address]

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        self._range(address, data.size)[:] = data

    def read(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        return self._range(address, size_bytes).copy()

    def _range(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """A range, which must lie in one mapped segment."""
        for start, memory in self.memory.items():
            if start <= address and address + size_bytes <= start + memory.size:
                return memory[address - start : address - start + size_bytes]
        raise AssertionError(f"nothing is mapped at {address}")

    def _check_pinned(self, address: int, size_bytes: int) -> None:
        inside = [start <= address and address + size_bytes <= start + size for start, size in self.pinned.items()]
        assert any(inside), "a copy leaves what was pinned at once"

    def _fail(self, name: str) -> None:
        if name in self.fails:
            self.fails.discard(name)
            raise KernelError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY")
