"""Copies of KV blocks and snapshots between the device and the host, in the order of steps. torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.kernels.places import move_places

_MOVED = 2048  # integers that a program moves
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bytes_of_one(planes: Sequence[torch.Tensor]) -> int:
    """Bytes of one block or snapshot in all planes, whose first axis it is."""
    return sum(plane.nbytes // len(plane) for plane in planes)


def read_places(
    planes: Sequence[torch.Tensor], places: Sequence[int], device: DeviceProfile
) -> Callable[[], NDArray[np.uint8]]:
    """As `SavesCache.read_cached`: they are gathered behind the steps that were submitted, and copied at once."""
    with device_errors(device.torch_device):
        shape = len(places), bytes_of_one(planes)
        joined = torch.empty(shape, dtype=torch.uint8, device=device.torch_device)
        _move(planes, places, joined, device, into_cache=False)
        copied = torch.empty(shape, dtype=torch.uint8, pin_memory=device.is_gpu)
        copied.copy_(joined, non_blocking=True)
        wait = _waits(device)

    def contents() -> NDArray[np.uint8]:
        wait()
        found: NDArray[np.uint8] = copied.numpy()
        return found

    return contents


def write_places(
    planes: Sequence[torch.Tensor], places: Sequence[int], contents: NDArray[np.uint8], device: DeviceProfile
) -> Callable[[], None]:
    """As `SavesCache.write_cached`."""
    with device_errors(device.torch_device):
        joined = torch.from_numpy(contents).to(device.torch_device, non_blocking=True)
        _move(planes, places, joined, device, into_cache=True)
        return _waits(device)


def _move(
    planes: Sequence[torch.Tensor], places: Sequence[int], joined: torch.Tensor, device: DeviceProfile, *,
    into_cache: bool,
) -> None:  # fmt: skip
    """Copy between uint8 [places, bytes] and the places, all planes by one kernel: 64 and more of them were as many
    launches, for which the engine's thread and those that read files waited.
    """
    assert all(plane.is_contiguous() for plane in planes)
    sizes, addresses = [plane.nbytes // len(plane) for plane in planes], [plane.data_ptr() for plane in planes]
    width = math.gcd(8, *sizes, *addresses)
    lines, first = [*places], 0
    for address, size in zip(addresses, sizes, strict=True):
        lines += [address, size // width, first // width]
        first += size
    table = torch.tensor(lines, dtype=torch.int64, pin_memory=device.is_gpu)
    move_places[(len(places), len(planes), -(-max(sizes) // (width * _MOVED)))](
        joined.view(_INTEGERS[width]), first // width, table.to(device.torch_device, non_blocking=True), len(places),
        INTO_CACHE=into_cache, BLOCK=_MOVED,
    )  # fmt: skip


def _waits(device: DeviceProfile) -> Callable[[], None]:
    """What waits for all that the device has been given by now."""
    if not device.is_gpu:
        return lambda: None
    event = torch.cuda.current_stream(device.torch_device).record_event()

    def wait() -> None:
        with device_errors(device.torch_device):
            event.synchronize()

    return wait
