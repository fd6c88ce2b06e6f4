"""Copies of KV blocks and snapshots between the device and the host, in the order of steps. torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.device_errors import device_errors


def bytes_of_one(planes: Sequence[torch.Tensor]) -> int:
    """Bytes of one block or snapshot in all planes, whose first axis it is."""
    return sum(plane[0].numel() * plane.element_size() for plane in planes)


def read_places(
    planes: Sequence[torch.Tensor], places: Sequence[int], device: DeviceProfile
) -> Callable[[], NDArray[np.uint8]]:
    """As `SavesCache.read_cached`: they are gathered behind the steps that were submitted, and copied at once."""
    with device_errors(device.torch_device):
        index = _index(places, device)
        gathered = [plane.index_select(0, index).flatten(1).view(torch.uint8) for plane in planes]
        joined = torch.cat(gathered, dim=1)
        copied = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=device.is_gpu)
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
        index = _index(places, device)
        copied = torch.from_numpy(contents).to(device.torch_device, non_blocking=True)
        start = 0
        for plane in planes:
            end = start + bytes_of_one([plane])
            own = copied[:, start:end].contiguous().view(plane.dtype)
            plane.index_copy_(0, index, own.view(len(places), *plane.shape[1:]))
            start = end
        return _waits(device)


def _index(places: Sequence[int], device: DeviceProfile) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int64, pin_memory=device.is_gpu).to(device.torch_device, non_blocking=True)


def _waits(device: DeviceProfile) -> Callable[[], None]:
    """What waits for all that the device has been given by now."""
    if not device.is_gpu:
        return lambda: None
    event = torch.cuda.current_stream(device.torch_device).record_event()

    def wait() -> None:
        with device_errors(device.torch_device):
            event.synchronize()

    return wait
