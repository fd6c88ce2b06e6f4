"""`MaskMemory`: memory that the engine's process shares with the grammars' processes: questions of rows, and masks.

Each row has a slot, and each fact of a slot a column. The engine writes what it asks and then the question's number;
the process that follows the row writes the masks and then the same number as answered. So a question costs no message.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOES_ON, ENDED, STUCK = 0, 1, 2
"""States of a row: its output goes on, is complete, or can't go on; of the last, a message has told the reason."""

MOST_TOKENS = 32  # of a question; a row with more is followed anew
_LOCK = threading.Lock()


def fence() -> None:
    """Order what was read and written before among all processes: a lock that is let go of and taken again does so."""
    with _LOCK:
        pass
    with _LOCK:
        pass


class MaskMemory:
    """An unnamed file that all these processes map. Memory is used as it is written.

    Attributes:
        keys: int64 [slots], the key of the row that a question is about; see `messages.Follow`.
        asked: int64 [slots], the number of the last question, written last by the engine.
        answered: int64 [slots], the number of the last answer, written last by the process.
        states: int32 [slots], GOES_ON, ENDED or STUCK, with the last answer.
        num_tokens, num_drafts: int32 [slots], of the last question.
        num_forced: int32 [slots], how many tokens from the last answer on are certain, as the grammar allows no others;
            the process finds more of them meanwhile.
        tokens: int32 [slots, MOST_TOKENS], ids chosen since the question before.
        drafts: int32 [slots, most_drafts], proposed next tokens.
        forced: int32 [slots, MOST_TOKENS], those tokens.
        masks: uint32 [slots, words], the mask of the next choice; empty if the row is stuck.
        masks_after_drafts: uint32 [slots, most_drafts, words].

    Args:
        num_words: uint32 words of a mask.
        most_drafts: of a row.
        descriptor: descriptor of an existing file; None makes one.
    """

    def __init__(self, num_words: int, num_slots: int, most_drafts: int, descriptor: int | None = None) -> None:
        self.descriptor = _unnamed_file() if descriptor is None else descriptor
        columns: list[tuple[str, type[np.generic], tuple[int, ...]]] = [
            *((name, np.int64, (num_slots,)) for name in ("keys", "asked", "answered")),
            *((name, np.int32, (num_slots,)) for name in ("states", "num_tokens", "num_drafts", "num_forced")),
            *((name, np.int32, (num_slots, MOST_TOKENS)) for name in ("tokens", "forced")),
            ("drafts", np.int32, (num_slots, most_drafts)),
            ("masks", np.uint32, (num_slots, num_words)),
            ("masks_after_drafts", np.uint32, (num_slots, most_drafts, num_words)),
        ]
        ends, end = [], 0
        for _, dtype, shape in columns:
            end += -(-np.dtype(dtype).itemsize * int(np.prod(shape)) // mmap.PAGESIZE) * mmap.PAGESIZE
            ends.append(end)
        if descriptor is None:
            os.ftruncate(self.descriptor, end)
        self._map: mmap.mmap | None = mmap.mmap(self.descriptor, end)
        views: dict[str, Any] = {}
        for (name, dtype, shape), start in zip(columns, [0, *ends], strict=False):
            count = int(np.prod(shape))
            views[name] = np.frombuffer(self._map, dtype, count, start if count else 0).reshape(shape)
        self.keys: NDArray[np.int64] = views["keys"]
        self.asked: NDArray[np.int64] = views["asked"]
        self.answered: NDArray[np.int64] = views["answered"]
        self.states: NDArray[np.int32] = views["states"]
        self.num_tokens: NDArray[np.int32] = views["num_tokens"]
        self.num_drafts: NDArray[np.int32] = views["num_drafts"]
        self.num_forced: NDArray[np.int32] = views["num_forced"]
        self.forced: NDArray[np.int32] = views["forced"]
        self.tokens: NDArray[np.int32] = views["tokens"]
        self.drafts: NDArray[np.int32] = views["drafts"]
        self.masks: NDArray[np.uint32] = views["masks"]
        self.masks_after_drafts: NDArray[np.uint32] = views["masks_after_drafts"]

    @property
    def num_slots(self) -> int:
        return len(self.keys)

    @property
    def most_drafts(self) -> int:
        return int(self.drafts.shape[1])

    def of(self, slot: int, num_drafts: int) -> NDArray[np.uint32]:
        """A row's masks, uint32 [drafts + 1, words]; a view if it has no drafts."""
        first = self.masks[slot : slot + 1]
        return np.concatenate((first, self.masks_after_drafts[slot, :num_drafts])) if num_drafts else first

    def close(self) -> None:
        """Close the file; the mapping lasts until its last view is freed. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._map = -1, None


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("realizar-masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
