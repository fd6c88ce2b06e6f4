"""`HostCopies`: memory of the host that the results of a step are copied to, used by one step after another. torch."""

from __future__ import annotations

import torch

_ALIGNMENT = 16
_MOST_VIEWS = 1024


class HostCopies:
    """Copies of a step's results on their way to the host.

    They lie in memory of fixed size, which the driver can write while the host works; what does not fit gets memory of
    its own. Memory that is allocated for each copy costs more time than the copy.

    Args:
        size_bytes: room of the results of most steps.
        device: where the results are.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._room = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._used = 0
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}  # of parts of the room, made before

    def begin(self) -> None:
        """Begin the copies of another step; those of the step before were read."""
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host's copy of a tensor, which is there after `wait`; `done` must follow the last one."""
        start, size = self._used, tensor.nbytes
        if start + size > len(self._room):
            return tensor.to("cpu", non_blocking=True, copy=True)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        key = start, tensor.dtype, tensor.shape
        if (copied := self._views.get(key)) is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            copied = self._views[key] = self._room[start : start + size].view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor, non_blocking=True)

    def done(self) -> None:
        """Mark that every copy of the step has been started."""
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        """Wait for the copies."""
        if self._done is not None:
            self._done.synchronize()
