"""What the ranks of a model share: `RankMemory`, through which they exchange rows on one machine, and `RankPlace`."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64
_MOST_PAGE = 4096


class RankMemory:
    """A head of one cache line for all, and one for each rank; then two halves, each with a slot for each rank.

    Exchanges use the halves by turns, so that a rank may write the next one while others still read the last. The first
    word of the head says that no rank must wait any more, and that of a rank's line how many exchanges it has written.

    Args:
        ranks: 2 or more.
        floats: float32 of a slot; 0 where devices exchange rows.
        descriptor: of the memory that another process made; None makes it.
    """

    def __init__(self, ranks: int, floats: int, descriptor: int | None = None) -> None:
        self.ranks, self.slot_bytes = ranks, _whole_lines(floats)
        head = -(-(1 + ranks) * LINE_BYTES // _MOST_PAGE) * _MOST_PAGE
        size = head + 2 * ranks * self.slot_bytes
        self.descriptor = os.memfd_create("realizar-ranks") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        mapped: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        self._words = mapped[:head].view(np.int64)
        self.at = int(mapped.ctypes.data)
        self.slots_at = self.at + head
        self._on_break: list[Callable[[], None]] = []
        self._breaking = threading.Lock()

    @property
    def is_broken(self) -> bool:
        return bool(self._words[0])

    def num_exchanges(self) -> list[int]:
        """Those that each rank has written; 0 where devices exchange rows."""
        line = LINE_BYTES // self._words.itemsize
        return [int(count) for count in self._words[line : (1 + self.ranks) * line : line]]

    def break_off(self) -> None:
        """Let nobody wait for another rank any more: what steps compute from now on means nothing."""
        self._words[0] = 1
        with self._breaking:
            runs, self._on_break = self._on_break, []
        for run in runs:
            run()

    def on_break(self, run: Callable[[], None]) -> None:
        """Have `break_off` run this once, where it is called in this process, by whichever thread."""
        self._on_break.append(run)

    def close(self) -> None:
        """Close the descriptor; the memory stays until nobody uses it."""
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place among those of a model. `exchange`, in loads, takes its word and gives those of all, by rank;
    DeviceLostError: one is gone, and else what another one's load has raised.
    """

    rank: int
    ranks: int
    memory: RankMemory
    exchange: Callable[[bytes], Sequence[bytes]]


def slot_bytes(floats: int, ranks: int) -> int:
    """Bytes of the slots of all ranks, of so many float32 each."""
    return 2 * ranks * _whole_lines(floats)


def _whole_lines(floats: int) -> int:
    return -(-4 * floats // LINE_BYTES) * LINE_BYTES
