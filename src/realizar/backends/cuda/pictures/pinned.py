"""`PinnedRoom`: memory of the host from which a device fetches features, and where it leaves them."""

from __future__ import annotations

import logging
import math
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.machine import memory_bytes

_LOG = logging.getLogger(__name__)
_SHARE, _LEAST_BYTES, _MOST_BYTES = 1 / 64, 256 << 20, 2 << 30  # of the host's memory
_PAGE = 4096
Floats: TypeAlias = NDArray[np.float32]


def pinned_bytes() -> int:
    """Of the host's memory, that an encoder on a GPU takes for features."""
    return min(max(int(memory_bytes() * _SHARE), _LEAST_BYTES), _MOST_BYTES)


class PinnedRoom:
    """Pinned memory of the host that is taken once: to take 64 MiB anew stops all launches for 0.1 s."""

    def __init__(self, num_bytes: int, *, is_gpu: bool) -> None:
        try:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        except RuntimeError as error:
            _LOG.warning("features of images have no memory of their own, and take some each: %s", error)
            self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken: list[tuple[int, int]] = []  # ascending, from and to
        self._free = deque[tuple[int, int]]()  # of these, whose arrays have ended, on whatever thread

    def take(self, shape: Sequence[int]) -> Floats | None:
        """An array whose memory is free again once nothing refers to it; None where there is no room for it.

        One thread at a time calls this.
        """
        while self._free:
            self._taken.remove(self._free.popleft())
        num_bytes, start = 4 * math.prod(shape), 0
        for first, end in (*self._taken, (len(self._memory), 0)):
            if start + num_bytes <= first:
                break
            start = end
        else:
            return None
        place = start, start + -(-num_bytes // _PAGE) * _PAGE
        insort(self._taken, place)
        found: Floats = self._memory[start : start + num_bytes].view(torch.float32).view(*shape).numpy()
        weakref.finalize(found, self._free.append, place).atexit = False
        return found
